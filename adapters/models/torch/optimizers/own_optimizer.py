"""An optimizer of a user's own: how it is made, and what its state has to be so that a run can continue from it.

Invariant: what it does is one `ForeignError` sentence if it fails, and what it keeps of a parameter is in training
states whole, or refused at its first step. Does not own: masters, clipping, rates (`optimizer`).
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from numbers import Real
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from rollgrad.application.foreign import foreign_code
from rollgrad.domain.errors import ConfigurationError, ForeignError

RATES = ("params", "lr", "peak")
"""Entries of a parameter group that the schedule, and not the optimizer, sets."""


@frozen
class OwnOptimizer:
    """`make` takes parameter groups, each with `params`, `lr` (peak) and `weight_decay`, and returns a
    `torch.optim.Optimizer` of them; `setting` names it, as in `actor.optim_path mine.py:lion`."""

    make: Callable[[list[dict[str, Any]]], Any]
    setting: str

    @property
    def elementwise(self) -> bool:
        """Whether the optimizer declares that it steps each number of a parameter by itself. Then processes may step
        parts of parameters."""
        return bool(getattr(self.make, "elementwise", False))

    def __call__(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        """Returns the optimizer of parameter groups, whose rates are the peaks that the schedule scales.

        Raises:
            ForeignError: it cannot be made.
            ConfigurationError: it is no optimizer, or not of the parameters that it was given.
        """
        given = [parameter for group in groups for parameter in group["params"]]
        with self.guarded("cannot be made"):
            optimizer = self.make(groups)
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ConfigurationError(
                f"{self.setting} returned a {type(optimizer).__name__}: return a torch.optim.Optimizer of the "
                "parameter groups that it is given."
            )
        stepped = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if {*map(id, stepped)} != {*map(id, given)} or len(stepped) != len(given):
            raise ConfigurationError(
                f"{self.setting} returned an optimizer of {len(stepped)} parameters, which are not the {len(given)} "
                "that it was given: each of them belongs into one of its groups."
            )
        for group in optimizer.param_groups:
            group["peak"] = group["lr"]
        return optimizer

    def guarded(self, what: str) -> AbstractContextManager[object]:
        """Returns a block whose errors are a sentence that says `what` failed."""
        return foreign_code(lambda words: ForeignError(f"{self.setting} {what}: {words}"), located=True)

    def numbers(self, optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
        """Returns what parameter groups hold besides parameters and rates, to be compared after a step."""
        return [{key: value for key, value in group.items() if key not in RATES} for group in optimizer.param_groups]

    def check(self, optimizer: torch.optim.Optimizer, before: list[dict[str, Any]], *, divided: bool) -> None:
        """Checks after a step that the state of each parameter is all that the optimizer keeps; `before`: `numbers`
        of before the step; `divided`: parameters are parts, of which the state has to be as well.

        Raises:
            ConfigurationError: it is not.
        """
        after = self.numbers(optimizer)
        changed = {
            key
            for old, new in zip(before, after, strict=True)
            for key in {*old, *new}
            if isinstance(new.get(key), Tensor) or old.get(key) != new.get(key)
        }
        if changed:
            raise ConfigurationError(
                f"{self.setting} keeps {', '.join(sorted(changed))} in its parameter groups, which no training state "
                "has: keep what changes in state[parameter]."
            )
        for parameter, kept in optimizer.state.items():
            for key, value in kept.items():
                if not isinstance(value, Tensor | Real):
                    raise ConfigurationError(
                        f"{self.setting} keeps {key} of a parameter as a {type(value).__name__}, which no training "
                        "state has: keep tensors and numbers."
                    )
                if divided and isinstance(value, Tensor) and value.ndim and value.shape != parameter.shape:
                    raise ConfigurationError(
                        f"{self.setting} says that it is elementwise, but keeps {key} in the shape "
                        f"{tuple(value.shape)} of a part in the shape {tuple(parameter.shape)}: leave "
                        "--cluster.enable out."
                    )


def as_tensor(value: Any) -> Tensor:
    """Returns what an optimizer keeps as a tensor: a number as one of 64 bits without dimensions."""
    if isinstance(value, Tensor):
        return value
    return torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else torch.int64)


def as_kept(tensor: Tensor) -> Any:
    """Returns what `as_tensor` has made a tensor of."""
    return tensor.item() if not tensor.ndim and tensor.dtype in (torch.float64, torch.int64) else tensor


def tensors_of(kept: Iterable[Any]) -> Iterable[Tensor]:
    """Returns what an optimizer keeps of a parameter, but for numbers such as that of its steps."""
    return (value for value in kept if isinstance(value, Tensor) and value.ndim)
