"""A reference that moves toward the policy while this is trained (TR-DPO): the moving average of the policy's weights.

Its log-probs are those of the step alone, and are never kept.
"""

from collections.abc import Sequence

from attrs import evolve

from rollgrad.application.learning.examples import Pack
from rollgrad.application.learning.reference import trained_logprobs
from rollgrad.domain.batches.examples import ExampleBatch, pack_preferences
from rollgrad.domain.episodes.examples import Preference
from rollgrad.domain.ports.models import AveragedPolicy


def against_average(policy: AveragedPolicy, *, max_tokens: int, shares: int = 1) -> Pack[Preference]:
    """Returns what packs the pairs of a step with their log-probs under the average of the policy's weights.

    Args:
        policy: the model as it is before the step.
        max_tokens: token budget of one forward pass.
        shares: number of equal shares of it, as in `split`.
    """

    def packed(pairs: Sequence[Preference]) -> ExampleBatch:
        with policy.averaged():
            found = trained_logprobs(policy, [pair.replies for pair in pairs], max_tokens, shares)
        return pack_preferences(
            [evolve(pair, ref_logprobs_A=logprobs_A) for pair, logprobs_A in zip(pairs, found, strict=True)]
        )

    return packed
