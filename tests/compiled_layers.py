"""Helpers of tests of compiled layers: another compiler than torch's own, and the number of graphs."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch

from rollgrad.adapters.models.torch.kernels import fusing

AS_IT_IS = "aot_eager"
"""Compiler whose graphs compute what torch computes without them, operation by operation: in a second, not in ten."""
AS_WRITTEN = "eager"
"""Compiler that makes no graphs of gradients, which torch then finds as it does without compiling: in a third of the
time."""


@contextmanager
def compiler(name: str | Callable[..., Any]) -> Iterator[None]:
    """Has `torch.compile` begin anew inside the block, with the compiler of that name, or a function, also where the
    tests of clusters have turned it off."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    try:
        with patch.dict(os.environ), patch.object(torch, "compile", partial(torch.compile, backend=name)):
            os.environ.pop("TORCHDYNAMO_DISABLE", None)
            yield
    finally:
        torch._dynamo.reset()


@contextmanager
def fusing_on_a_cpu() -> Iterator[None]:
    """Fuses functions of tensors inside the block, by a compiler that keeps each operation, and does what it must not
    overwrite."""
    fusing.fused.cache_clear()
    try:
        with patch.object(fusing, "is_fused", lambda device: True), compiler(AS_IT_IS):
            yield
    finally:
        fusing.fused.cache_clear()


def graphs() -> int:
    """The number of graphs that have been compiled."""
    count: int = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    return count
