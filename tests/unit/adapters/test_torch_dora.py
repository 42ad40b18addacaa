"""DoRA against m (W + alpha / rank * B A) / (lengths of its rows) written out in float64, and against peft's own
reading of what is saved."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rollgrad.adapters.models.torch.loading.loading import load_causal_lm, load_tokenizer
from rollgrad.adapters.models.torch.loading.lora import adapter_numbers, add_lora
from rollgrad.adapters.models.torch.models import TorchPolicy
from rollgrad.adapters.models.torch.optimizers.optimizer import OptimizerSettings
from rollgrad.adapters.models.torch.references import AdapterlessReference
from rollgrad.application.settings.sections.actor import LoraConfig
from rollgrad.domain.batches.packed import PackedBatch
from tests.adapted_models import branching_batch, learn, logprobs, plain
from tests.tiny_models import saved, tiny_model

FLAG = "--actor.model_name_or_path"
DORA = LoraConfig(rank=4, alpha=8, dora=True)
SCALE = 2.0
"""alpha / rank."""
SETTINGS = OptimizerSettings(lr=1e-2, total_steps=10, max_norm=0.0)
FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen2ForCausalLM": {"tie_word_embeddings": False},  # biases beside the adapters
    "GPT2LMHeadModel": {"n_embd": 32, "n_layer": 2, "n_head": 4, "bos_token_id": None, "eos_token_id": None},
}
"""GPT-2's matrices lie the other way round."""


@pytest.fixture(params=FAMILIES)
def base(request: pytest.FixtureRequest, tiny_tokenizer: Any, tmp_path: Path) -> Path:
    return saved(
        tiny_model(request.param, tiny_tokenizer, **FAMILIES[request.param]), tiny_tokenizer, tmp_path / "base"
    )


@pytest.fixture
def batch() -> PackedBatch:
    return branching_batch()


def adapted(path: Path, dtype: torch.dtype = torch.float32) -> TorchPolicy:
    model = load_causal_lm(str(path), dtype=dtype, device=torch.device("cpu"), flag=FLAG)
    add_lora(model, DORA, seed=1)
    return TorchPolicy(model, load_tokenizer(str(path), flag=FLAG), SETTINGS)


def by_hand(parts: dict[str, Tensor], base: Any) -> dict[str, Tensor]:
    """Returns the weights that `base` becomes with the adapters `parts`, in float64."""
    turned = type(base).__name__ == "GPT2LMHeadModel"
    merged = {name: p.detach().double() for name, p in base.named_parameters()}
    for name in [name for name in parts if ".lora_A." in name]:
        layer = name.partition(".lora_A.")[0]
        product = SCALE * parts[name.replace("lora_A", "lora_B")] @ parts[name]
        weight = merged[f"{layer}.weight"].T if turned else merged[f"{layer}.weight"]
        summed = weight + product
        lengths = summed.detach().square().sum(1).sqrt()  # a constant for the gradient
        row = summed * (parts[f"{layer}.lora_magnitude_vector.default.weight"] / lengths)[:, None]
        merged[f"{layer}.weight"] = row.T if turned else row
    return merged


def parts_of(policy: TorchPolicy) -> dict[str, Tensor]:
    return {name: p.detach().double() for name, p in policy.module.named_parameters() if ".lora_" in name}


def test_lengths_are_counted_too(base: Path) -> None:
    model = load_causal_lm(str(base), dtype=torch.float32, device=torch.device("cpu"), flag=FLAG)
    expected = adapter_numbers(model, DORA)
    add_lora(model, DORA, seed=1)
    assert expected == sum(p.numel() for p in model.parameters() if p.requires_grad)


def test_fresh_adapters_change_nothing(base: Path, batch: PackedBatch) -> None:
    policy = adapted(base)
    torch.testing.assert_close(
        policy.score(batch).logprobs_N, logprobs(plain(base, torch.float32), batch), rtol=1e-5, atol=1e-5
    )
    for name, weight in policy.weights():
        torch.testing.assert_close(weight, plain(base, torch.float32).get_parameter(name), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_weights_are_rows_of_the_trained_lengths(base: Path, batch: PackedBatch, dtype: torch.dtype) -> None:
    policy = adapted(base, dtype)
    learn(policy, batch)
    expected, found = by_hand(parts_of(policy), plain(base, dtype)), dict(policy.weights())
    assert list(found) == list(expected)
    for name, weight in found.items():
        assert weight.dtype == dtype
        rounding = torch.finfo(dtype).eps * expected[name].abs()
        assert ((weight.double() - expected[name]).abs() <= 0.501 * rounding + 1e-6).all(), name


def test_the_trainer_scores_what_the_plain_model_does_with_the_weights_that_leave(
    base: Path, batch: PackedBatch, tmp_path: Path
) -> None:
    from peft import PeftModel

    policy = adapted(base)
    before = policy.score(batch).logprobs_N
    learn(policy, batch)
    policy.save(tmp_path / "out")
    scores = policy.score(batch).logprobs_N
    assert (scores - before).abs().max() > 0.1, "the adapters have learnt"
    read = PeftModel.from_pretrained(plain(base, torch.float32), tmp_path / "out" / "adapter")
    for model in (plain(tmp_path / "out", torch.float32), read, read.merge_and_unload()):
        torch.testing.assert_close(logprobs(model, batch), scores, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(
        AdapterlessReference(policy).score(batch).logprobs_N,
        logprobs(plain(base, torch.float32), batch),
        rtol=1e-4,
        atol=1e-4,
    )


def test_a_gradient_is_that_of_matrices_and_lengths(base: Path, batch: PackedBatch) -> None:
    policy = adapted(base)
    learn(policy, batch, 2)  # before the first step B is 0, and with it the gradient of A
    parts = {name: part.requires_grad_() for name, part in parts_of(policy).items()}
    model = plain(base, torch.float64)
    merged = by_hand(parts, model)

    def replaced(tokens: Tensor) -> Any:
        return torch.func.functional_call(model, merged, (tokens,), tie_weights=True)

    loss = -(batch.filled("loss_weights_N") * logprobs(replaced, batch)).sum()
    norm = torch.stack([g.norm() for g in torch.autograd.grad(loss, list(parts.values()))]).norm()
    metrics = learn(policy, batch, 1)
    assert metrics["loss"] == pytest.approx(float(loss.detach()), rel=1e-4)
    assert metrics["grad_norm"] == pytest.approx(float(norm), rel=1e-4)


def test_training_goes_on_from_a_state(base: Path, batch: PackedBatch) -> None:
    first, whole, second = adapted(base), adapted(base), adapted(base)
    learn(first, batch, 2)
    learn(whole, batch, 3)
    second.load_state_dict(first.state_dict())
    learn(second, batch, 1)
    expected = dict(whole.module.named_parameters())
    assert all(torch.equal(part, expected[name]) for name, part in second.module.named_parameters())
