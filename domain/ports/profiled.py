"""Port: processes whose work can be recorded.

Engines and groups of processes may be this besides.
"""

from collections.abc import Mapping
from typing import Protocol, runtime_checkable


@runtime_checkable
class Profiled(Protocol):
    """Processes that record what they compute, between two calls."""

    async def begin_profile(self) -> None:
        """Begins to record."""
        ...

    async def end_profile(self) -> Mapping[str, bytes]:
        """Ends; returns the Chrome trace of each process by a name, JSON compressed by gzip."""
        ...
