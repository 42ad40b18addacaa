"""Helpers of tests of compiled layers: another compiler than torch's own, and the number of graphs."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

AS_IT_IS = "aot_eager"
"""Compiler whose graphs compute what torch computes without them, operation by operation: in a second, not in ten."""


@contextmanager
def compiler(name: str | Callable[..., Any]) -> Iterator[None]:
    """Has `torch.compile` begin anew inside the block, with the compiler of that name, or a function."""
    from torch._dynamo.backends.registry import set_default_backend

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    set_default_backend(name)
    try:
        yield
    finally:
        set_default_backend(None)
        torch._dynamo.reset()


def graphs() -> int:
    """The number of graphs that have been compiled."""
    count: int = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    return count
