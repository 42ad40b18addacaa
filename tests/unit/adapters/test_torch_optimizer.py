"""AdamW on float32 masters."""

import copy
import math

import pytest
import torch
from torch import nn

from rollgrad.adapters.models.torch.optimizers.optimizer import MasterOptimizer, OptimizerSettings
from rollgrad.domain.control.learning_rate import lr_factor
from rollgrad.domain.errors import CheckpointError, ExplodedWeightsError, NonFiniteUpdateError


def network(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3)).to(dtype)


def inputs(seed: int, rows: int = 5) -> torch.Tensor:
    return torch.randn(rows, 6, generator=torch.Generator().manual_seed(seed))


def loss(model: nn.Module, seed: int) -> torch.Tensor:
    dtype = next(model.parameters()).dtype
    return model(inputs(seed).to(dtype)).float().square().mean()


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def test_a_step_is_torchs_adamw_with_clipping_and_decay_on_matrices_only() -> None:
    mine, theirs = network(), network()
    settings = OptimizerSettings(lr=1e-2, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.1, max_norm=0.05)
    optimizer = MasterOptimizer(mine, settings)
    reference = torch.optim.AdamW(
        [
            {"params": [p for p in theirs.parameters() if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in theirs.parameters() if p.ndim == 1], "weight_decay": 0.0},
        ],
        lr=1e-2,
        betas=(0.8, 0.9),
        eps=1e-6,
    )
    for seed in range(4):
        loss(mine, seed).backward()
        loss(theirs, seed).backward()
        norm = torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.05)
        reference.step()
        reference.zero_grad()
        result = optimizer.step()
        assert result["grad_norm"] == pytest.approx(float(norm), rel=1e-6)
        assert float(norm) > 0.05, "the test must clip"
        for a, b in zip(mine.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_biases_and_norms_are_not_decayed() -> None:
    model = network()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = MasterOptimizer(model, OptimizerSettings(lr=0.1, weight_decay=0.5))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for name, parameter in model.named_parameters():
        expected = before[name] * (1 - 0.1 * 0.5) if parameter.ndim > 1 else before[name]
        torch.testing.assert_close(parameter.detach(), expected)


@pytest.mark.parametrize("max_norm", [0.0, 1e9])
def test_gradients_below_the_limit_or_without_one_keep_their_length(max_norm: float) -> None:
    """With SGD-like Adam settings nothing would show, so the moments are read."""
    model = network()
    optimizer = MasterOptimizer(model, OptimizerSettings(lr=1e-3, betas=(0.0, 0.0), max_norm=max_norm))
    loss(model, 0).backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    optimizer.step()
    moments = [state["exp_avg"] for state in optimizer.state_dict()["moments"].values()]
    assert sum(float(m.square().sum()) for m in moments) == pytest.approx(
        sum(float(g.square().sum()) for g in gradients), rel=1e-5
    )


@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gradient_that_is_not_finite_changes_nothing(poison: float, dtype: torch.dtype) -> None:
    model = network(dtype)
    optimizer = MasterOptimizer(model, OptimizerSettings(lr=0.1, weight_decay=0.1))
    before, state = weights(model), copy.deepcopy(optimizer.state_dict())
    (loss(model, 0) * poison).backward()
    with pytest.raises(NonFiniteUpdateError, match="step 0"):
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(weights(model), before, strict=True))
    assert all(torch.equal(m, state["masters"][name]) for name, m in optimizer.masters().items())
    loss(model, 1).backward()  # the bad gradient is gone: the next step is as if it had never been
    optimizer.step()
    twin = network(dtype)
    twin_optimizer = MasterOptimizer(twin, OptimizerSettings(lr=0.1, weight_decay=0.1))
    loss(twin, 1).backward()
    twin_optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(weights(model), weights(twin), strict=True))


