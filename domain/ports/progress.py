"""Port: shows how far the step that goes on is, to people who wait for it."""

from typing import Protocol, runtime_checkable


@runtime_checkable
class ShowsProgress(Protocol):
    """A sink of metrics that also shows what happens between them. Promises: it is quick, as it is told of every
    episode, and never raises."""

    def progress(self, doing: str, done: int, of: int) -> None:
        """Shows that `done` of `of` parts of what the run is `doing`, such as sampling, are done; `of` is 0 of what
        has no parts that are counted."""
        ...
