"""Spans that two tokenisations have in common, and the divergence of their probabilities against float64."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rollgrad.domain.algorithms.losses.distillation import SpanObjective, span_divergence
from rollgrad.domain.batches.examples import DemonstrationBatch, pack_demonstrations
from rollgrad.domain.episodes.examples import Demonstration, WeightedTokens
from rollgrad.domain.episodes.spans import Text, aligned_ends, trained_runs
from rollgrad.domain.ports.models import TokenScores

NAN, INF = math.nan, math.inf


def cut(text: bytes, places: set[int]) -> list[bytes]:
    """The text in pieces that end at the places, and at its end."""
    ends = sorted({place for place in places if 0 < place < len(text)} | {len(text)})
    return [text[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]


PLACES = st.sets(st.integers(1, 30))


@given(text=st.binary(min_size=1, max_size=30).map(lambda text: b"x" + text), one=PLACES, other=PLACES)
@settings(max_examples=200, deadline=None)
def test_spans_are_the_shortest_that_write_the_same(text: bytes, one: set[int], other: set[int]) -> None:
    first, second = cut(text, one), cut(text, other)
    ends = aligned_ends(first, second)
    written = [(b"".join(first[:a]), b"".join(second[:b])) for a, b in ends]
    assert all(mine == theirs for mine, theirs in written)
    common = {end for end in (one & other) if end < len(text)} | {len(text)}
    assert [len(mine) for mine, _ in written] == sorted(common)


@pytest.mark.parametrize(
    ("one", "other", "ends"),
    [
        ([b"Hel", b"lo", None], [b"Hello", None], [(2, 1), (3, 2)]),  # special tokens stand for each other
        ([b"Hello", None, b"\n"], [b"Hello", None], [(1, 1), (2, 2)]),  # one goes on after the end
        ([b" Hello", None], [b"Hello", None], [(1, 1), (2, 2)]),  # a space that one alone begins with
        ([b" ", b"Hello", None], [b"Hello", None], [(2, 1), (3, 2)]),
        ([b" a", b"b"], [b" ", b"ab"], [(2, 2)]),  # both begin with one: it is text
        ([b"ab", b"c", None], [b"ab", b"d", None], [(1, 1)]),  # nothing from where they differ
        ([b"ab ", None], [b"ab", None], []),
        ([b"\xc3", b"\xa9", b"a"], [b"\xc3\xa9", b"a"], [(2, 1), (3, 2)]),  # bytes of one character
        ([None, b"a"], [b"a"], []),
        ([b"", b"a", b""], [b"a"], [(3, 1)]),  # ids that are no tokens write nothing
        ([], [b"a"], []),
    ],
)
def test_where_spans_end(one: list[Text], other: list[Text], ends: list[tuple[int, int]]) -> None:
    assert aligned_ends(one, other) == ends


def example(
    *branches: list[float], spans: list[float] | None = None, row: int = 0, weight: float = 1.0
) -> Demonstration:
    made = tuple(
        WeightedTokens(token_ids_T=torch.arange(len(own)), weights_T=torch.tensor(own), prompt_length=1)
        for own in branches
    )
    return Demonstration(
        branches=made, row=row, weight=weight, span_logprobs_A=None if spans is None else torch.tensor(spans)
    )


def test_runs_are_of_trained_tokens_and_of_a_first_token_that_nothing_predicts() -> None:
    runs = trained_runs(example([0.0, 1.0, 0.5, 0.0, 0.0, 2.0], [0.0, 0.0, 1.0]))
    assert [(tokens.tolist(), before) for tokens, before in runs] == [([0, 1, 2], 1), ([5], 0), ([2], 0)]


def plain(teacher: float, student: float, beta: float, temperature: float) -> float:
    """The divergence of the two outcomes in float64, from its definition, of a span's log-probs."""
    p, q = math.exp(teacher / temperature), math.exp(student / temperature)

    def kl(a: float, b: float) -> float:
        return a * math.log(a / b) + (1 - a) * math.log((1 - a) / (1 - b))

    if beta in (0.0, 1.0):
        return kl(p, q) if beta == 0 else kl(q, p)
    m = beta * p + (1 - beta) * q
    return beta * kl(p, m) + (1 - beta) * kl(q, m)


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("temperature", [1.0, 100.0])
def test_the_divergence_is_that_of_a_span_and_all_else(beta: float, temperature: float) -> None:
    logprobs_N = torch.tensor([NAN, -0.5, -1.0, -0.2, -0.7, -3.0, -0.1, NAN, -0.4])
    teacher_N = torch.tensor([0.0, NAN, -0.9, -1.2, NAN, INF, -0.3, 0.0, -2.0])
    mask_N = torch.tensor([False, True, True, True, True, True, True, False, True])
    leaf = logprobs_N.clone().requires_grad_()
    found_N = span_divergence(leaf, teacher_N, mask_N, beta=beta, temperature=temperature)
    spans = {2: ([1, 2], -0.9), 3: ([3], -1.2), 6: ([6], -0.3), 8: ([8], -2.0)}
    expected, slopes = torch.zeros(9), torch.zeros(9)
    for end, (tokens, teacher) in spans.items():
        own = float(logprobs_N[tokens].double().sum())
        expected[end] = plain(teacher, own, beta, temperature)
        step = 1e-5
        slope = (plain(teacher, own + step, beta, temperature) - plain(teacher, own - step, beta, temperature)) / (
            2 * step
        )
        slopes[tokens] = slope
    assert torch.allclose(found_N, expected, rtol=2e-4, atol=1e-8)
    found_N.sum().backward()
    assert leaf.grad is not None
    assert torch.allclose(leaf.grad, slopes, rtol=2e-3, atol=1e-7), "masked tokens, and spans not compared, have none"


