"""Attention with capped scores: score s counts as cap * tanh(s / cap) (Gemma 2, arXiv:2408.00118, section 2).

No fused kernel of torch computes it, but those that `flex_attention` compiles for GPUs, for each shape anew. It is
computed plainly here, in float32 or wider, for a slice of the queries at a time and for the keys that these see. The
backward pass computes each slice's scores again, as fused kernels do: beside queries, keys, values and the result it
keeps the logarithm of the sum of each query's exponentiated scores.

Suffixes: a slice has R rows of Q queries and K keys; G key heads, each with S query heads; P = R * G, O = Q * S.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

HALF = (torch.float16, torch.bfloat16)


SLICE = 1 << 22
"""Scores of all heads that are computed together at most."""


class Slice(Protocol):
    """Queries, and the keys that they see: `token_M` are the queries among all, `slot_M` their places in R * Q."""

    rows: int
    queries: int
    keys: int
    query_token: Tensor
    key_token: Tensor
    query_position: Tensor
    token_M: Tensor
    slot_M: Tensor


def capped_attention(
    q_MHD: Tensor,
    k_MGD: Tensor,
    v_MGE: Tensor,
    slices: Sequence[Slice],
    *,
    scaling: float,
    window: int | None,
    cap: float,
) -> Tensor:
    """Returns attention [M, H, E] of the queries of all `slices`, each to the last `window` keys up to itself (None: to
    all), whose scores are capped."""
    out: Tensor = _Capped.apply(q_MHD, k_MGD, v_MGE, slices, scaling, window, cap)  # type: ignore[no-untyped-call]
    return out


def capped_dense(query: Tensor, key: Tensor, value: Tensor, *, scaling: float, mask: Tensor, cap: float) -> Tensor:
    """Returns attention [B, H, Q, E] as `kernels.dense` does, with capped scores; without gradients."""
    groups = key.shape[1]
    shared, step = query.shape[1] // groups, max(1, SLICE // (query.shape[0] * query.shape[1] * key.shape[2]))
    parts = []
    for begin in range(0, query.shape[2], step):
        some = query[:, :, begin : begin + step]
        grouped = some.reshape(len(query), groups, -1, query.shape[3])
        seen = mask[:, :, begin : begin + step].repeat(1, 1, shared, 1)
        out, _ = capped_with_logsumexp(grouped, key, value, scaling=scaling, mask=seen, cap=cap)
        parts.append(out.view(*some.shape[:3], -1))
    return torch.cat(parts, 2)


def capped_with_logsumexp(
    query: Tensor, key: Tensor, value: Tensor, *, scaling: float, mask: Tensor, cap: float
) -> tuple[Tensor, Tensor]:
    """Returns what `kernels.dense_with_logsumexp` does, with capped scores; without gradients."""
    q, k, v = (_wide(x).flatten(0, 1) for x in (query, key, value))
    scores = _tanh(q, k, scaling / cap).mul(cap).view(*query.shape[:3], -1) + mask
    sums = scores.logsumexp(3)
    out = _product((scores - sums[..., None]).exp().to(v.dtype).flatten(0, 1), v)
    return out.view(*query.shape[:3], -1).to(query.dtype), sums


class _Capped(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_MHD: Tensor,
        k_MGD: Tensor,
        v_MGE: Tensor,
        slices: Sequence[Slice],
        scaling: float,
        window: int | None,
        cap: float,
    ) -> Tensor:
        place_K = torch.arange(max(part.keys for part in slices), device=q_MHD.device)
        ctx.slices, ctx.settings = slices, (scaling, window, cap, place_K)
        out_MHE = q_MHD.new_empty(*q_MHD.shape[:2], v_MGE.shape[2])
        sums_MH = q_MHD.new_empty(q_MHD.shape[:2], dtype=torch.promote_types(q_MHD.dtype, torch.float32))
        for part in slices:
            _attend(part, (q_MHD, k_MGD, v_MGE), (scaling, cap), _hidden(part, place_K, window), out_MHE, sums_MH)
        ctx.save_for_backward(q_MHD, k_MGD, v_MGE, out_MHE, sums_MH)
        return out_MHE

    @staticmethod
    def backward(ctx: Any, gradient_MHE: Tensor) -> Any:
        q_MHD, k_MGD, v_MGE, out_MHE, sums_MH = ctx.saved_tensors
        scaling, window, cap, place_K = ctx.settings
        wide = sums_MH.dtype
        of_q, of_k, of_v = torch.empty_like(q_MHD), *(torch.zeros_like(x, dtype=wide) for x in (k_MGD, v_MGE))
        deltas_MH = (gradient_MHE.to(wide) * out_MHE.to(wide)).sum(2)
        for part in ctx.slices:
            hidden = _hidden(part, place_K, window)
            given = (gradient_MHE, sums_MH, deltas_MH)
            _add_gradients(part, (q_MHD, k_MGD, v_MGE), (scaling, cap), hidden, given, (of_q, of_k, of_v))
        return of_q, of_k.to(k_MGD.dtype), of_v.to(v_MGE.dtype), None, None, None, None


Three = tuple[Tensor, Tensor, Tensor]


def _attend(
    part: Slice, inputs: Three, form: tuple[float, float], hidden: Tensor, out_MHE: Tensor, sums_MH: Tensor
) -> None:
    """Stores the result of a slice and the logarithm of its sums; `form` are scaling and cap."""
    q_POD, k_PKD, v_PKE = _slice(part, *inputs)
    weights_POK, _ = _scores(q_POD, k_PKD, hidden, *form)
    sums_PO1 = weights_POK.logsumexp(2, keepdim=True)
    weights_POK.sub_(sums_PO1).exp_()
    _put(part, out_MHE, _product(weights_POK.to(v_PKE.dtype), v_PKE))
    _put(part, sums_MH[..., None], sums_PO1)


def _add_gradients(
    part: Slice, inputs: Three, form: tuple[float, float], hidden: Tensor, given: Three, gradients: Three
) -> None:
    """Adds to the gradients what a slice has; `given` are the gradient of the result, the logarithm of its sums, and
    the product of the result and its gradient."""
    q_POD, k_PKD, v_PKE = _slice(part, *inputs)
    (gradient_MHE, sums_MH, deltas_MH), (of_q, of_k, of_v) = given, gradients
    groups = of_k.shape[1]
    g_POE = _queries(part, gradient_MHE, groups, absent=0.0)
    weights_POK, tanh_POK = _scores(q_POD, k_PKD, hidden, *form)
    weights_POK.sub_(_queries(part, sums_MH[..., None], groups, absent=float("inf"))).exp_()
    _add(part, of_v, _product(weights_POK.transpose(1, 2).to(g_POE.dtype), g_POE))
    of_scores = _product(g_POE, v_PKE.transpose(1, 2)).sub_(_queries(part, deltas_MH[..., None], groups, absent=0.0))
    of_scores.mul_(weights_POK).mul_(tanh_POK.square_().neg_().add_(1.0)).mul_(form[0])
    of_scores = of_scores.to(q_POD.dtype)
    _put(part, of_q, _product(of_scores, k_PKD))
    _add(part, of_k, _product(of_scores.transpose(1, 2), q_POD))


def _slice(part: Slice, q_MHD: Tensor, k_MGD: Tensor, v_MGE: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns queries [P, O, D], keys [P, K, D] and values [P, K, E]."""
    groups = k_MGD.shape[1]
    keys, values = (
        _wide(x).index_select(0, part.key_token).view(part.rows, part.keys, groups, -1).transpose(1, 2).flatten(0, 1)
        for x in (k_MGD, v_MGE)
    )
    return _by_key_head(part, _wide(q_MHD).index_select(0, part.query_token), groups), keys, values


