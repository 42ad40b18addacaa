"""Freed memory stays in the process, until it is given back."""

import platform
from collections.abc import Callable

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
