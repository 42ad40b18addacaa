"""Transfers of the weights that have changed since the last one.

In bfloat16 an optimizer step at the learning rates of reinforcement learning leaves most weights as they were, because
it changes them by less than their rounding. The sender keeps a copy of what it has sent, and compares bits. Of each
tensor it sends the positions and values of the elements that differ, or the whole tensor where that is shorter. An
engine that has the earlier transfers then has, bit for bit, the same weights as after a transfer of all of them.
Invariants: every transfer has a key. One of changes names the key of the transfer that it builds on, which all of its
engines have taken as their last; engines refuse it otherwise, and the next transfer brings all weights. Does not own:
how engines change their weights (`adapters.engines.vllm.layer_changes`).
"""

import secrets
import weakref
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from functools import partial
from typing import Any, cast

import torch
from attrs import define, evolve, field, frozen
from torch import Tensor

from rollgrad.adapters.weights.transfer import Backend, Life, Send, Update, WeightStream, sent
from rollgrad.domain.ports.models import PolicyModel

POSITIONS = "positions of what changed in "
"""Before a tensor's name: where its changed elements are in it, flattened, as uint16 distances from one to the next,
the first from the beginning. A longer way has stops at elements that have not changed."""

VALUES = "values of what changed in "
"""Before a tensor's name: its elements there."""

DISTANCES = "uint16"
"""Number format of distances."""

FARTHEST = 2**16 - 1
"""Largest distance between two positions."""

MOST_CHANGED = 0.25
"""Largest share of changed elements that are sent alone: each takes a position of 2 bytes beside its value, and more
of the processor's time than one of a whole tensor."""

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Number formats in which elements are compared, by their bytes: zeros of both signs differ, and a NaN equals itself.
"""


@define
class Copy:
    """Copy of what this process has sent last, on the CPU."""

    key: str | None = None
    """Key of that transfer; None if it is not known which weights the engines have of it."""
    weights: dict[str, Tensor] = field(factory=dict)
    """Flat tensors by their names."""
    sender: str = ""
    """The backend that sent them, as its keys begin."""


_copy = Copy()
"""The copy of this process, kept from one transfer to the next."""


def _forget(sender: str) -> None:
    """Frees this process's copy of what a backend has sent."""
    if _copy.sender == sender:
        _copy.key, _copy.weights = None, {}


@define
class Changes:
    """Implements `Backend`: sends changes by another backend, which sends whatever has a name.

    An engine that was restarted, or took another transfer last than the others, gets all weights, as do those that take
    them at the same time. Engines keep their weights between transfers: none of them sleeps.

    Args:
        way: the backend; none of vLLM's own.
    """

    way: Backend
    _name: str = field(factory=partial(secrets.token_hex, 8), init=False)
    _count: int = field(default=0, init=False)
    _had: dict[Life, str] = field(factory=dict, init=False)
    """Keys of the transfers that engines took last."""
    _formats: set[str] = field(factory=set, init=False)
    """Number formats of the weights, those of which nothing changes too."""

    def __attrs_post_init__(self) -> None:
        weakref.finalize(self, _forget, self._name)

    def __call__(self, policy: PolicyModel, engines: Sequence[Life], version: int) -> WeightStream:
        """Returns the way of one transfer; the policy's first process, which sends, keeps a copy of all weights."""
        keys = {self._had.pop(life, None) for life in engines}
        self._count += 1
        base, key = keys.pop() if len(keys) == 1 else None, f"{self._name}.{self._count}"
        stream = self.way(cast(PolicyModel, _Changed(policy, base, key)), engines, version)

        def updates() -> Generator[Update]:
            if base is None:
                self._formats.clear()
            with closing(stream.updates):
                for update in stream.updates:
                    self._formats.update(name for name in update.dtypes if name != DISTANCES)
                    info = {**update.info, "base": base, "key": key}
                    yield evolve(update, info=info, dtypes=tuple(self._formats))

        def close(well: bool) -> None:
            stream.close(well)
            if well:
                self._had |= dict.fromkeys(engines, key)

        return evolve(stream, updates=updates(), close=close)


@frozen
class _Changed:
    """A `DividedPolicy` whose first process sends what has changed."""

    policy: PolicyModel
    base: str | None
    key: str

    def sent(
        self, send: Send, *arguments: Any, ranks: Sequence[int] = (0,), adapter: bool = False
    ) -> Iterator[list[Any]]:
        """Implements `DividedPolicy.sent`."""
        return sent(self.policy, send_changes, self.base, self.key, send, *arguments, ranks=ranks, adapter=adapter)

    def parts(self) -> int:
        """Implements `DividedPolicy.parts`: the first process compares."""
        return 0

    def sent_parts(self, send: Send, *arguments: Any) -> Iterator[list[Any]]:
        """Implements `DividedPolicy.sent_parts`, which nobody calls without parts."""
        raise NotImplementedError

    def address(self) -> tuple[str, int]:
        """Implements `DividedPolicy.address`, which the backends of changes do not ask for."""
        raise NotImplementedError


def send_changes(
    weights: Iterator[tuple[str, Tensor]], base: str | None, key: str, send: Send, *arguments: Any
) -> Iterator[Any]:
    """Runs `send` on the changes of weights since the transfer `base`."""
    yield from send(changes(weights, base, key), *arguments)


def changes(weights: Iterator[tuple[str, Tensor]], base: str | None, key: str) -> Iterator[tuple[str, Tensor]]:
    """Yields what makes the weights of the transfer `base` to these, on the CPU, and copies them as those of `key`:
    nothing of a tensor in which nothing changed, positions and values, or the tensor. If this process has not sent
    `base`, which may be None, it yields all tensors."""
    last, same = _copy.weights, base is not None and _copy.key == base
    _copy.key, _copy.weights, _copy.sender = None, {}, key.partition(".")[0]  # no key until all is sent
    for name, weight in weights:
        tensor = weight.detach().to("cpu").contiguous()
        flat, before = tensor.view(-1), last.pop(name, None)
        if before is None or (before.dtype, before.shape) != (flat.dtype, flat.shape):
            _copy.weights[name] = flat.clone()
            yield name, tensor
            continue
        _copy.weights[name] = before
        format = BITS[flat.element_size()]
        differs = flat.view(format) != before.view(format)
        if not same or int(differs.sum()) > MOST_CHANGED * len(flat):
            before.copy_(flat)
            yield name, tensor
        elif len(positions := differs.nonzero().squeeze(1)):
            distances, positions = distances_of(positions)
            before[positions] = values = flat[positions]
            yield POSITIONS + name, distances
            yield VALUES + name, values
    _copy.key = key


def distances_of(positions: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the distances between `positions`, int64, not empty and increasing, as uint16, and the positions with
    those of stops on long ways."""
    before = torch.cat([positions.new_zeros(1), positions[:-1]])
    stops = (positions - before - 1).clamp(min=0) // FARTHEST
    if bool(stops.any()):
        steps = torch.repeat_interleave(stops + 1)  # for each step, the index of the way that it belongs to
        first = (stops + 1).cumsum(0) - stops - 1
        taken = torch.arange(1, len(steps) + 1) - first[steps]
        positions = torch.minimum(before[steps] + FARTHEST * taken, positions[steps])
        before = torch.cat([positions.new_zeros(1), positions[:-1]])
    return (positions - before).to(torch.uint16), positions


def positions_of(distances: Tensor) -> Tensor:
    """Returns the positions that `distances_of` has made distances of, int64."""
    signed = distances.view(torch.int16).to(torch.int64)  # GPUs compute little with uint16
    return (signed & FARTHEST).cumsum(0)
