"""Optimizers of a user's own, on float32 masters."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn

from rollgrad.adapters.models.torch.optimizers.optimizer import MasterOptimizer, OptimizerSettings
from rollgrad.adapters.models.torch.optimizers.own_optimizer import OwnOptimizer
from rollgrad.domain.errors import ConfigurationError, ForeignError

Groups = list[dict[str, Any]]


class Counting(torch.optim.Optimizer):
    """Steps by the gradient's sign, ever shorter; it counts with a number of Python, and keeps its mean gradient by
    rows."""

    def __init__(self, groups: Iterable[Any]) -> None:
        super().__init__(groups, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["count"] = state.get("count", 0) + 1
                state["share"] = 0.5 * state.get("share", 1.0)
                rows = parameter.grad.reshape(len(parameter), -1).mean(1)
                state["rows"] = 0.9 * state.get("rows", 0.0) + rows
                size = group["lr"] / state["count"] * state["share"]
                parameter.add_(-size * parameter.grad.sign() - size * state["rows"].sum())


def network(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3)).to(dtype)


def steps(optimizer: MasterOptimizer, model: nn.Module, seeds: Iterable[int]) -> list[dict[str, float]]:
    dtype = next(model.parameters()).dtype
    found = []
    for seed in seeds:
        inputs = torch.randn(5, 6, generator=torch.Generator().manual_seed(seed)).to(dtype)
        optimizer.backward(model(inputs).float().square().mean())
        found.append(optimizer.step())
    return found


def settings(make: Callable[[Groups], Any], **others: Any) -> OptimizerSettings:
    return OptimizerSettings(lr=1e-2, own=OwnOptimizer(make, "--actor.optim_path mine.py"), **others)


def test_it_takes_the_place_of_adamw() -> None:
    mine, theirs = network(), network()
    ours = MasterOptimizer(
        mine,
        settings(lambda groups: torch.optim.SGD(groups, momentum=0.9), max_norm=0.0, weight_decay=0.1),
    )
    reference = torch.optim.SGD(
        [
            {"params": [p for p in theirs.parameters() if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in theirs.parameters() if p.ndim == 1], "weight_decay": 0.0},
        ],
        lr=1e-2,
        momentum=0.9,
    )
    steps(ours, mine, range(3))
    for seed in range(3):
        theirs(torch.randn(5, 6, generator=torch.Generator().manual_seed(seed))).square().mean().backward()
        reference.step()
        reference.zero_grad()
    for a, b in zip(mine.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_a_rate_of_a_group_is_a_peak_of_its_own() -> None:
    model = network()
    made: list[torch.optim.Optimizer] = []

    def slower(groups: Groups) -> torch.optim.Optimizer:
        made.append(
            torch.optim.SGD([{**group, "lr": group["lr"] / (1 + number)} for number, group in enumerate(groups)])
        )
        return made[0]

    optimizer = MasterOptimizer(model, settings(slower, factors=(1.0, 0.5)))
    rates = [metrics["lr"] for metrics in steps(optimizer, model, range(3))]
    assert rates == pytest.approx([1e-2, 5e-3, 5e-3])
    assert [group["lr"] for group in made[0].param_groups] == pytest.approx([5e-3, 2.5e-3])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_continues_as_if_nothing_had_been(dtype: torch.dtype) -> None:
    whole, first, second = network(dtype), network(dtype), network(dtype)
    steps(MasterOptimizer(whole, settings(Counting)), whole, range(5))
    begun = MasterOptimizer(first, settings(Counting))
    steps(begun, first, range(2))
    continued = MasterOptimizer(second, settings(Counting))
    continued.load_state_dict(begun.state_dict())
    steps(continued, second, range(2, 5))
    for a, b in zip(whole.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)


def test_one_without_a_state_continues_too() -> None:
    model = network()
    begun = MasterOptimizer(model, settings(torch.optim.SGD))
    steps(begun, model, range(2))
    MasterOptimizer(network(), settings(torch.optim.SGD)).load_state_dict(begun.state_dict())


def _counts_in_groups(groups: Groups) -> torch.optim.Optimizer:
    made = torch.optim.SGD(groups)
    made.register_step_post_hook(lambda optimizer, *_: optimizer.param_groups[0].update(k=1))
    return made


def _keeps_an_object(groups: Groups) -> torch.optim.Optimizer:
    made = torch.optim.SGD(groups)
    parameter = made.param_groups[0]["params"][0]
    made.register_step_post_hook(lambda optimizer, *_: optimizer.state[parameter].update(past=[]))
    return made


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda groups: None, ConfigurationError, "returned a NoneType: return a torch.optim.Optimizer"),
        (lambda groups: torch.optim.SGD(groups[:1]), ConfigurationError, "of 2 parameters, which are not the 4"),
        (lambda groups: torch.optim.SGD(groups, rate=1), ForeignError, "mine.py cannot be made: TypeError"),
        (torch.optim.LBFGS, ForeignError, "cannot be made: ValueError: LBFGS doesn't support per-parameter"),
        (_counts_in_groups, ConfigurationError, "keeps k in its parameter groups, which no training state has"),
        (_keeps_an_object, ConfigurationError, "keeps past of a parameter as a list"),
    ],
)
def test_what_cannot_be_used_is_refused(make: Callable[[Groups], Any], error: type[Exception], message: str) -> None:
    model = network()
    with pytest.raises(error, match=message):
        steps(MasterOptimizer(model, settings(make)), model, range(1))


def test_a_step_that_fails_says_which() -> None:
    model = network()

    def fails(groups: Groups) -> torch.optim.Optimizer:
        made = torch.optim.SGD(groups)
        made.register_step_pre_hook(lambda *_: 1 / 0)
        return made

    with pytest.raises(ForeignError, match=r"mine\.py failed in optimizer step 1: ZeroDivisionError"):
        steps(MasterOptimizer(model, settings(fails)), model, range(1))


def test_parts_of_parameters_have_parts_of_the_state() -> None:
    own = OwnOptimizer(Counting, "--actor.optim_path mine.py")
    part = nn.Parameter(torch.ones(4, 2))
    optimizer = own([{"params": [part], "lr": 0.1, "weight_decay": 0.0}])
    part.grad = torch.ones(4, 2)
    before = own.numbers(optimizer)
    optimizer.step()
    own.check(optimizer, before, divided=False)
    with pytest.raises(ConfigurationError, match=r"keeps rows in the shape \(4,\) of a part in the shape \(4, 2\)"):
        own.check(optimizer, before, divided=True)
