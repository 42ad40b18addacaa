"""Attention with sinks, capped scores or chunks is what float64 computes from all scores: values, gradients."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from rollgrad.adapters.engines.embedded.kv_cache import BLOCK, KVCache, Place
from rollgrad.adapters.engines.embedded.plans import Decode, DecodeInputs, Extend
from rollgrad.adapters.models.torch.kernels import capped
from rollgrad.adapters.models.torch.kernels.score_form import ScoreForm
from rollgrad.adapters.models.torch.kernels.sinks import _gradient_of_sinks, with_sinks
from rollgrad.adapters.models.torch.layers import attention, attention_buckets
from rollgrad.adapters.models.torch.layers.attention import ForestAttention
from rollgrad.adapters.models.torch.layers.layout import Node
from tests.pretended_gpu import CUDA, pretended_gpu

CPU = torch.device("cpu")
SCALE = 0.3
NODES = [
    Node(0, 37),
    Node(37, 50, ((0, 37),)),
    Node(87, 1, ((0, 37),)),
    Node(88, 20, ((0, 30), (37, 25))),
    Node(108, 29),
    Node(137, 3, ((0, 30), (37, 25), (88, 11))),
]
TOKENS = 140
HEADS = {"grouped": (8, 2, 16, 16), "alone": (4, 4, 24, 24), "odd": (6, 3, 20, 20), "narrow values": (4, 4, 24, 16)}
"""Query heads, key heads, and the widths of keys and of values."""


def inputs(kind: str, dtype: torch.dtype) -> list[Tensor]:
    """Queries, keys, values and sinks: one of these is far above all scores, one far below."""
    heads, key_heads, width, value_width = HEADS[kind]
    generator = torch.Generator().manual_seed(0)
    shapes = ((heads, width), (key_heads, width), (key_heads, value_width))
    made = [torch.randn(1, h, TOKENS, w, generator=generator) for h, w in shapes]
    sinks_H = torch.randn(heads, generator=generator) * 2
    sinks_H[:2] = torch.tensor([30.0, -30.0])
    return [x.to(dtype) for x in (*made, sinks_H)]


def whole_scores(query: Tensor, key: Tensor, value: Tensor, form: ScoreForm) -> Tensor:
    """Attention [Q, H, E] of query [H, Q, D], the last of the keys [G, K, D], to those that each sees."""
    shared = len(query) // len(key)
    key, value = (x.repeat_interleave(shared, 0) for x in (key, value))
    place_Q = torch.arange(key.shape[1] - query.shape[1], key.shape[1])[:, None]
    place_K = torch.arange(key.shape[1])
    hidden = (place_K > place_Q) | (place_K <= place_Q - (form.window or len(place_K)))
    if form.chunk is not None:
        hidden |= place_K // form.chunk != place_Q // form.chunk
    scores = query @ key.transpose(1, 2) * form.scaling
    if form.cap is not None:
        scores = torch.tanh(scores / form.cap) * form.cap
    scores = scores.masked_fill(hidden, -torch.inf)
    if form.sinks_H is not None:
        sinks = form.sinks_H.double()[:, None, None].expand(-1, query.shape[1], 1)
        return (torch.cat([scores, sinks], dim=2).softmax(2)[..., :-1] @ value).transpose(0, 1)
    return (scores.softmax(2) @ value).transpose(0, 1)


FORMS: dict[str, Callable[[Tensor, int | None], ScoreForm]] = {
    "sinks": lambda sinks_H, window: ScoreForm(SCALE, window, sinks_H=sinks_H),
    "capped": lambda sinks_H, window: ScoreForm(SCALE, window, cap=1.5),
    "capped in slices": lambda sinks_H, window: ScoreForm(SCALE, window, cap=1.5),
    "chunks": lambda sinks_H, window: ScoreForm(SCALE, window, chunk=20),
    "capped in chunks": lambda sinks_H, window: ScoreForm(SCALE, window, cap=1.5, chunk=11),
    "sinks in chunks": lambda sinks_H, window: ScoreForm(SCALE, window, sinks_H=sinks_H, chunk=1),
}
"""In chunks of 20 tokens `NODES` begin within chunks, at the border of one, and cross some."""


@cache
def expected(kind: str, form: str, dtype: torch.dtype, window: int | None) -> list[Tensor]:
    """The result [T, H, E] and the gradients, in float64, of numbers that are rounded to a format."""
    leaves = [x.double().requires_grad_() for x in inputs(kind, dtype)]
    query, key, value, sinks_H = leaves
    parts = []
    for node in NODES:
        path = node.path()
        own = slice(node.start, node.start + node.length)
        q, k, v = query[0, :, own], key[0, :, path], value[0, :, path]
        parts.append(whole_scores(q, k, v, FORMS[form](sinks_H, window)))
    return results(torch.cat(parts), leaves)


def results(out: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    weights = torch.linspace(-1, 1, out.numel()).view(out.shape).to(out.device)
    gradients = torch.autograd.grad((out.to(weights.dtype) * weights).sum(), leaves, allow_unused=True)
    return [x.to(CPU) for x in (out.detach(), *gradients) if x is not None]


@contextmanager
def pretended() -> Iterator[None]:
    with pretended_gpu():
        yield


MACHINES: dict[str, tuple[torch.device, Callable[[], AbstractContextManager[None]]]] = {
    "cpu": (CPU, nullcontext),
    "pretended gpu": (CUDA, pretended),
    "gpu": (CUDA, nullcontext),
}
ROUNDING = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
EACH: list[tuple[str, torch.dtype]] = [
    *(("cpu", dtype) for dtype in ROUNDING),
    *(("pretended gpu", dtype) for dtype in (torch.float32, torch.bfloat16)),
    *(("gpu", dtype) for dtype in ROUNDING if dtype != torch.float64),
]
ON_BOTH = ("cpu", torch.float32), ("pretended gpu", torch.bfloat16)
"""Machines on which heads that are not `grouped` are computed, too: how numbers are rounded has nothing to do with
heads."""


def marks(machine: str, dtype: torch.dtype, kind: str = "grouped") -> list[pytest.MarkDecorator]:
    narrow = kind == "grouped" or (machine, dtype) in ON_BOTH
    return [pytest.mark.gpu] if machine == "gpu" else [] if narrow else [pytest.mark.wide]


ON_A_GPU = {**ROUNDING, torch.float32: 1e-4}
"""Tolerances on a GPU, whose tensor cores multiply float32 in parts."""


def assert_close(found: list[Tensor], exact: list[Tensor], dtype: torch.dtype, machine: str) -> None:
    rounding = (ON_A_GPU if machine == "gpu" else ROUNDING)[dtype]
    for mine, theirs in zip(found, exact, strict=True):
        assert mine.dtype == dtype
        assert (mine.double() - theirs).norm() <= rounding * theirs.norm()


@pytest.mark.parametrize(
    ("kind", "machine", "dtype"),
    [pytest.param(kind, *each, marks=marks(*each, kind)) for kind in HEADS for each in EACH],
    ids=str,
)
@pytest.mark.parametrize("window", [None, 7], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_a_forest_is_what_float64_computes(
    form: str, kind: str, window: int | None, machine: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "slices" in form:
        monkeypatch.setattr(attention, "SLICE", 1000)
        monkeypatch.setattr(attention_buckets, "LEAST_QUERIES", 4)
    exact = expected(kind, form.removesuffix(" in slices"), dtype, window)
    device, entered = MACHINES[machine]
    with entered():
        query, key, value, sinks_H = leaves = [x.to(device).requires_grad_() for x in inputs(kind, dtype)]
        plan = ForestAttention(NODES, device=device, dtype=dtype)
        out = plan.attend(0, query, key, value, FORMS[form](sinks_H, window))[0]
        found = results(out, leaves)
        (plan,) = plan._chunked.values() if "chunks" in form else [plan]
        assert len(plan._sliced) == ("capped" in form)
        assert all(len(slices) > len(NODES) for slices in plan._sliced.values() if "slices" in form)
    assert_close(found, exact, dtype, machine)


def test_what_sinks_change_is_computed_in_float32() -> None:
    """The numbers are of half precision, whose own sums would be off by a thousandth and more."""
    generator = torch.Generator().manual_seed(2)
    gradient, out = (torch.randn(4, 30, 256, generator=generator).bfloat16() for _ in range(2))
    sums, sinks = torch.randn(4, 30, generator=generator), torch.randn(4, 1, generator=generator).bfloat16()
    exact = torch.logaddexp(sums.double(), sinks.double().expand(4, 30))
    _, found = with_sinks(out, sums, sinks)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), exact, rtol=1e-6, atol=1e-6)
    expected = -(sinks.double() - exact).exp() * (gradient.double() * out.double()).sum(-1)
    torch.testing.assert_close(_gradient_of_sinks(gradient, out, found, sinks).double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("machine", "dtype"), [pytest.param(*each, marks=marks(*each)) for each in EACH], ids=str)
@pytest.mark.parametrize("window", [None, 100], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_decoding_is_what_float64_computes(
    form: str, window: int | None, machine: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sequences of one block and of several, steps of one token and of more."""
    if "slices" in form:
        monkeypatch.setattr(capped, "SLICE", 4096)
    heads, key_heads, width, value_width = HEADS["grouped" if "capped" in form else "narrow values"]
    lengths, added = [5, 3 * BLOCK - 1, BLOCK + 17], [3, 1, 2]
    generator = torch.Generator().manual_seed(1)
    past = [
        [torch.randn(key_heads, n, w, generator=generator).to(dtype) for w in (width, value_width)] for n in lengths
    ]
    sinks_H = inputs("grouped" if "capped" in form else "narrow values", dtype)[3]
    device, entered = MACHINES[machine]

    def new(tokens: int) -> list[Tensor]:
        shapes = ((heads, width), (key_heads, width), (key_heads, value_width))
        return [torch.randn(len(lengths), h, tokens, w, generator=generator).to(dtype) for h, w in shapes]

    def exact(row: int, news: list[Tensor], tokens: int) -> Tensor:
        query, key, value = (x[row, :, :tokens].double() for x in news)
        k, v = (torch.cat([p.double(), x], 1) for p, x in zip(past[row], (key, value), strict=True))
        return whole_scores(query, k, v, FORMS[form](sinks_H, window))

    with entered():
        cache, places = KVCache(), [Place() for _ in lengths]
        cache.capacity = 8
        for place, length in zip(places, lengths, strict=True):
            cache.reserve(place, length + 4)
        stored = cache.pair(0, *(x[None].to(device) for x in past[0]))
        for place, kept in zip(places, past, strict=True):
            for room, part in zip(stored, kept, strict=True):
                for index, number in enumerate(place.blocks):
                    tokens = part[:, index * BLOCK : (index + 1) * BLOCK]
                    room[number, :, : tokens.shape[1]] = tokens.to(device)
        step, more = new(1), new(max(added))
        ends = torch.tensor(lengths)
        shifts = torch.zeros(len(lengths), dtype=torch.int64)
        plans: list[tuple[Any, list[Tensor], list[int]]] = [
            (Extend(cache, places, ends, torch.tensor(added), device, dtype), more, added),
            (Decode(cache, DecodeInputs.of(cache, [0] * 3, places, lengths, shifts).to(device)), step, [1] * 3),
        ]
        for plan, news, counts in plans:
            query, key, value = (x.to(device) for x in news)
            out = plan.attend(0, query, key, value, FORMS[form](sinks_H.to(device), window)).to(CPU)
            for row, count in enumerate(counts):
                assert_close([out[row, :count]], [exact(row, news, count)], dtype, machine)
