"""Freed memory stays in the process, until it is given back."""

import os
import platform
from collections.abc import Callable

import pytest
import torch

from rollgrad.adapters.models.torch.allocator import GROWING, let_segments_grow
from rollgrad.adapters.weights.gpu_buckets import in_fixed_segment

SCRIPT = """
import psutil, torch
from rollgrad.adapters.models.torch.allocator import give_back_freed_memory, keep_freed_memory

def held():
    return psutil.Process().memory_info().rss

keep_freed_memory()
blocks = [torch.ones(1_000_000) for _ in range(100)]
above = torch.ones(1_000_000)
full = held()
del blocks
freed = held()
give_back_freed_memory()
print(full - freed, freed - held())
"""


def test_freed_memory_stays_until_it_is_given_back(run_script: Callable[..., str]) -> None:
    of_freeing, of_giving_back = map(int, run_script("-c", SCRIPT).split())
    if platform.libc_ver()[0] == "glibc":
        assert of_freeing < 50e6
        assert of_giving_back > 350e6
    else:
        assert of_giving_back == 0


@pytest.mark.parametrize(
    ("gpu", "variables", "grow"),
    [
        (True, {}, True),
        (True, {"PYTORCH_ALLOC_CONF": "max_split_size_mb:512"}, False),
        (True, {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}, False),
        (False, {}, False),
    ],
    ids=str,
)
def test_segments_of_a_gpu_grow_unless_the_environment_says_how_they_are(
    monkeypatch: pytest.MonkeyPatch, gpu: bool, variables: dict[str, str], grow: bool
) -> None:
    monkeypatch.setattr(os, "environ", variables.copy())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    told: list[str] = []
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", told.append)
    let_segments_grow()
    assert told == [GROWING] * grow
    told.clear()
    with in_fixed_segment():  # another process can map no part of one that grows
        assert told == ["expandable_segments:False"] * grow
    assert told == ["expandable_segments:False", GROWING] * grow
