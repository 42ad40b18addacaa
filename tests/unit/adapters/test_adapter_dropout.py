"""Dropout of adapters: its share and its arithmetic, the same in any split and when computed again, in updates only."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from rollgrad.adapters.models.torch.adapter_dropout import dropped, feature_keys, token_keys
from rollgrad.adapters.models.torch.layers.padded import use_fast_attention
from rollgrad.adapters.models.torch.loading.loading import load_causal_lm, load_tokenizer
from rollgrad.adapters.models.torch.loading.lora import add_lora
from rollgrad.adapters.models.torch.models import TorchPolicy
from rollgrad.adapters.models.torch.optimizers.optimizer import OptimizerSettings
from rollgrad.adapters.models.torch.rewards.value import TorchValue
from rollgrad.application.settings.sections.actor import Checkpointing, LoraConfig
from rollgrad.domain.batches.packed import PackedBatch
from rollgrad.domain.errors import ConfigurationError
from rollgrad.domain.ports.models import LossOutput
from tests.fakes import cluster

FLAG = "--actor.model_name_or_path"
SETTINGS = OptimizerSettings(lr=1e-2, betas=(0.5, 0.9), max_norm=0.0)


def adapted(path: Path, dropout: float) -> Any:
    """The tiny model, whose adapters change something from the first step on."""
    model = load_causal_lm(str(path), dtype=torch.float32, device=torch.device("cpu"), flag=FLAG)
    add_lora(model, LoraConfig(rank=4, alpha=8, dropout=dropout), seed=1)
    chance = torch.Generator().manual_seed(2)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data = 0.1 * torch.randn(parameter.shape, generator=chance)
    return model


def policy(path: Path, dropout: float = 0.3, **options: Any) -> TorchPolicy:
    return TorchPolicy(adapted(path, dropout), load_tokenizer(str(path), flag=FLAG), SETTINGS, **options)


def taken(model: TorchPolicy, batch: PackedBatch, *parts: Sequence[int]) -> list[Tensor]:
    """The adapters after one optimizer step."""
    micro_batches: list[PackedBatch] = [batch.select(list(part)) for part in parts or [range(len(batch))]]
    model.update(micro_batches, cluster.likelihood)
    return [tensor.clone() for _, tensor in model.adapter()]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.allclose(a, b, atol=1e-5) for a, b in zip(one, other, strict=True))


def test_a_share_of_the_numbers_is_left_out_for_each_token_feature_and_layer_apart() -> None:
    keys = torch.randint(-(2**31), 2**31, (600,), generator=torch.Generator().manual_seed(0)).int()
    first, second = (
        dropped(torch.ones(1, 600, 256), keys, feature_keys(name, 256), 0.25)[0]
        for name in ("model.layers.10.self_attn.q_proj.lora_A", "model.layers.11.self_attn.q_proj.lora_A")
    )
    assert first.unique().tolist() == [0.0, pytest.approx(4 / 3)]
    noise = (0.25 * 0.75) ** 0.5
    for left_out in (first == 0, second == 0):
        away = left_out.double() - 0.25
        assert abs(float(away.mean())) < 4 * noise / (600 * 256) ** 0.5
        assert float(away.mean(0).abs().max()) < 5 * noise / 600**0.5, "no feature is left out more often"
        assert float(away.mean(1).abs().max()) < 5 * noise / 256**0.5, "no token is left out more often"
    alike = ((first == 0) == (second == 0)).double().mean()
    assert float(alike) == pytest.approx(0.25**2 + 0.75**2, abs=0.01)


def test_what_is_left_out_depends_on_the_tokens_so_far_and_the_step() -> None:
    batch = cluster.batch()
    keys = token_keys(batch, 0)
    assert not (keys == token_keys(batch, 1)).any()
    alone = torch.cat([token_keys(batch.select([index]), 0) for index in range(len(batch))])
    assert torch.equal(keys, alone)
    prefixes = {
        tuple(batch.tokens_N[start : start + length].tolist())
        for start, most in zip(batch.starts_S.tolist(), batch.lengths_S.tolist(), strict=True)
        for length in range(1, most + 1)
    }
    assert len(keys.unique()) == len(prefixes)


def test_the_gradient_is_that_of_the_numbers_that_are_left(tiny_model_dir: Path) -> None:
    model = policy(tiny_model_dir, 0.4)
    layer = model.module.model.layers[0].mlp.up_proj
    seen: list[tuple[Tensor, Tensor]] = []
    linear = layer.lora_A["default"]
    linear.register_forward_hook(lambda _, inputs, output: seen.append((inputs[0], output)))
    found: dict[str, Tensor] = {}

    def objective(scores: Any, batch: PackedBatch) -> LossOutput:
        [(x, product)] = seen
        product.retain_grad()
        x.retain_grad()
        found["x"], found["product"] = x, product
        return cluster.likelihood(scores, batch)

    rows = cluster.batch().select([0])
    with model._dropout.during(0):
        output = objective(model._scores(rows), rows)
        output.loss.backward()  # type: ignore[no-untyped-call]
    x, product = found["x"][0].detach(), found["product"]
    left = dropped(x, token_keys(rows, 0), feature_keys("model.layers.0.mlp.up_proj.lora_A.default", x.shape[-1]), 0.4)
    assert 0.2 < float((left == 0).double().mean()) < 0.6
    torch.testing.assert_close(product[0].detach(), left @ linear.weight.T)
    torch.testing.assert_close(linear.weight.grad, product.grad[0].T @ left)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("checkpointing", [*Checkpointing])
def test_a_step_is_the_same_in_any_split_and_after_an_interruption(
    tiny_model_dir: Path, checkpointing: Checkpointing, padded: bool
) -> None:
    batch = cluster.batch()

    def make(dropout: float = 0.3, recomputes: Checkpointing = checkpointing) -> TorchPolicy:
        made = policy(tiny_model_dir, dropout, gradient_checkpointing=recomputes)
        if padded:
            use_fast_attention(made.module)
            made.module.model.computed_padded = True
        return made

    whole = make()
    once = taken(whole, batch)
    assert same(
        once, taken(make(recomputes=Checkpointing.OFF), batch, *[[place] for place in reversed(range(len(batch)))])
    )
    assert not same(once, taken(make(0.0), batch)), "dropout matters"
    continued = make()
    continued.load_state_dict(whole.state_dict())
    assert same(taken(whole, batch), taken(continued, batch))


def test_scores_leave_nothing_out(tiny_model_dir: Path) -> None:
    batch = cluster.batch()
    dropping, plain = policy(tiny_model_dir), policy(tiny_model_dir, 0.0)
    assert torch.equal(dropping.score(batch).logprobs_N, plain.score(batch).logprobs_N)
    dropping.update([batch], cluster.likelihood)
    weights = dict(dropping.adapter())
    for name, parameter in plain.module.named_parameters():
        if parameter.requires_grad:
            parameter.data = weights[f"base_model.model.{name.replace('.default.', '.')}"].clone()
    assert torch.equal(dropping.score(batch).logprobs_N, plain.score(batch).logprobs_N)


def test_a_model_of_values_drops_out_too(tiny_model_dir: Path) -> None:
    batch = cluster.batch()

    def step(dropout: float) -> dict[str, Tensor]:
        tokenizer = load_tokenizer(str(tiny_model_dir), flag=FLAG)
        head = {"weight": torch.ones(1, 64)}
        model = TorchValue(adapted(tiny_model_dir, dropout), tokenizer, SETTINGS, head=head)
        assert torch.equal(model.values(batch), values)
        with patch.object(model._dropout, "during", wraps=model._dropout.during) as during:
            for _ in range(2):
                model.update([batch], cluster.squared)
        assert [call.args for call in during.call_args_list] == [(0,), (1,)], "each step drops other entries"
        return model.state_dict()["masters"]  # type: ignore[no-any-return]

    tokenizer = load_tokenizer(str(tiny_model_dir), flag=FLAG)
    plain = TorchValue(adapted(tiny_model_dir, 0.0), tokenizer, SETTINGS, head={"weight": torch.ones(1, 64)})
    values = plain.values(batch)
    dropping, without = step(0.3), step(0.0)
    assert any(not torch.equal(dropping[name], without[name]) for name in without if "lora" in name)


def test_adapters_of_layers_that_compute_some_tokens_only_are_refused(tiny_model_dir: Path) -> None:
    model = policy(tiny_model_dir)
    layer = model.module.model.layers[1].mlp.down_proj
    layer.lora_A["default"].register_forward_pre_hook(lambda _, inputs: (inputs[0][:, 1:],))
    batch = cluster.batch()
    with pytest.raises(
        ConfigurationError, match=r"of the \d+ tokens.*--actor.lora.target_modules.*--actor.lora.dropout"
    ):
        model.update([batch], cluster.likelihood)
