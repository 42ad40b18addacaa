"""What an update leaves a GPU to wait for."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve

from rollgrad.adapters.models.torch.gradients import on_one_thread
from rollgrad.adapters.models.torch.loading import load_causal_lm, load_tokenizer
from rollgrad.adapters.models.torch.models import TorchPolicy
from rollgrad.domain.algorithms.losses.objectives import PolicyLossObjective
from rollgrad.domain.batches.packed import RolloutBatch
from rollgrad.domain.ports.models import LossOutput, TokenScores
from tests.fakes import cluster
from tests.pretended_gpu import CUDA, pretended_gpu
from tests.tiny_architectures import tiny_model

CPU = torch.device("cpu")
THREADS = 3


@pytest.fixture(autouse=True)
def several_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def path(tiny_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("qwen3")
    tiny_model("qwen3", vocab_size=len(tiny_tokenizer)).save_pretrained(path)
    tiny_tokenizer.save_pretrained(path)
    return path


def policy(path: Path, device: torch.device) -> TorchPolicy:
    model = load_causal_lm(str(path), dtype=torch.bfloat16, device=device, flag=cluster.FLAG)
    return TorchPolicy(model, load_tokenizer(str(path), flag=cluster.FLAG), evolve(cluster.SETTINGS, ema_beta=None))


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
