"""The common form of all backends, which bring weights from the policy's processes to the engines' workers.

A backend is called once for each transfer and returns a `WeightStream`: information for each engine before the
transfer, and the updates that all engines then get one after the other. The channel (`channel.py`) does the rest:
participants, deadlines, versions, the comparison, and engines that fail.
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, Protocol, TypeAlias, cast, runtime_checkable

from attrs import frozen
from torch import Tensor

from rollgrad.domain.ports.models import PolicyModel

Life: TypeAlias = tuple[int, int]
"""Number of an engine, and how often it was restarted: a restarted engine knows nothing of earlier transfers."""

Send: TypeAlias = Callable[..., Iterator[Any]]
"""Importable function that moves the weights in its first argument; it runs where they are, and yields a description of
each update."""


@frozen
class Update:
    """Message to engines about one bucket (vLLM's update info), and the bucket's contents."""

    info: dict[str, Any]
    bytes: int = 0
    dtypes: tuple[str, ...] = ()


def _nothing(*_: Any) -> None:
    """Does nothing."""


@frozen(kw_only=True)
class WeightStream:
    """One transfer through a backend."""

    infos: Sequence[dict[str, Any] | None]
    """Information for each engine before the transfer (vLLM's init info); None if nothing has changed."""
    updates: Generator[Update]
    """Blocking iterator of updates. The first is requested while the engines begin.

    Raises:
        EngineError: no engine can be reached any more.
    """
    ahead: bool = True
    """Whether the next update is requested while the engines take the last one, not afterwards."""
    whole: bool = False
    """Whether the transfer fails for all engines if one of them fails."""
    begun: Callable[[], None] = _nothing
    """Function called when all engines have begun and the first update is ready."""
    close: Callable[[bool], None] = _nothing
    """Function called at the end; its argument says whether every engine took everything."""


Backend: TypeAlias = Callable[[PolicyModel, Sequence[Life], int], WeightStream]
"""Function from policy, engines and version of a transfer to its stream."""


@runtime_checkable
class DividedPolicy(Protocol):
    """A policy whose weights are divided over several processes, which send them themselves."""

    def sent(
        self, send: Send, *arguments: Any, ranks: Sequence[int] = (0,), adapter: bool = False
    ) -> Iterator[list[Any]]:
        """Yields the results of `send(weights, *arguments)` in each of `ranks`, which run at the same time; `adapter`
        sends the adapters instead of the weights."""
        ...

    def parts(self) -> int:
        """Returns the number of its processes if all of them are on this machine and have parts of the weights that
        they can send as they are; 0 if weights have to be put together first."""
        ...

    def sent_parts(self, send: Send, *arguments: Any) -> Iterator[list[Any]]:
        """Yields the results of `send(runs, rank, parts, *arguments)` in each process, of the runs (`Run`) of weights
        that it has; None for one that has sent all of its own while others have not."""
        ...

    def address(self) -> tuple[str, int]:
        """Returns the host and a free port of the first process."""
        ...


class AdaptedPolicy(Protocol):
    """A policy that can give its adapters (LoRA) without the weights."""

    def adapter(self) -> Iterator[tuple[str, Tensor]]:
        """Yields every matrix of the adapters once, by its name in peft's files; nothing without adapters."""
        ...


def sent(
    policy: PolicyModel, send: Send, *arguments: Any, ranks: Sequence[int] = (0,), adapter: bool = False
) -> Iterator[list[Any]]:
    """Yields the results of `send(weights, *arguments)` where the weights are; `adapter` sends an `AdaptedPolicy`'s
    adapters instead."""
    if isinstance(policy, DividedPolicy):
        yield from policy.sent(send, *arguments, ranks=ranks, adapter=adapter)
        return
    weights = cast(AdaptedPolicy, policy).adapter() if adapter else policy.weights()
    for message in send(weights, *arguments):
        yield [message]
