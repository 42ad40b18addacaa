"""Port: where examples come from that are there before training begins."""

from typing import Protocol, TypeVar

ExampleCo = TypeVar("ExampleCo", covariant=True)


class ExampleSource(Protocol[ExampleCo]):
    """Examples by index. Promises: the same index always gives the same example."""

    def __len__(self) -> int:
        """Returns how many there are, at least one."""
        ...

    def __getitem__(self, index: int, /) -> ExampleCo:
        """Returns example `index`, from 0."""
        ...
