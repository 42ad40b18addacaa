"""A reference that moves toward the policy while this is trained: the moving average of the policy's weights.

Its log-probs are those of the step alone, and are never kept.
"""

from collections.abc import Sequence
from typing import Any

from attrs import evolve
from torch import Tensor

from rollgrad.application.learning.examples import Pack
from rollgrad.application.learning.reference import trained_logprobs
from rollgrad.domain.batches.examples import ExampleBatch, pack_preferences
from rollgrad.domain.batches.packed import PackedBatch
from rollgrad.domain.batches.passes import Passes
from rollgrad.domain.episodes.examples import Preference
from rollgrad.domain.errors import ConfigurationError
from rollgrad.domain.ports.models import (
    AveragedPolicy,
    PolicyModel,
    PredictingModel,
    Predictions,
    ReferenceModel,
    TokenScores,
)


class AveragedReference(ReferenceModel, PredictingModel):
    """The policy with the averages in the place of its weights, with which nothing else may compute meanwhile.

    Raises:
        ConfigurationError: the policy, which the caller brought, keeps no averages.
    """

    def __init__(self, policy: PolicyModel) -> None:
        if not isinstance(policy, AveragedPolicy):
            raise ConfigurationError(
                f"algo.kl.ref_sync_steps is set, but the policy that was given, a {type(policy).__name__}, is no "
                "AveragedPolicy (rollgrad.domain.ports.models): leave --algo.kl.ref_sync_steps out, or give it the "
                "methods `averaged`, `predict` and `predictions`."
            )
        self._policy = policy

    def padded(self) -> bool:
        """Implements `ReferenceModel.padded`."""
        return self._policy.padded()

    def score(self, batch: PackedBatch) -> TokenScores:
        """Implements `ReferenceModel.score`."""
        with self._policy.averaged():
            return self._policy.score(batch)

    def predict(self, batch: PackedBatch, top_k: int) -> Predictions:
        """Implements `PredictingModel.predict`."""
        with self._policy.averaged():
            return self._policy.predict(batch, top_k)

    def predictions(self, passes: Passes[Any], top_k: int) -> Predictions:
        """Implements `PredictingModel.predictions`."""
        with self._policy.averaged():
            return self._policy.predictions(passes, top_k)

    def logprobs(self, passes: Passes[Any]) -> Tensor:
        """Implements `ReferenceModel.logprobs`: the weights change places once for all passes."""
        with self._policy.averaged():
            return self._policy.logprobs(passes)


def against_average(policy: AveragedPolicy, *, max_tokens: int, shares: int = 1) -> Pack[Preference]:
    """Returns what packs the pairs of a step with their log-probs under the average of the policy's weights (TR-DPO).

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
