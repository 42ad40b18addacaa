"""A reference that moves toward the policy while this is trained: the moving average of the policy's weights.

Its log-probs are those of the step alone, and are never kept.
"""

from collections.abc import Sequence
from typing import Any

from attrs import frozen
from torch import Tensor

from rollgrad.application.learning.reference import LiveReference, trained_logprobs
from rollgrad.domain.batches.packed import PackedBatch
from rollgrad.domain.batches.passes import Passes
from rollgrad.domain.episodes.examples import WeightedTokens
from rollgrad.domain.errors import ConfigurationError
from rollgrad.domain.ports.models import (
    AveragedPolicy,
    PolicyModel,
    PredictingModel,
    Predictions,
    ReferenceModel,
    TokenScores,
)


def averaged_policy(policy: object, section: str) -> AveragedPolicy:
    """Returns a policy that keeps averages, by which a reference moves as `section` of the settings says.

    Raises:
        ConfigurationError: the policy, which the caller brought, keeps none.
    """
    if isinstance(policy, AveragedPolicy):
        return policy
    raise ConfigurationError(
        f"{section}.ref_sync_steps is set, but the policy that was given, a {type(policy).__name__}, is no "
        f"AveragedPolicy (rollgrad.domain.ports.models): leave --{section}.ref_sync_steps out, or give it the methods "
        "`averaged`, `predict` and `predictions`."
    )


class AveragedReference(ReferenceModel, PredictingModel):
    """The policy with the averages in the place of its weights, with which nothing else may compute meanwhile.

    Raises:
        ConfigurationError: the policy, which the caller brought, keeps no averages.
    """

    def __init__(self, policy: PolicyModel) -> None:
        self._policy = averaged_policy(policy, "algo.kl")

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


@frozen(kw_only=True)
class MovingReference(LiveReference):
    """The average of the weights of the policy that `model` gives, by which the examples of each step are scored;
    `section` of the settings says how it moves.

    Raises:
        ConfigurationError: as `averaged_policy`.
    """

    section: str

    def logprobs(self, examples: Sequence[Sequence[WeightedTokens]]) -> list[Tensor]:
        """Implements `LiveReference.logprobs`: the weights change places once for all passes."""
        policy = averaged_policy(self.model(), self.section)
        with policy.averaged():
            return trained_logprobs(policy, examples, self.max_tokens, self.shares)
