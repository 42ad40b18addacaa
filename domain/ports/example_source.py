"""Port: where examples come from that are there before training begins."""

from typing import Protocol, TypeVar, runtime_checkable

ExampleCo = TypeVar("ExampleCo", covariant=True)


class ExampleSource(Protocol[ExampleCo]):
    """Examples by index. Promises: the same index always gives the same example."""

    def __len__(self) -> int:
        """Returns how many there are, at least one."""
        ...

    def __getitem__(self, index: int, /) -> ExampleCo:
        """Returns example `index`, from 0."""
        ...


@runtime_checkable
class ExampleStream(Protocol[ExampleCo]):
    """Examples of rows that are read while training goes on. Promises: the same position always gives the same
    example."""

    def at(self, position: int) -> ExampleCo | None:
        """Returns the example of the row at `position`, from 0 without end; None for a row that cannot be used, which
        is counted and told."""
        ...
