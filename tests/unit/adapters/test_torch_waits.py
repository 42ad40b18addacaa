"""How often the CPU waits for a GPU in an update and in a step of decoding, and what it leaves the GPU to wait for."""

import asyncio
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve

from rollgrad.adapters.engines.embedded.engine import EmbeddedEngine
from rollgrad.adapters.models.torch.kernels.moving import to_device
from rollgrad.adapters.models.torch.layers.images import joined_tensors
from rollgrad.adapters.models.torch.layers.unread_positions import unread_positions
from rollgrad.adapters.models.torch.loading.loading import load_causal_lm, load_tokenizer
from rollgrad.adapters.models.torch.models import TorchPolicy
from rollgrad.adapters.models.torch.optimizers.gradients import on_one_thread
from rollgrad.domain.algorithms.losses.objectives import PolicyLossObjective
from rollgrad.domain.batches.packed import RolloutBatch
from rollgrad.domain.episodes.generation import GenerationRequest, SamplingParams
from rollgrad.domain.episodes.images import Image, PlacedImage
from rollgrad.domain.ports.models import LossOutput, TokenScores
from tests.fakes import cluster
from tests.pretended_gpu import CUDA, TO_CPU, on_cpu, pretended_gpu
from tests.tiny_architectures import tiny_model

CPU = torch.device("cpu")
THREADS = 3
NUMBER = "aten._local_scalar_dense.default"
A_PASS = {TO_CPU: 1}
"""The columns of the action tokens."""
A_STEP = {NUMBER: 2}
"""The norm of the gradient, by which it is clipped or refused, and that of the weights afterwards."""


