"""Gradients and steps asked for one by one, against torch's own AdamW on the plain model; adapters on a shared base."""

from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve

from rollgrad.adapters.models.torch.loading.loading import load_causal_lm, load_tokenizer
from rollgrad.adapters.models.torch.loading.lora import load_adapter, save_adapter
from rollgrad.adapters.models.torch.models import copied_weights
from rollgrad.adapters.models.torch.stepwise import TorchStepwisePolicy, with_own_adapters
from rollgrad.application.learning.requested import RequestedTraining
from rollgrad.application.settings.sections.actor import LoraConfig
from rollgrad.domain.algorithms.losses.datums import DatumObjective
from rollgrad.domain.batches.datums import Datum
from rollgrad.domain.errors import CheckpointError, ConfigurationError, NonFiniteUpdateError
from rollgrad.domain.ports.models import AdamRates, StepwisePolicy

RATES = AdamRates(lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, max_norm=0.0)
LIKELIHOOD = DatumObjective(loss="cross_entropy")


def datum(tokens: list[int], targets: list[int], weights: list[float]) -> Datum:
    nothing_T = torch.zeros(len(tokens))
    return Datum(
        tokens_T=torch.tensor(tokens),
        targets_T=torch.tensor(targets),
        weights_T=torch.tensor(weights),
        sampled_logprobs_T=nothing_T,
        advantages_T=nothing_T,
    )


DATUMS = [
    datum([5, 6, 7, 8], [6, 7, 8, 9], [0.0, 1.0, 1.0, 2.0]),
    datum([5, 6, 7], [60, 61, 62], [1.0, 0.5, -0.5]),  # targets that do not follow
    datum([40], [41], [1.0]),
]


@pytest.fixture(scope="module")
def base(tiny_model_dir: Path) -> Any:
    return load_causal_lm(str(tiny_model_dir), dtype=torch.float32, device=torch.device("cpu"), flag="--model")


@pytest.fixture
def make(base: Any, tiny_model_dir: Path) -> Any:
    def made(seed: int = 3) -> TorchStepwisePolicy:
        model = with_own_adapters(base, LoraConfig(rank=4), seed=seed)
        return TorchStepwisePolicy(model, load_tokenizer(str(tiny_model_dir), flag="--model"))

    return made


def plain_logprobs(model: Any, each: Datum) -> torch.Tensor:
    """Log-probs of the targets by the model's own forward pass, without packing."""
    logits = model(each.tokens_T[None], use_cache=False).logits[0].float()
    return logits.log_softmax(-1).gather(1, each.targets_T[:, None])[:, 0]


