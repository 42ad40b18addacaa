"""Rollouts that repeat themselves are those with a long row of tokens that were certain."""

import math

import torch
from hypothesis import example, given
from hypothesis import strategies as st

from rollgrad.domain.algorithms.repetition import CERTAIN, repeats

TOKENS = st.lists(
    st.tuples(st.booleans(), st.sampled_from([0.0, -1e-4, math.log(CERTAIN), -0.5])), min_size=1, max_size=9
)


@example([[(True, 0.0)], [(True, 0.0)]], 2, 0.0)
@given(st.lists(TOKENS, min_size=1, max_size=4), st.integers(1, 5), st.sampled_from([math.nan, 0.0, -math.inf]))
def test_a_row_is_found_within_its_sequence(
    sequences: list[list[tuple[bool, float]]], window: int, poison: float
) -> None:
    """It does not matter what stands where nothing was sampled."""
    wanted = []
    for tokens in sequences:
        row = longest = 0
        for action, logprob in tokens:
            row = row + 1 if action and logprob > math.log(CERTAIN) else 0
            longest = max(longest, row)
        wanted.append(longest >= window)
    mask_N = torch.tensor([action for tokens in sequences for action, _ in tokens])
    logprobs = [logprob if action else poison for tokens in sequences for action, logprob in tokens]
    logprobs_N = torch.tensor(logprobs, dtype=torch.float64)  # which has the bound itself
    found = repeats(logprobs_N, mask_N, torch.tensor([len(tokens) for tokens in sequences]), window)
    assert found.tolist() == wanted
