"""Whole passes, updates and generations on a GPU that is pretended: every tensor is where it has to be, and the numbers
are those of the CPU."""

import asyncio
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve

from rollgrad.adapters.engines.embedded.decoding import check_decoding
from rollgrad.adapters.engines.embedded.engine import EmbeddedEngine
from rollgrad.adapters.models.torch.forward import PackedLM, scattered
from rollgrad.adapters.models.torch.heads.allowed_tokens import follow_grammars
from rollgrad.adapters.models.torch.heads.distillation import DistillationSettings, KeptTeacher
from rollgrad.adapters.models.torch.layers.padded import is_padded
from rollgrad.adapters.models.torch.loading.loading import load_causal_lm, load_tokenizer
from rollgrad.adapters.models.torch.loading.lora import add_lora
from rollgrad.adapters.models.torch.models import TorchPolicy
from rollgrad.adapters.models.torch.references import TorchReference
from rollgrad.adapters.models.torch.rewards.value import TorchValue
from rollgrad.application.settings.sections.actor import AdapterConfig
from rollgrad.domain.algorithms.losses.centering import ScoreCentering
from rollgrad.domain.algorithms.losses.objectives import PolicyLossObjective
from rollgrad.domain.batches.packed import PackedBatch
from rollgrad.domain.episodes.generation import Generation, GenerationRequest, SamplingParams
from tests.fakes import cluster, grammars
from tests.pretended_gpu import CUDA, TO_GPU, OnGPU, pretended_gpu
from tests.tiny_architectures import tiny_model

FLAG = cluster.FLAG
CPU = torch.device("cpu")
WAITS_A_STEP = 6
"""Times at most that a step of decoding waits for what the GPU computes."""
KINDS = ("llama", "gemma3_text", "qwen3_moe", "gpt2", "gpt_oss", "gemma2", "qwen3_5_text", "lfm2", "bloom")
"""Grouped heads; windows; experts; biases and learned positions; sinks; capped scores; states; a model that is computed
padded."""
LIKE_OTHERS = ("gemma3_text", "qwen3_moe", "lfm2")
"""Types whose windows, experts and states those of other types among them are like."""


@pytest.fixture(scope="module", params=KINDS)
def path(request: pytest.FixtureRequest, tiny_tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    tiny_model(request.param, vocab_size=len(tiny_tokenizer)).save_pretrained(path)
    tiny_tokenizer.save_pretrained(path)
    return path


def test_a_tensor_that_was_not_moved_is_found() -> None:
    with pretended_gpu() as waited:
        tensor = torch.arange(3, device=CUDA)
        assert (tensor + 1).device == CUDA
        for other in (torch.ones(3), torch.ones(3, dtype=torch.bool)):
            with pytest.raises(AssertionError, match="of the CPU beside those of the GPU"):
                tensor[other] if other.dtype == torch.bool else tensor + other
        assert tensor.to(CPU).tolist() == [0, 1, 2]
        assert waited == {"to cpu": 1}


def loaded(path: Path, device: torch.device, dtype: torch.dtype = torch.float32) -> Any:
    model = load_causal_lm(str(path), dtype=dtype, device=device, flag=FLAG)
    assert is_padded(model) is ("bloom" in path.name), "a pass that raises is left to padding"
    return model


def trained(path: Path, device: torch.device, dtype: torch.dtype, **settings: Any) -> list[dict[str, float]]:
    """Metrics of updates, between which the state is saved and loaded."""
    policy = TorchPolicy(
        loaded(path, device, dtype), load_tokenizer(str(path), flag=FLAG), cluster.SETTINGS, **settings
    )
    kind = OnGPU if device.type == "cuda" else torch.nn.Parameter
    assert all(isinstance(parameter, kind) for parameter in policy.module.parameters())
    batch = cluster.batch()
    weights = batch.action_mask_N / batch.action_mask_N.sum()
    batch = evolve(batch, advantages_N=torch.linspace(-1, 1, batch.token_count), loss_weights_N=weights)
    metrics = []
    for _ in range(2):
        metrics.append(policy.update([batch, batch], PolicyLossObjective(entropy_coef=0.01)))
        policy.load_state_dict(policy.state_dict())
    scores = policy.score(batch)
    assert not isinstance(scores.logprobs_N, OnGPU)
    assert all(isinstance(tensor, OnGPU) == (device.type == "cuda") for _, tensor in policy.weights())
    averages = sum(float(average.norm()) for average in policy.state_dict()["averages"].values())
    return [*metrics, {"averages": averages}, {"score": float(scores.logprobs_N.sum())}]


@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.wide), torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "path",
    [pytest.param(name, marks=pytest.mark.wide if name in LIKE_OTHERS else ()) for name in KINDS],
    indirect=True,
)
def test_an_update_on_a_gpu_is_the_cpu_s(path: Path, dtype: torch.dtype) -> None:
    expected = trained(path, CPU, dtype)
    with pretended_gpu():
        found = trained(path, CUDA, dtype)
    rounding = 1e-5 if dtype == torch.float32 else 0.06
    for mine, theirs in zip(found, expected, strict=True):
        assert mine == pytest.approx(theirs, rel=rounding, abs=rounding)