def _wide(x: Tensor) -> Tensor:
    """Returns numbers in the format in which products are taken: a GPU's of half precision are added up in float32."""
    return x if x.is_cuda else x.to(torch.promote_types(x.dtype, torch.float32))


def _by_key_head(part: Slice, rows: Tensor, groups: int) -> Tensor:
    """Returns [P, O, W] from rows [R * Q, H, W] of queries."""
    return (
        rows.view(part.rows, part.queries, groups, -1, rows.shape[2])
        .transpose(1, 2)
        .reshape(part.rows * groups, -1, rows.shape[2])
    )


def _queries(part: Slice, x_MHW: Tensor, groups: int, *, absent: float) -> Tensor:
    """Returns [P, O, W] of the queries of a slice; in the places that are no query's are the numbers `absent`."""
    rows = x_MHW.new_full((part.rows * part.queries, *x_MHW.shape[1:]), absent)
    return _by_key_head(part, _wide(rows.index_copy_(0, part.slot_M, x_MHW.index_select(0, part.token_M))), groups)


def _put(part: Slice, x_MHW: Tensor, found_POW: Tensor) -> None:
    """Stores what was computed for the queries of a slice."""
    heads, width = x_MHW.shape[1:]
    rows = found_POW.view(part.rows, -1, part.queries, heads * part.rows // len(found_POW), width).transpose(1, 2)
    rows = rows.reshape(-1, heads, width).index_select(0, part.slot_M)
    x_MHW.index_copy_(0, part.token_M, rows.to(x_MHW.dtype))


def _add(part: Slice, x_MGW: Tensor, found_PKW: Tensor) -> None:
    """Adds what was computed for the keys of a slice."""
    rows = found_PKW.view(part.rows, -1, part.keys, x_MGW.shape[2]).transpose(1, 2).flatten(0, 1)
    x_MGW.index_add_(0, part.key_token, rows)


def _hidden(part: Slice, place_K: Tensor, window: int | None) -> Tensor:
    """Returns whether a query does not see a key [R, 1, Q, 1, K]; `place_K` counts keys."""
    key_K = place_K[: part.keys]
    position_RQ1 = part.query_position[:, :, None]
    hidden = key_K > position_RQ1
    if window is not None:
        hidden |= key_K <= position_RQ1 - window
    return hidden[:, None, :, None]


def _scores(q_POD: Tensor, k_PKD: Tensor, hidden: Tensor, scaling: float, cap: float) -> tuple[Tensor, Tensor]:
    """Returns capped scores [P, O, K], minus infinity where a key is hidden, and their hyperbolic tangents."""
    tanh_POK = _tanh(q_POD, k_PKD, scaling / cap)
    scores = tanh_POK * cap
    rows, _, queries, _, keys = hidden.shape
    scores.view(rows, -1, queries, scores.shape[1] // queries, keys).masked_fill_(hidden, float("-inf"))
    return scores, tanh_POK


def _tanh(q_POD: Tensor, k_PKD: Tensor, factor: float) -> Tensor:
    """Returns the hyperbolic tangents of scaled products [P, O, K]."""
    return _product(q_POD, k_PKD.transpose(1, 2)).mul_(factor).tanh_()


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Returns the products of matrices, in float32 or wider."""
    return torch.bmm(a, b, out_dtype=torch.float32) if a.is_cuda and a.dtype in HALF else torch.bmm(a, b)
