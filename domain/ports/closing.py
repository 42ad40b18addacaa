"""Ports: what holds threads, processes, files or connections until it is closed.

Adapters of any port may be one of them besides; what a run was given, or made, is closed when it ends.
"""

from typing import Protocol, runtime_checkable


@runtime_checkable
class Closable(Protocol):
    """Promises: idempotent."""

    def close(self) -> None:
        """Releases what it holds."""
        ...


@runtime_checkable
class AsyncClosable(Protocol):
    """An object that belongs to the event loop that used it. Promises: `aclose` is idempotent."""

    async def aclose(self) -> None:
        """Releases what it holds, in that event loop."""
        ...