def centred(batch: PackedBatch) -> tuple[PackedBatch, dict[str, Any]]:
    ids_NK = torch.arange(3, dtype=torch.int32).expand(batch.token_count, 3).contiguous()
    likely = evolve(batch, sampler_ids_NK=ids_NK, sampler_logprobs_NK=torch.full(ids_NK.shape, -2.0))
    return likely, {"centering": ScoreCentering()}


def taught(batch: PackedBatch) -> tuple[PackedBatch, dict[str, Any]]:
    ids_NK = torch.arange(3, dtype=torch.int32).expand(batch.token_count, 3).contiguous()
    logprobs_NB = torch.full((batch.token_count, 4), 0.25).log()
    told = evolve(batch, teacher_ids_NK=ids_NK, teacher_logprobs_NK=logprobs_NB)
    return told, {"teacher": KeptTeacher(DistillationSettings(top_k=3))}


def prescribed(batch: PackedBatch) -> tuple[PackedBatch, dict[str, Any]]:
    return grammars.prescribed(batch), {}


@pytest.mark.parametrize("told", [centred, taught, prescribed])
@pytest.mark.parametrize("path", ["llama"], indirect=True)
def test_nothing_that_a_batch_says_of_tokens_waits_for_a_pass(path: Path, told: Callable[..., Any]) -> None:
    """A pass and its gradient wait as often as without it: once for the results, and once for their gradients."""
    plain = cluster.batch()
    more, settings = told(plain)
    waits = []
    for batch, given in ((plain, {}), (more, settings)):
        found = []
        for device in (CPU, CUDA):
            with pretended_gpu() if device == CUDA else nullcontext(Counter[str]()) as waited:
                model = loaded(path, device)
                follow_grammars(model, grammars.chance_masks(model.config.vocab_size))
                packed = PackedLM(model, **given)
                waited.clear()
                columns_KN = scattered(packed(batch), batch)
                torch.stack(columns_KN).sum().backward()  # type: ignore[no-untyped-call]
                waits.append(waited.copy())
                found.append(torch.stack(columns_KN).detach())
        torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)
    assert waits[1] == waits[3]


def adapted(path: Path, device: torch.device, dora: bool = False) -> list[dict[str, float]]:
    """Metrics of updates of adapters with dropout, on embeddings with noise, and norms of the weights after them."""
    model = loaded(path, device)
    add_lora(model, AdapterConfig(rank=2, alpha=4, dropout=0.0 if dora else 0.1, dora=dora), seed=0)
    policy = TorchPolicy(model, load_tokenizer(str(path), flag=FLAG), cluster.SETTINGS, neftune_alpha=1.0)
    return [cluster.trained(policy), {str(n): float(t.float().cpu().norm()) for n, t in enumerate(weights(policy))}]


def turned(path: Path, device: torch.device) -> list[dict[str, float]]:
    """Returns the same of adapters without dropout that turn weights whose lengths are trained."""
    return adapted(path, device, dora=True)


