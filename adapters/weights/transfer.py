"""How weights get from the policy's processes to the engines' workers: what all backends have alike.

A backend is asked once a transfer and answers with a `Passage`: what each engine is told before, and the updates that
the engines are told one after the other. The channel (`weights.py`) does the rest: who takes part, deadlines, versions,
the comparison, and what becomes of engines that fail.
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, Protocol, TypeAlias, cast, runtime_checkable

from attrs import frozen
from torch import Tensor

from rollgrad.domain.ports.models import PolicyModel

Life: TypeAlias = tuple[int, int]
"""Number of an engine, and how often it was restarted: what was agreed with one life is unknown to the next."""

Send: TypeAlias = Callable[..., Iterator[Any]]
"""Moves the weights that are its first argument, importable wherever they are; yields what is to be said of each
update."""


@frozen
class Update:
    """What engines are told of one bucket (vLLM's update info), and what is in it."""

    info: dict[str, Any]
    bytes: int = 0
    dtypes: tuple[str, ...] = ()


def _nothing(*_: Any) -> None:
    """Does nothing."""


@frozen(kw_only=True)
class Passage:
    """One transfer's way through a backend."""

    infos: Sequence[dict[str, Any] | None]
    """What each engine is told before (vLLM's init info); None where it knows all."""
    updates: Generator[Update]
    """Blocks. The first is asked for while the engines begin.

    Raises:
        EngineError: no engine can be reached any more.
    """
    ahead: bool = True
    """The next update is asked for while the engines take the last one, not afterwards."""
    whole: bool = False
    """Without one of its engines nothing gets through."""
    begun: Callable[[], None] = _nothing
    """Called when all engines have begun and the first update is there."""
    close: Callable[[bool], None] = _nothing
    """Called at the end; says whether every engine took everything."""


Backend: TypeAlias = Callable[[PolicyModel, Sequence[Life], int], Passage]
"""Policy, engines and version of a transfer to its passage."""


@runtime_checkable
class DividedPolicy(Protocol):
    """A policy whose weights lie in several processes, which send them themselves."""

    def sent(
        self, send: Send, *arguments: Any, ranks: Sequence[int] = (0,), adapter: bool = False
    ) -> Iterator[list[Any]]:
        """What `send(weights, *arguments)` yields in each of `ranks`, which run side by side; `adapter` sends the
        adapters in place of the weights."""
        ...

    def address(self) -> tuple[str, int]:
        """(host, free port) of the first process."""
        ...


class AdaptedPolicy(Protocol):
    """A policy that gives its adapters (LoRA) apart from the weights."""

    def adapter(self) -> Iterator[tuple[str, Tensor]]:
        """Yields every matrix of the adapters once, by its name in peft's files; nothing without adapters."""
        ...


def sent(
    policy: PolicyModel, send: Send, *arguments: Any, ranks: Sequence[int] = (0,), adapter: bool = False
) -> Iterator[list[Any]]:
    """What `send(weights, *arguments)` yields where the weights are; `adapter` sends those of an `AdaptedPolicy`'s
    adapters in their place."""
    if isinstance(policy, DividedPolicy):
        yield from policy.sent(send, *arguments, ranks=ranks, adapter=adapter)
        return
    weights = cast(AdaptedPolicy, policy).adapter() if adapter else policy.weights()
    for message in send(weights, *arguments):
        yield [message]
