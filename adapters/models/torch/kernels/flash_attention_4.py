"""FlashAttention 4, the package flash-attn-4, as torch calls it, which imports this module by name (`attention.py`).

torch 2.13 takes two results of the forward pass; since 4.0.0b20 the package returns more, of which these are the first.
"""

from functools import cache
from importlib import import_module
from typing import Any


@cache
def _kernels() -> Any:
    return import_module("flash_attn.cute.interface")


def _flash_attn_fwd(*arguments: Any, **settings: Any) -> Any:
    """Returns the result and the log of the sum of exponentiated scores."""
    return _kernels()._flash_attn_fwd(*arguments, **settings)[:2]


def _flash_attn_bwd(*arguments: Any, **settings: Any) -> Any:
    """Returns the gradients of queries, keys and values."""
    return _kernels()._flash_attn_bwd(*arguments, **settings)