def test_a_certain_span_has_a_finite_gradient() -> None:
    leaf = torch.tensor([0.0, -200.0]).requires_grad_()
    found = span_divergence(
        leaf, torch.tensor([-200.0, 0.0]), torch.ones(2, dtype=torch.bool), beta=0.0, temperature=1.0
    )
    found.sum().backward()
    assert leaf.grad is not None
    assert bool(found.isfinite().all() and leaf.grad.isfinite().all())


def scores(logprobs_N: Tensor) -> TokenScores:
    return TokenScores(logprobs_N=logprobs_N, entropy_N=torch.ones_like(logprobs_N))


def test_the_objective_is_the_same_however_examples_are_divided() -> None:
    made = [
        example([0.0, 0.0, 1.0, 1.0, 1.0], spans=[NAN, -0.9, INF], weight=2.0),
        example([0.0, 1.0, 1.0], [0.0, 0.0, 1.0], spans=[-0.4, -2.0, -0.1]),
    ]
    batch = pack_demonstrations(made)
    logprobs_N = -torch.rand(batch.token_count, generator=torch.Generator().manual_seed(0)) - 0.1
    objective = SpanObjective(weight=0.3, beta=0.0, temperature=4.0)
    whole = objective(scores(logprobs_N), batch)
    weights = {"a": 2 / 9, "b": 1 / 9}  # three trained tokens of weight 2, and three of weight 1
    expected = weights["a"] * plain(-0.9, float(logprobs_N[2:4].double().sum()), 0.0, 4.0)
    for place, teacher in ((6, -0.4), (7, -2.0), (10, -0.1)):
        expected += weights["b"] * plain(teacher, float(logprobs_N[place]), 0.0, 4.0)
    assert float(whole.metrics["divergence"]) == pytest.approx(expected, rel=1e-4)
    nll = float(whole.metrics["nll"])
    assert float(whole.loss) == pytest.approx(0.7 * nll + 0.3 * 4.0 * expected, rel=1e-4)
    parts: list[DemonstrationBatch] = [batch.select([2, 0]), batch.select([1])]
    places = [batch.token_index([2, 0]), batch.token_index([1])]
    losses = [float(objective(scores(logprobs_N[at]), part).loss) for part, at in zip(parts, places, strict=True)]
    assert sum(losses) == pytest.approx(float(whole.loss), rel=1e-5)


def test_a_batch_without_spans_is_refused() -> None:
    batch = pack_demonstrations([example([0.0, 1.0])])
    with pytest.raises(ValueError, match="no span_logprobs_N"):
        SpanObjective()(scores(torch.zeros(2)), batch)
