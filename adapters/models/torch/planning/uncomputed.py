"""Kernels of a model's pass in a form that computes nothing: on the meta device they make and keep what those of the
device would, so that it can be counted (`pass_memory.py`). Attention keeps queries, keys, values and its result, as
fused kernels do."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from rollgrad.adapters.models.torch.kernels.attention import HALF, WIDEST_HEAD, has_varlen
from rollgrad.adapters.models.torch.kernels.capped import SLICE
from rollgrad.adapters.models.torch.layers.attention import ForestAttention
from rollgrad.adapters.models.torch.layers.attention_buckets import LEAST_QUERIES
from rollgrad.adapters.models.torch.layers.layout import Node

WORKED = {"forward": (2, 3, 2), "backward": (3, 5, 2)}
"""Copies of a slice's scores, of its queries, and of its keys and values, with which capped attention works at once."""

MEASURED_RESULT = "aten::new_empty_strided"
"""Name of the operation that makes the results of fused attention here, which selective checkpointing keeps."""


class UncomputedAttention(ForestAttention):
    """The plan of a training pass on a device, whose kernels keep what they would keep there, and compute nothing."""

    def __init__(self, rows: int, tokens: int, device: torch.device, dtype: torch.dtype) -> None:
        nodes = [Node(row * tokens, tokens) for row in range(rows)]
        super().__init__(nodes, device=torch.device("meta"), dtype=dtype)
        self._computing = device

    def has_varlen(self, query: Tensor) -> bool:
        """Implements `ForestAttention.has_varlen`."""
        if self._computing.type == "cuda" and not torch.cuda.is_available():  # a GPU elsewhere, taken to have it
            return query.dtype in HALF and query.shape[-1] <= WIDEST_HEAD
        return has_varlen(self._computing, query.dtype, query.shape[-1])

    def dense(self, query: Tensor, key: Tensor, value: Tensor, *, mask: Tensor | None = None, **_: Any) -> Tensor:
        """Returns a tensor in the place of the kernel's result, [B, H, Q, E]."""
        if self._computing.type == "cuda":
            key, value = (x.repeat_interleave(query.shape[1] // key.shape[1], 1) for x in (key, value))
        return _kept(query.transpose(1, 2), key, value, mask).transpose(1, 2)

    def _slices(self, heads: int, window: int | None) -> list[Any]:
        return []

    def capped(self, q_MHD: Tensor, k_MGD: Tensor, v_MGE: Tensor, *_: Any, **__: Any) -> Tensor:
        """Returns a tensor in the place of what is computed in slices, [M, H, E]."""
        tokens, heads = q_MHD.shape[:2]
        longest = max(node.length for node in self._nodes)
        share = min(1.0, SLICE / (heads * tokens * longest))
        scores = max(share * tokens, min(tokens, LEAST_QUERIES)) * heads * longest
        # Of one long sequence each slice has all keys.
        keys = max(share, longest / tokens) * (k_MGD.numel() + v_MGE.numel())
        wide = q_MHD.itemsize / 4 if self._computing.type == "cuda" else 1  # a CPU has all in float32
        seen = scores / heads / 4  # a byte for each pair of query and key
        work = [int(a * scores + seen + wide * (b * share * q_MHD.numel() + c * keys)) for a, b, c in WORKED.values()]
        return _kept(q_MHD, k_MGD, v_MGE, work=work)

    def varlen(self, query_QHD: Tensor, key_KGD: Tensor, value_KGE: Tensor, *_: Any, **__: Any) -> Tensor:
        """Returns a tensor in the place of the kernel's result, [Q, H, E]."""
        return _kept(query_QHD, key_KGD, value_KGE)


class UncomputedProducts(TorchFunctionMode):
    """Has torch's scaled dot-product attention keep what a fused kernel keeps, and compute nothing."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (_attended if func is functional.scaled_dot_product_attention else func)(*args, **(kwargs or {}))


def _attended(query: Tensor, key: Tensor, value: Tensor, *, attn_mask: Tensor | None = None, **_: Any) -> Tensor:
    added = None if attn_mask is None else attn_mask.to(query.dtype)  # torch makes one that is added to scores
    return _kept(query.transpose(1, 2), key, value, added).transpose(1, 2)


def _kept(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, *, work: Sequence[int] = (0, 0)
) -> Tensor:
    """Returns a tensor of the value's width for each query [..., H, D]; the backward pass keeps all that is given.
    `work` has the float32 numbers that the forward and the backward pass work with."""
    out: Tensor = _Uncomputed.apply(query, key, value, mask, work)  # type: ignore[no-untyped-call]
    return out


def _in_slices(like: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return like.new_empty(shape, dtype=dtype)


def _fused(like: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    strides = [math.prod(shape[place + 1 :]) for place in range(len(shape))]
    return like.new_empty_strided(shape, strides, dtype=dtype)


class _Uncomputed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, work: Sequence[int]
    ) -> Tensor:
        ctx.work = work
        working = query.new_empty(work[0], dtype=torch.float32)  # beside the result
        # Selective checkpointing keeps results of fused attention, which are told by this operation here.
        make = _in_slices if any(work) else _fused
        out = make(query, (*query.shape[:-1], value.shape[-1]), query.dtype)
        sums = make(query, query.shape[:-1], torch.float32)
        ctx.save_for_backward(query, key, value, mask, out, sums)
        del working
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, *_ = ctx.saved_tensors
        working = query.new_empty(ctx.work[1], dtype=torch.float32)
        gradients = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
        del working
        return *gradients, None, None


class UncomputedNorm(torch.autograd.Function):
    """The norm of a GPU's kernel (`norms.py`), which keeps its input and one number a row."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, hidden: Tensor) -> Tensor:
        """Returns a tensor in the place of the normalised states."""
        ctx.save_for_backward(weight, hidden, hidden.new_empty(*hidden.shape[:-1], 1, dtype=torch.float32))
        return torch.empty_like(hidden)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        """Returns tensors in the place of the gradients."""
        weight, hidden, _ = ctx.saved_tensors
        return torch.empty_like(weight), torch.empty_like(hidden)


def grouped_product(a: Tensor, b: Tensor, offsets: Tensor | None = None, *_: Any, **__: Any) -> Tensor:
    """Returns a tensor in the place of the product of groups of rows with a matrix each, or of groups of columns with
    rows, whose shape torch tells in bfloat16 alone."""
    if b.ndim == 3:
        return a.new_empty(*a.shape[:-1], b.shape[-1])
    groups = () if offsets is None else (len(offsets),)
    return a.new_empty(*groups, a.shape[-2], b.shape[-1])