def plain_twin(directory: Path) -> Any:
    """The model with the same adapters, as transformers computes it."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    return with_own_adapters(model, LoraConfig(rank=4), seed=3)


def trainable(model: Any) -> list[torch.nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def test_steps_equal_those_of_torch_on_the_plain_model(make: Any, tiny_model_dir: Path) -> None:
    """Two steps, the first of gradients that were asked for apart, with other rates in each."""
    policy, twin = make(), plain_twin(tiny_model_dir)
    assert isinstance(policy, StepwisePolicy)
    training = RequestedTraining(policy, pass_tokens=6)  # so that a request has several passes
    own = torch.optim.AdamW(trainable(twin), lr=1.0)
    for rates in (RATES, evolve(RATES, lr=3e-3, betas=(0.5, 0.7), eps=1e-4, weight_decay=0.0, max_norm=0.5)):
        found = (
            training.forward_backward(DATUMS[:2], LIKELIHOOD)[0] + training.forward_backward(DATUMS[2:], LIKELIHOOD)[0]
        )
        expected = [plain_logprobs(twin, each) for each in DATUMS]
        for mine_T, theirs_T in zip(found, expected, strict=True):
            torch.testing.assert_close(mine_T, theirs_T.detach(), rtol=1e-5, atol=1e-5)
        own.zero_grad()
        loss = -sum((logprobs_T * each.weights_T).sum() for logprobs_T, each in zip(expected, DATUMS, strict=True))
        loss.backward()  # type: ignore[union-attr]
        norm = torch.nn.utils.clip_grad_norm_(trainable(twin), rates.max_norm or float("inf"))
        for group in own.param_groups:
            group.update(lr=rates.lr, betas=rates.betas, eps=rates.eps, weight_decay=rates.weight_decay)
        own.step()
        assert training.step(rates)["grad_norm"] == pytest.approx(float(norm), rel=1e-4)
        for mine, theirs in zip(trainable(policy.module), trainable(twin), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)


def test_scoring_leaves_no_gradient(make: Any) -> None:
    training = RequestedTraining(make(), pass_tokens=64)
    logprobs, loss = training.forward(DATUMS, LIKELIHOOD)
    again, same = training.forward_backward(DATUMS, LIKELIHOOD)
    assert [found.tolist() for found in logprobs] == [found.tolist() for found in again]
    assert loss == pytest.approx(same)
    assert training.accumulated == len(DATUMS)


def test_a_step_needs_a_gradient(make: Any) -> None:
    training = RequestedTraining(make(), pass_tokens=64)
    training.forward(DATUMS, LIKELIHOOD)
    with pytest.raises(ConfigurationError, match="forward_backward"):
        training.step(RATES)


def test_a_loss_that_is_not_finite_drops_everything(make: Any) -> None:
    policy = make()
    training = RequestedTraining(policy, pass_tokens=64)
    training.forward_backward(DATUMS[:1], LIKELIHOOD)
    broken = evolve(DATUMS[0], weights_T=torch.full((4,), torch.inf))
    with pytest.raises(NonFiniteUpdateError):
        training.forward_backward([broken], LIKELIHOOD)
    training.forward_backward(DATUMS[1:], LIKELIHOOD)
    with pytest.raises(ConfigurationError, match="a part of the gradient"):
        training.step(RATES)
    with pytest.raises(ConfigurationError, match="no gradient"):
        training.step(RATES)
    assert all(parameter.grad is None for parameter in trainable(policy.module))


def test_a_request_that_breaks_off_leaves_nothing_of_its_first_passes(make: Any) -> None:
    policy = make()
    training = RequestedTraining(policy, pass_tokens=6)
    asked: list[int] = []

    def breaking(scores: Any, batch: Any) -> Any:
        asked.append(len(batch))
        if len(asked) > 1:
            raise MemoryError
        return LIKELIHOOD(scores, batch)

    training.forward_backward(DATUMS[:1], LIKELIHOOD)
    with pytest.raises(MemoryError):
        training.forward_backward(DATUMS, breaking)
    assert len(asked) == 2
    with pytest.raises(ConfigurationError):
        training.step(RATES)
    assert all(parameter.grad is None for parameter in trainable(policy.module))


def test_models_on_one_base_share_it_and_nothing_else(base: Any, make: Any) -> None:
    first, second = make(seed=1), make(seed=1)
    shared = {parameter.data_ptr() for parameter in base.parameters()}
    for policy in (first, second):
        assert {p.data_ptr() for p in policy.module.parameters() if not p.requires_grad} == shared
    before = [parameter.clone() for parameter in base.parameters()]
    training = RequestedTraining(first, pass_tokens=64)
    expected = [found.clone() for found in training.forward(DATUMS, LIKELIHOOD)[0]]
    training.forward_backward(DATUMS, LIKELIHOOD)
    training.step(RATES)
    other = RequestedTraining(second, pass_tokens=64).forward(DATUMS, LIKELIHOOD)[0]
    assert all(torch.equal(found, untrained) for found, untrained in zip(other, expected, strict=True))
    assert not torch.equal(training.forward(DATUMS, LIKELIHOOD)[0][0], expected[0])
    assert all(torch.equal(now, then) for now, then in zip(base.parameters(), before, strict=True))
    assert not hasattr(base, "peft_config")


def test_saved_adapters_are_loaded_into_others(make: Any, tmp_path: Path) -> None:
    policy, other = make(seed=1), make(seed=2)
    training = RequestedTraining(policy, pass_tokens=64)
    training.forward_backward(DATUMS, LIKELIHOOD)
    training.step(RATES)
    save_adapter(policy.module, copied_weights(policy.adapter(), keep=True), tmp_path)
    load_adapter(other.module, tmp_path)
    for mine, theirs in zip(trainable(policy.module), trainable(other.module), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("content", [None, b"", b"no tensors"])
def test_adapters_that_cannot_be_read_are_one_sentence(make: Any, tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "adapter_model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match="cannot be loaded"):
        load_adapter(make().module, tmp_path)
