"""Attention over a forest on a CPU is that of a float64 reference, and computes few scores of keys that are hidden."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from rollgrad.adapters.models.torch.kernels.attention import dense
from rollgrad.adapters.models.torch.kernels.score_form import ScoreForm
from rollgrad.adapters.models.torch.layers.attention import ForestAttention
from rollgrad.adapters.models.torch.layers.layout import Node

FOREST = [
    Node(0, 1500),
    Node(1500, 900, ((0, 1200),)),
    Node(2400, 700, ((0, 1200), (1500, 800))),
    Node(3100, 40, ((0, 7),)),
]
CPU = torch.device("cpu")
SCALING = 0.3


def tensors(tokens: int, widths: Sequence[int] = (16, 16, 12)) -> list[Tensor]:
    chance = torch.Generator().manual_seed(0)
    return [
        torch.randn(1, heads, tokens, width, generator=chance) for heads, width in zip((4, 2, 2), widths, strict=True)
    ]


def reference(nodes: Sequence[Node], query: Tensor, key: Tensor, value: Tensor, window: int | None) -> Tensor:
    q, k, v = (x[0].double() for x in (query, key, value))
    out = q.new_zeros(q.shape[1], q.shape[0], v.shape[2])
    for node in nodes:
        own, path = slice(node.start, node.start + node.length), node.path()
        keys, values = (x[:, path].repeat_interleave(len(q) // len(k), 0) for x in (k, v))
        position, place = torch.arange(node.prefix_length, node.keys)[:, None], torch.arange(node.keys)
        hidden = (place > position) | (place <= position - (window or node.keys))
        scores = (SCALING * q[:, own] @ keys.transpose(1, 2)).masked_fill(hidden, float("-inf"))
        out[own] = (scores.softmax(-1) @ values).transpose(0, 1)
    return out


@pytest.mark.parametrize(
    "window", [None, 1, 100, 700, *(pytest.param(window, marks=pytest.mark.wide) for window in (5, 3000))]
)
def test_results_and_gradients_are_those_of_the_reference(window: int | None) -> None:
    plan = ForestAttention(FOREST, device=CPU, dtype=torch.float32)
    computed = partial(plan.attend, 0, form=ScoreForm(SCALING, window)), partial(reference, FOREST, window=window)
    results = []
    for attend in computed:
        inputs = [x.requires_grad_() for x in tensors(3140)]
        out = attend(*inputs).squeeze(0)
        (out * torch.linspace(-1, 1, len(out))[:, None, None]).sum().backward()
        results.append([out.detach().float(), *(x.grad for x in inputs)])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("window", "seen"), [(64, 8192 * 64), (None, 4096 * 6144)])
def test_few_scores_are_of_hidden_keys(window: int | None, seen: int) -> None:
    """Those of the second half of a sequence, or of all of it in a window."""
    nodes = [Node(0, 4096), Node(4096, 4096, ((0, 4096),))] if window is None else [Node(0, 8192)]
    computed = []

    class Counted(ForestAttention):
        @staticmethod
        def dense(query: Tensor, key: Tensor, value: Tensor, **settings: Any) -> Tensor:
            if settings.get("mask") is not None:
                computed.append(settings["mask"].numel() * query.shape[1] // 4)  # queries of four heads may be one's
            return dense(query, key, value, **settings)

    Counted(nodes, device=CPU, dtype=torch.float32).attend(0, *tensors(8192, (8, 8, 8)), ScoreForm(SCALING, window))
    assert seen <= sum(computed) <= seen + 8192 * 512