@pytest.fixture(autouse=True)
def several_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def path(tiny_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    tiny_model("llama", vocab_size=len(tiny_tokenizer)).save_pretrained(path)
    tiny_tokenizer.save_pretrained(path)
    return path


def policy(path: Path, device: torch.device, **settings: Any) -> TorchPolicy:
    model = load_causal_lm(str(path), dtype=torch.bfloat16, device=device, flag=cluster.FLAG)
    optimizer = evolve(cluster.SETTINGS, ema_beta=None)
    return TorchPolicy(model, load_tokenizer(str(path), flag=cluster.FLAG), optimizer, **settings)


def batch() -> RolloutBatch:
    packed: RolloutBatch = cluster.batch()
    weights = packed.action_mask_N / packed.action_mask_N.sum()
    return evolve(packed, advantages_N=torch.linspace(-1, 1, packed.token_count), loss_weights_N=weights)


class Threads:
    """An objective that notes the threads of torch."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def __call__(self, scores: TokenScores, batch: RolloutBatch) -> LossOutput:
        self.seen.append(torch.get_num_threads())
        return PolicyLossObjective()(scores, batch)


def test_a_loss_that_a_gpu_waits_for_takes_one_thread(path: Path) -> None:
    with pretended_gpu():
        on_a_gpu = Threads()
        policy(path, CUDA).update([batch(), batch()], on_a_gpu)
        with pytest.raises(ZeroDivisionError), on_one_thread():
            _ = torch.get_num_threads() // 0
        assert torch.get_num_threads() == THREADS
    on_the_cpu = Threads()
    policy(path, CPU).update([batch(), batch()], on_the_cpu)
    assert (on_a_gpu.seen, on_the_cpu.seen) == ([1, 1], [THREADS, THREADS])


def test_what_a_gpu_is_waited_for(path: Path) -> None:
    """A wait that is added here has to be worth it: the GPU computes nothing until the CPU tells it what comes next."""
    with pretended_gpu() as waited:
        trained = policy(path, CUDA)
        trained.update([batch()], PolicyLossObjective(entropy_coef=0.01))  # looks at all gradients, too
        for micro_batches in (1, 3):
            waited.clear()
            trained.update([batch()] * micro_batches, PolicyLossObjective(entropy_coef=0.01))
            assert waited == Counter(A_STEP) + Counter({each: n * micro_batches for each, n in A_PASS.items()})
        waited.clear()
        trained.score(batch())
        assert waited == Counter(A_PASS)


@pytest.mark.parametrize("settings", [{"neftune_alpha": 1.0}, {"outcomes": (7, 8)}], ids=str)
def test_what_a_pass_is_given_beside_its_batch_is_not_waited_for(path: Path, settings: dict[str, Any]) -> None:
    with pretended_gpu() as waited:
        trained = policy(path, CUDA, **settings)
        trained.update([batch()], cluster.likelihood)
        waited.clear()
        trained.update([batch()] * 2, cluster.likelihood)
        assert waited == Counter(A_STEP) + Counter(A_PASS) + Counter(A_PASS)


def test_images_are_not_waited_for() -> None:
    tensors = {"pixel_values": torch.ones(4, 3), "image_grid_thw": torch.ones(1, 3, dtype=torch.int64)}
    placed = PlacedImage(start=0, stop=4, image=Image(digest="", data=b"", tensors=tensors))
    with pretended_gpu() as waited:
        moved = joined_tensors([placed, placed], CUDA, torch.bfloat16)
        assert {name: (tensor.device, tensor.dtype) for name, tensor in moved.items()} == {
            "pixel_values": (CUDA, torch.bfloat16),
            "image_grid_thw": (CUDA, torch.int64),
        }
        assert not waited


def test_transformers_reads_the_positions_of_other_models(path: Path) -> None:
    from transformers import masking_utils

    policy(path, CPU).score(batch())
    several = torch.tensor([[0, 1, 0, 1, 2]])
    assert masking_utils.find_packed_sequence_indices(several).tolist() == [[0, 0, 1, 1, 1]]
    with unread_positions():
        assert masking_utils.find_packed_sequence_indices(several) is None


def test_what_is_moved_may_change_at_once() -> None:
    with pretended_gpu() as waited:
        tensor = torch.arange(3)
        moved = to_device(tensor, CUDA)
        tensor.zero_()
        assert (moved.device, on_cpu(moved).tolist(), waited) == (CUDA, [0, 1, 2], Counter())
        assert to_device(moved, CUDA) is moved
    assert to_device(tensor, CPU) is tensor


SAMPLING: dict[str, Any] = {
    "greedy": {"temperature": 0.0},
    "as it is": {},
    "limited": {"temperature": 0.7, "top_k": 5, "top_p": 0.9},
    "no early end": {"min_new_tokens": 9, "stop_token_ids": (3, 4)},
    "told the likeliest": {"top_logprobs": 3},
}


@pytest.mark.parametrize(
    ("sampling", "captured"),
    [
        *((name, True) for name in SAMPLING),
        ("as it is", False),
        *(pytest.param(name, False, marks=pytest.mark.wide) for name in SAMPLING if name != "as it is"),
    ],
)
async def test_a_step_of_decoding_waits_for_its_tokens_alone(path: Path, sampling: str, captured: bool) -> None:
    with pretended_gpu() as waited:
        model = load_causal_lm(str(path), dtype=torch.bfloat16, device=CUDA, flag=cluster.FLAG)
        engine = EmbeddedEngine(model, eos_token_ids=(2,), max_batch_size=4)
        if not captured:
            engine._batch.decoder._graphs = None  # type: ignore[union-attr]

        async def waits(tokens: int) -> Counter[str]:
            waited.clear()
            params = [SamplingParams(max_new_tokens=tokens, seed=seed, **SAMPLING[sampling]) for seed in range(3)]
            asked = [GenerationRequest(prompt_token_ids=(5, *range(7, 9 + n)), params=p) for n, p in enumerate(params)]
            replies = await asyncio.gather(*map(engine.generate, asked))
            assert {len(reply.token_ids) for reply in replies} == {tokens}
            return Counter(waited)

        await waits(2)  # captures
        step = await waits(4) - await waits(3)
        copies = {TO_CPU: 2 if sampling == "told the likeliest" else 1}
        assert step == Counter(copies)
