"""Sampled replies that are kept for later: to be scored, selected and learned from."""

from attrs import frozen

from rollgrad.domain.episodes.generation import StopReason
from rollgrad.domain.episodes.prompts import Prompt
from rollgrad.domain.episodes.rewards import RolloutFailure

SAMPLES_OF_A_ROW = 2**20
"""Distance of the seeds' numbers of two rows: more than the samples that anybody draws of one prompt."""


def reply_number(row: int, sample: int) -> int:
    """Returns the number of a reply, from which its seed is computed. It depends on nothing else, so that a reply is
    the same in whatever order replies are sampled, and however many of each prompt.

    >>> reply_number(2, 5) - reply_number(2, 0)
    5
    """
    return row * SAMPLES_OF_A_ROW + sample


@frozen(kw_only=True)
class Reply:
    """One sampled reply."""

    row: int
    """Number of its prompt in the dataset, from 0."""
    sample: int
    """Number among the replies to one prompt, from 0."""
    prompt: Prompt
    completion: str
    """Text of `token_ids` without special tokens."""
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Log-probs of `token_ids` under the sampling distribution."""
    stop_reason: StopReason
    seed: int
    """Seed of the sampling."""


@frozen(kw_only=True)
class UnsampledReply:
    """A reply that could not be sampled: its prompt, its seed, and why. The row and the sample are the group and the
    sample of `failure`."""

    prompt: Prompt
    seed: int
    failure: RolloutFailure
