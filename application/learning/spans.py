"""Log-probs of spans under a teacher with other tokens, by which examples are learned: computed before training and
kept, as `scores` describes, a number a token."""

import math
from collections.abc import Callable, Sequence

import torch
from attrs import evolve, frozen
from torch import Tensor

from rollgrad.application.learning.reference import trained_logprobs
from rollgrad.application.learning.scores import ScoredExamples, kept_scores
from rollgrad.domain.episodes.examples import Demonstration
from rollgrad.domain.episodes.spans import Text, aligned_ends, trained_runs
from rollgrad.domain.ports.example_source import ExampleSource
from rollgrad.domain.ports.models import ReferenceModel
from rollgrad.domain.ports.score_store import ScoreStore

NOT_COMPARED = math.inf
"""Value at the last token of a span that the teacher says nothing of; NaN is that of every token within a span."""


@frozen(kw_only=True)
class Counterparts:
    """Examples as a teacher reads them.

    Attributes:
        by_row: returns the example that its template and tokens make of a row; None where they make none.
        own: text of each token of the student.
        theirs: text of each token of the teacher.
    """

    by_row: Callable[[int], Demonstration | None]
    own: Sequence[Text]
    theirs: Sequence[Text]


def with_spans(
    examples: ExampleSource[Demonstration],
    counterparts: Counterparts,
    make_teacher: Callable[[], ReferenceModel],
    store: ScoreStore,
    *,
    key: str,
    max_tokens: int,
    name: str = "the examples",
) -> ScoredExamples[Demonstration]:
    """Returns the examples with the log-probs of their spans under a teacher.

    Args:
        examples: all of them are scored, in their order.
        counterparts: are what the teacher reads.
        make_teacher: loads the teacher; not called if all log-probs are kept.
        store: where they are kept.
        key: key of the teacher, the examples and their counterparts.
        max_tokens: token budget of one forward pass.
        name: says in the log which examples they are.
    """

    def score(teacher: ReferenceModel, chunk: list[Demonstration]) -> list[Tensor]:
        return spans_of(chunk, counterparts, teacher, max_tokens)

    scores = kept_scores(examples, make_teacher, score, store, key=key, name=f"the teacher's spans of {name}")
    return ScoredExamples(examples, scores, lambda example, found: evolve(example, span_logprobs_A=found))


def spans_of(
    examples: Sequence[Demonstration], counterparts: Counterparts, teacher: ReferenceModel, max_tokens: int
) -> list[Tensor]:
    """Returns the `span_logprobs` of each of some examples under a teacher; arguments as in `with_spans`."""
    others = [counterparts.by_row(example.row) for example in examples]
    read = [other.branches for other in others if other is not None]
    found = iter(trained_logprobs(teacher, read, max_tokens) if read else [])
    return [
        span_logprobs(example, other, torch.empty(0) if other is None else next(found), counterparts)
        for example, other in zip(examples, others, strict=True)
    ]


def span_logprobs(
    example: Demonstration, other: Demonstration | None, logprobs_B: Tensor, counterparts: Counterparts
) -> Tensor:
    """Returns, at the last of the A trained tokens of each span of an example, the teacher's log-prob of the span:
    float32, with `NOT_COMPARED` and NaN as described there.

    Args:
        example: has the student's tokens.
        other: has the teacher's; None where there are none.
        logprobs_B: the teacher's log-probs of the trained tokens of `other`.
        counterparts: say what tokens write.
    """
    runs = _texts(example, counterparts.own)
    theirs = [] if other is None else _texts(other, counterparts.theirs)
    columns = []
    start = 0
    for place, (texts, before) in enumerate(runs):
        values = torch.full((len(texts),), math.nan)
        values[-1] = NOT_COMPARED
        if len(theirs) == len(runs):
            read, ahead = theirs[place]
            logprobs = torch.cat([torch.zeros(ahead), logprobs_B[start : start + len(read) - ahead].float()])
            start += len(read) - ahead
            last = 0
            for end, stop in aligned_ends(texts, read):
                # Nothing predicts the first token of a sequence, nor so the span that it is in.
                known = last > 0 or not (before or ahead)
                values[end - 1] = logprobs[last:stop].sum().clamp(max=0.0) if known else NOT_COMPARED
                last = stop
        columns.append(values[before:])
    return torch.cat(columns)


def _texts(example: Demonstration, texts: Sequence[Text]) -> list[tuple[list[Text], int]]:
    """Returns what the tokens of each trained run of an example write, and how many of them come before its trained
    ones; a special token that begins a sequence is none of them."""
    found = []
    for tokens, before in trained_runs(example):
        written = [texts[token] for token in tokens.tolist()]
        special = before and written[0] is None
        found.append((written[1:], 0) if special else (written, before))
    return found


def compared(scores: Sequence[Tensor]) -> tuple[int, int, int]:
    """Returns how many spans are compared, and of how many trained tokens; and the number of all trained tokens."""
    spans = tokens = total = 0
    for values_A in scores:
        ends = (~values_A.isnan()).nonzero()[:, 0]
        told = values_A[ends] <= 0
        spans += int(told.sum())
        tokens += int(ends.diff(prepend=torch.tensor([-1]))[told].sum())
        total += len(values_A)
    return spans, tokens, total
