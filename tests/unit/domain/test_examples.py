"""Examples refuse what nothing can be learned from."""

from typing import Any

import pytest
import torch

from rollgrad.domain.episodes.examples import Preference, StepLabels, WeightedTokens
from rollgrad.domain.errors import DataError


def weighted(tokens: list[int], weights: list[float], prompt_length: int = 1) -> WeightedTokens:
    return WeightedTokens(
        token_ids_T=torch.tensor(tokens), weights_T=torch.tensor(weights), prompt_length=prompt_length
    )


def test_trained_length_counts_tokens_with_weight() -> None:
    assert weighted([1, 2, 3, 4], [0, 1, 0, 0.5]).trained_length == 2


@pytest.mark.parametrize(
    ("tokens", "weights", "prompt_length", "said"),
    [
        ([1, 2], [0.0], 1, "2 tokens and 1 weights"),
        ([1, 2], [0.0, 1.0], 0, "prompt of 0 tokens"),
        ([1, 2], [0.0, 1.0], 3, "prompt of 3 tokens"),
        ([1, 2], [0.0, float("nan")], 1, "finite"),
        ([1, 2], [0.0, -1.0], 1, "at least 0"),
        ([1, 2], [1.0, 1.0], 1, "token of the prompt"),
        ([1, 2], [0.0, 0.0], 1, "nothing to learn"),
    ],
)
def test_sequences_that_cannot_be_trained_on(
    tokens: list[int], weights: list[float], prompt_length: int, said: str
) -> None:
    with pytest.raises(DataError, match=said):
        weighted(tokens, weights, prompt_length)


def test_a_pair_of_equal_replies_is_refused() -> None:
    with pytest.raises(DataError, match="equal token for token"):
        Preference(chosen=weighted([1, 2], [0, 1]), rejected=weighted([1, 2], [0, 1]), row=0)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"labels": (1.0,)}, "2 steps and 1 labels"),
        ({"ends": (), "labels": ()}, "at least one step"),
        ({"ends": (2, 1)}, "do not ascend"),
        ({"ends": (1, 3)}, "do not ascend"),
        ({"labels": (0.5, 1.5)}, "from 0 to 1"),
    ],
)
def test_step_labels_that_contradict_themselves(changes: dict[str, Any], said: str) -> None:
    settings: dict[str, Any] = {"token_ids_T": torch.tensor([1, 2, 3]), "ends": (1, 2), "labels": (1.0, 0.0), "row": 0}
    with pytest.raises(DataError, match=said):
        StepLabels(**settings | changes)