@pytest.mark.parametrize("lr", [1e8, 1e30, 1e300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_that_is_too_large_is_named(dtype: torch.dtype, lr: float) -> None:
    """Every gradient of it is finite: what comes of them is not seen before the next one."""
    model = network(dtype)
    optimizer = MasterOptimizer(model, OptimizerSettings(lr=lr))
    loss(model, 0).backward()
    with pytest.raises(ExplodedWeightsError, match=r"^Optimizer step 1 has made weights NaN, infinite or so"):
        optimizer.step()


def test_bfloat16_gradients_add_up_in_float32() -> None:
    """1024 micro-batches of gradient 1/256 on top of 1: in bfloat16 each addition would be lost."""
    parameter = nn.Parameter(torch.zeros(1, 1, dtype=torch.bfloat16))
    module = nn.Module()
    module.weight = parameter
    optimizer = MasterOptimizer(module, OptimizerSettings(lr=1e-3, max_norm=0.0))
    parameter.sum().backward()
    for _ in range(1024):
        (parameter.sum() / 256).backward()
    assert parameter.grad is None, "compute-format gradients are freed at once"
    assert optimizer.step()["grad_norm"] == pytest.approx(1 + 1024 / 256)


def test_steps_below_bfloat16s_resolution_add_up_in_the_masters() -> None:
    model = network(torch.bfloat16)
    optimizer = MasterOptimizer(model, OptimizerSettings(lr=1e-5))
    start = {name: m.clone() for name, m in optimizer.masters().items()}
    for _ in range(300):
        loss(model, 0).backward()
        optimizer.step()
    name, parameter = next(iter(model.named_parameters()))
    assert (optimizer.masters()[name] - start[name]).abs().max() > 1e-3
    assert not torch.equal(parameter.detach().float(), start[name])
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.detach(), optimizer.masters()[name].to(torch.bfloat16))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_restored_optimizer_goes_on_as_if_never_stopped(dtype: torch.dtype) -> None:
    settings = OptimizerSettings(lr=1e-2, scheduler="linear", warmup_ratio=0.2, total_steps=6)
    whole = network(dtype)
    optimizer = MasterOptimizer(whole, settings)
    rates = []
    for seed in range(6):
        if seed == 3:
            saved = optimizer.state_dict()
        loss(whole, seed).backward()
        rates.append(optimizer.step()["lr"])

    for _ in range(2):  # neither the optimizer that it is of nor one that takes it changes a state
        torch.manual_seed(9)
        resumed = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3)).to(dtype)
        second = MasterOptimizer(resumed, settings)
        second.load_state_dict(saved)
        for name, parameter in resumed.named_parameters():
            assert torch.equal(parameter.detach(), saved["masters"][name].to(dtype)), "it computes with them at once"
        for seed in range(3, 6):
            loss(resumed, seed).backward()
            assert second.step()["lr"] == rates[seed]
        assert all(torch.equal(a, b) for a, b in zip(weights(whole), weights(resumed), strict=True))


@pytest.mark.parametrize("scheduler", ["constant", "linear", "cosine_with_min_lr", "warmup_stable_decay"])
def test_the_rate_follows_the_schedule(scheduler: str) -> None:
    model = network()
    settings = OptimizerSettings(
        lr=0.5, scheduler=scheduler, warmup_ratio=0.3, min_lr_ratio=0.2, decay_ratio=0.5, total_steps=10
    )
    optimizer = MasterOptimizer(model, settings)
    rates = []
    for _ in range(12):
        loss(model, 0).backward()
        rates.append(optimizer.step()["lr"])
    factors = [
        lr_factor(scheduler, step, total_steps=10, warmup_ratio=0.3, min_ratio=0.2, decay_ratio=0.5)
        for step in range(12)
    ]
    assert rates == [0.5 * factor for factor in factors]
    assert rates[:3] == [0.125, 0.25, 0.375]
    assert rates[3] == 0.5
    assert rates[-1] == (0.5 if scheduler == "constant" else pytest.approx(0.1))


def test_frozen_parameters_are_left_alone() -> None:
    model = network()
    model[0].weight.requires_grad_(False)
    optimizer = MasterOptimizer(model, OptimizerSettings(lr=0.1))
    before = model[0].weight.clone()
    loss(model, 0).backward()
    optimizer.step()
    assert torch.equal(model[0].weight, before)
    assert "0.weight" not in optimizer.masters()


def test_a_state_without_moments_or_with_those_of_another_shape_is_refused() -> None:
    """An optimizer that has taken steps would start anew without a word."""
    module = nn.Linear(4, 2)
    optimizer = MasterOptimizer(module, OptimizerSettings(lr=0.1))
    fresh = optimizer.state_dict()
    module(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    state = optimizer.state_dict()
    for change in (
        {"moments": {}},
        {"moments": {"weight": state["moments"]["weight"]}},
        {"moments": state["moments"] | {"bias": {}}},
        {"moments": state["moments"] | {"bias": state["moments"]["weight"]}},
    ):
        with pytest.raises(CheckpointError):
            MasterOptimizer(nn.Linear(4, 2), OptimizerSettings(lr=0.1)).load_state_dict({**state, **change})
    other = MasterOptimizer(nn.Linear(4, 2), OptimizerSettings(lr=0.1))
    other.load_state_dict(fresh)
    other.load_state_dict(state)