def weights(policy: TorchPolicy) -> list[torch.Tensor]:
    return [tensor for _, tensor in policy.weights()]


def critic(path: Path, device: torch.device) -> list[dict[str, float]]:
    """Metrics of a critic's updates, and its values."""
    value = TorchValue(loaded(path, device), load_tokenizer(str(path), flag=FLAG), cluster.SETTINGS)
    return [cluster.fitted(value), {"values": float(value.values(cluster.batch()).sum())}]


def reference(path: Path, device: torch.device) -> list[dict[str, float]]:
    scores = TorchReference(loaded(path, device)).score(cluster.batch())
    return [{"logprobs": float(scores.logprobs_N.sum()), "entropy": float(scores.entropy_N.sum())}]


COMPUTED = (adapted, turned, critic, reference)


@pytest.mark.parametrize(
    ("path", "compute"),
    [
        *(("llama", compute) for compute in COMPUTED),
        ("gpt_oss", adapted),
        *(pytest.param("gpt_oss", compute, marks=pytest.mark.wide) for compute in COMPUTED[1:]),
        *(
            pytest.param(name, compute, marks=pytest.mark.wide)
            for name in ("gemma3_text", "gemma2")
            for compute in COMPUTED
        ),
    ],
    indirect=["path"],
)
def test_other_models_on_a_gpu_are_the_cpu_s(path: Path, compute: Callable[..., list[dict[str, float]]]) -> None:
    expected = compute(path, CPU)
    with pretended_gpu():
        found = compute(path, CUDA)
    for mine, theirs in zip(found, expected, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-5, abs=1e-5)


async def sampled(model: Any) -> list[Generation]:
    """Replies of which some begin while others go on, are continued, limited or greedy."""
    engine = EmbeddedEngine(model, eos_token_ids=(), max_batch_size=3)
    asked = [
        GenerationRequest(prompt_token_ids=(5, *range(7, 7 + length)), params=SamplingParams(**params), keep=True)
        for length, params in (
            (3, {"max_new_tokens": 9, "seed": 1}),
            (122, {"max_new_tokens": 4, "seed": 2, "top_k": 7, "top_p": 0.9}),
            (20, {"max_new_tokens": 12, "temperature": 0.0, "top_logprobs": 2}),
            (3, {"max_new_tokens": 5, "seed": 3, "temperature": 0.7, "min_new_tokens": 3, "stop_token_ids": (9,)}),
        )
    ]
    replies = await asyncio.gather(*map(engine.generate, asked))
    begun = (*asked[0].prompt_token_ids, *replies[0].token_ids, 11, 12)
    following = GenerationRequest(prompt_token_ids=begun, params=SamplingParams(max_new_tokens=3, seed=4))
    replies.append(await engine.generate(following))
    await engine.sleep()
    return replies


@pytest.mark.parametrize("path", ["qwen3_5_text", "lfm2"], indirect=True)
def test_states_stay_on_a_gpu(path: Path) -> None:
    """The engine's passes under `no_grad`: in inference mode the double of a GPU has no views of weights."""
    with pretended_gpu():
        check_decoding(loaded(path, CUDA), FLAG)


@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.wide), torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "path",
    ["llama", pytest.param("gemma3_text", marks=pytest.mark.wide), "gpt_oss", "gemma2", "bloom"],
    indirect=True,
)
async def test_an_engine_samples_on_a_gpu_what_it_does_on_the_cpu(path: Path, dtype: torch.dtype) -> None:
    expected = await sampled(loaded(path, CPU, dtype))
    with pretended_gpu() as waited:
        model = loaded(path, CUDA, dtype)
        check_decoding(model, FLAG)
        waited.clear()
        found = await sampled(model)
        steps = max(len(reply.token_ids) for reply in found) + len(found[-1].token_ids)
        assert sum(waited.values()) - waited[TO_GPU] < WAITS_A_STEP * steps, waited
    if dtype == torch.float32:
        assert [reply.token_ids for reply in found] == [reply.token_ids for reply in expected]
        for mine, theirs in zip(found, expected, strict=True):
            assert mine.logprobs == pytest.approx(theirs.logprobs, abs=1e-5)
