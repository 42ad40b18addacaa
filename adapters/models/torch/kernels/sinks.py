"""Attention with sinks, by the fused kernels that compute it without (gpt-oss, arXiv:2508.10925).

A sink is one more key of each head: all queries see it, its score s is a parameter, and its value is 0. With L the
logarithm of the sum of a query's exponentiated scores, which kernels return, L' = log(exp(L) + exp(s)) is that sum with
the sink, and the result is the kernel's times exp(L - L'). The kernel's own backward pass, given L' and this result in
the place of its own, has the right gradients of queries, keys and values. It computes the weight exp(score - L') of
each key again; the gradient of a score is its weight times (g v - g out'), where g is the gradient of the result out'.
For the sink v is 0, so that its gradient is the sum over queries of -exp(s - L') (g out'). No scores are kept.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from rollgrad.adapters.models.torch.kernels.determinism import strictly

HEAD_STEP = 8
"""A GPU's heads have a multiple of this many numbers."""

MASK_STEP = 16
"""The rows of a GPU's mask begin at multiples of this many numbers."""


def with_sinks(out: Tensor, sums: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the result of attention with sinks, and the logarithm of the sum of its exponentiated scores.

    Args:
        out: result without sinks [..., E].
        sums: logarithm of the sum of its exponentiated scores [...], float32 or wider.
        sinks: scores of the sinks, which broadcast to [...].
    """
    both = torch.logaddexp(sums, sinks.to(sums.dtype).expand_as(sums))
    return (out * (sums - both).exp()[..., None]).to(out.dtype), both


def varlen_with_sinks(
    query_QHD: Tensor,
    key_KGD: Tensor,
    value_KGD: Tensor,
    sinks_H: Tensor,
    *place: Any,
    scaling: float,
    left: int,
    sharing: Mapping[str, bool],
) -> Tensor:
    """Returns attention [Q, H, D] as torch's `varlen_attn` with `window_size` (`left`, 0) does, with sinks; `place` is
    its cu_seq_q, cu_seq_k, max_q and max_k, `sharing` what tells it that queries share keys."""
    out: Tensor = _Varlen.apply(query_QHD, key_KGD, value_KGD, sinks_H, place, scaling, left, sharing)  # type: ignore[no-untyped-call]
    return out


def dense_with_sinks(
    query: Tensor, key: Tensor, value: Tensor, sinks_HQ: Tensor, *, scaling: float, mask: Tensor | None
) -> Tensor:
    """Returns attention [B, H, Q, E] as `kernels.dense` does, where `sinks_HQ` are the scores of each query's sink. On
    a GPU there are as many heads of keys as of queries."""
    width = value.shape[3]
    step, common = (HEAD_STEP, 0) if query.is_cuda else (1, max(width, key.shape[3]))  # a CPU's kernel has one width
    query, key, value = (widened(x, max(common, -(-x.shape[3] // step) * step)) for x in (query, key, value))
    dense = _DenseOnGPU if query.is_cuda else _DenseOnCPU
    out: Tensor = dense.apply(query, key, value, sinks_HQ, mask, scaling)  # type: ignore[no-untyped-call]
    return out.narrow(3, 0, width)


def no_sinks(query: Tensor, *shape: int) -> Tensor:
    """Returns scores of sinks that change nothing. With them the kernels' backward pass is called here, where it can be
    made deterministic."""
    return query.new_full(shape, -torch.inf)


def widened(x: Tensor, width: int) -> Tensor:
    """Returns heads of `width` numbers; those that have as many are not copied, as `functional.pad` would."""
    return x if x.shape[-1] == width else functional.pad(x, (0, width - x.shape[-1]))


def _gradient_of_sinks(gradient: Tensor, out: Tensor, sums: Tensor, sinks: Tensor) -> Tensor:
    """Returns the gradient [...] of each query's sink."""
    wide = sums.dtype
    return -(sinks.to(wide) - sums).exp() * (gradient.to(wide) * out.to(wide)).sum(-1)


class _Varlen(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks_H: Tensor,
        place: Any,
        scaling: float,
        left: int,
        sharing: Mapping[str, bool],
    ) -> Tensor:
        ctx.place, ctx.settings = (*place, left == -1), (scaling, [left, 0])
        out, sums_HQ, state = torch.ops.torch_attn._varlen_attn(query, key, value, *ctx.place, *ctx.settings, **sharing)
        out, sums_QH = with_sinks(out, sums_HQ.t(), sinks_H)
        # A copy of the sinks, because processes that divide parameters free them between the passes.
        ctx.save_for_backward(query, key, value, sinks_H.clone(), out, sums_QH.t().contiguous(), state)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        query, key, value, sinks_H, out, sums_HQ, state = ctx.saved_tensors
        gradient = gradient.contiguous()
        with strictly():
            gradients = torch.ops.torch_attn._varlen_attn_backward(
                gradient, query, key, value, out, sums_HQ, *ctx.place, state, *ctx.settings
            )
        of_sinks_H = _gradient_of_sinks(gradient, out, sums_HQ.t(), sinks_H).sum(0).to(sinks_H.dtype)
        return *gradients, of_sinks_H, None, None, None, None


class _DenseOnCPU(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks_HQ: Tensor, mask: Tensor | None, scaling: float
    ) -> Tensor:
        ctx.scaling = scaling
        out, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, mask is None, attn_mask=mask, scale=scaling
        )
        out, sums = with_sinks(out, sums, sinks_HQ)
        ctx.save_for_backward(query, key, value, sinks_HQ.clone(), mask, out, sums)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        query, key, value, sinks_HQ, mask, out, sums = ctx.saved_tensors
        gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            gradient, query, key, value, out, sums, 0.0, mask is None, attn_mask=mask, scale=ctx.scaling
        )
        of_sinks_HQ = _gradient_of_sinks(gradient, out, sums, sinks_HQ).sum(0).to(sinks_HQ.dtype)
        return *gradients, of_sinks_HQ, None, None


class _DenseOnGPU(torch.autograd.Function):
    """Computes by the memory-efficient kernel. Its sums are padded to a multiple of queries, with infinity."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks_HQ: Tensor, mask: Tensor | None, scaling: float
    ) -> Tensor:
        ctx.scaling = scaling
        if mask is not None:
            keys = key.shape[2]
            aligned = functional.pad(mask, (0, -keys % MASK_STEP)).narrow(3, 0, keys)
            mask = aligned.expand(*query.shape[:3], keys)
        out, sums, *state = torch.ops.aten._scaled_dot_product_efficient_attention(
            query, key, value, mask, True, 0.0, mask is None, scale=scaling
        )
        count = query.shape[2]
        out, real = with_sinks(out, sums.narrow(2, 0, count), sinks_HQ)
        sums = torch.cat([real, sums.narrow(2, count, sums.shape[2] - count)], dim=2)
        ctx.save_for_backward(query, key, value, sinks_HQ.clone(), mask, out, sums, *state)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        query, key, value, sinks_HQ, mask, out, sums, *state = ctx.saved_tensors
        with strictly():
            *gradients, _ = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
                gradient.contiguous(),
                *(query, key, value, mask, out, sums, *state),
                *(0.0, [True, True, True, False], mask is None),
                scale=ctx.scaling,
            )
        sums = sums.narrow(2, 0, query.shape[2])
        of_sinks_HQ = _gradient_of_sinks(gradient, out, sums, sinks_HQ).sum(0).to(sinks_HQ.dtype)
        return *gradients, of_sinks_HQ, None, None
