"""Log-probs of spans under a teacher with other tokens stand at the right tokens of the student's."""

import math

import pytest
import torch

from rollgrad.application.learning.spans import Counterparts, compared, span_logprobs
from rollgrad.domain.episodes.examples import Demonstration, WeightedTokens
from rollgrad.domain.episodes.spans import Text

OWN: list[Text] = [None, b"He", b"llo", b" you", b"!"]
THEIRS: list[Text] = [None, b"Hello", b" y", b"ou", b"!", b"?"]
NAN, INF = math.nan, math.inf


def example(*branches: tuple[list[int], list[int]]) -> Demonstration:
    """An example of branches, each of tokens and of whether they are trained."""
    made = [
        WeightedTokens(token_ids_T=torch.tensor(tokens), weights_T=torch.tensor(trained).float(), prompt_length=1)
        for tokens, trained in branches
    ]
    return Demonstration(branches=tuple(made), row=0)


HELLO = example(([0, 0, 1, 2, 3, 4, 0], [0, 0, 1, 1, 1, 1, 1]))


@pytest.mark.parametrize(
    ("own", "other", "expected"),
    [
        (HELLO, example(([0, 1, 2, 3, 4, 0], [0, 1, 1, 1, 1, 1])), [NAN, -1, -5, -4, -5]),
        (HELLO, example(([0, 1, 2, 3, 5, 0], [0, 1, 1, 1, 1, 1])), [NAN, -1, -5, NAN, INF]),  # another last sign
        (HELLO, None, [NAN, NAN, NAN, NAN, INF]),
        # The template of one divides the conversation into branches, and of the other not.
        (
            example(([0, 0, 1, 2, 0, 0, 4, 0], [0, 0, 1, 1, 1, 0, 1, 1])),
            example(([0, 1, 0], [0, 1, 1]), ([0, 4, 0], [0, 1, 1])),
            [NAN, -1, -2, -3, -4],
        ),
        # Two replies to one: which is which, nobody knows.
        (HELLO, example(([0, 1, 0], [0, 1, 1]), ([0, 4, 0], [0, 1, 1])), [NAN, NAN, NAN, NAN, INF]),
        # Nothing predicts the first token of a text, nor the span that has it.
        (example(([1, 2, 3, 4], [0, 1, 1, 1])), example(([0, 1, 2, 3, 4], [0, 1, 1, 1, 1])), [INF, -5, -4]),
        (example(([0, 1, 2, 3, 4], [0, 1, 1, 1, 1])), example(([1, 2, 3, 4], [0, 1, 1, 1])), [NAN, INF, -3, -3]),
    ],
)
def test_the_log_prob_of_each_span_is_at_its_last_token(
    own: Demonstration, other: Demonstration | None, expected: list[float]
) -> None:
    count = 0 if other is None else sum(branch.trained_length for branch in other.branches)
    counterparts = Counterparts(by_row=lambda row: other, own=OWN, theirs=THEIRS)
    found = span_logprobs(own, other, -torch.arange(1.0, count + 1), counterparts)
    assert torch.equal(found.nan_to_num(nan=9.0), torch.tensor(expected).nan_to_num(nan=9.0))


def test_what_is_compared_is_counted() -> None:
    columns = [torch.tensor([NAN, -1.0, NAN, NAN, INF]), torch.tensor([INF, -5.0, 0.0])]
    assert compared(columns) == (3, 4, 8)
    assert compared([]) == (0, 0, 0)
