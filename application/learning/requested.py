"""Training that a client drives: it asks for each gradient, and for each optimizer step."""

from collections.abc import Sequence

from attrs import define
from torch import Tensor

from rollgrad.application.learning.microbatch import split
from rollgrad.domain.batches.datums import Datum, DatumBatch, of_datums, pack_datums
from rollgrad.domain.batches.passes import Passes
from rollgrad.domain.errors import ConfigurationError
from rollgrad.domain.ports.models import AdamRates, PolicyObjective, StepwisePolicy


@define(eq=False)
class RequestedTraining:
    """A policy and what it has accumulated. `pass_tokens`: tokens of a forward pass."""

    policy: StepwisePolicy
    pass_tokens: int
    accumulated: int = 0
    """Datums whose gradients the next step will take."""
    spoilt: bool = False
    """Whether a gradient of the next step is missing, because what should have added it failed."""

    def forward_backward(
        self, datums: Sequence[Datum], objective: PolicyObjective[DatumBatch]
    ) -> tuple[list[Tensor], float]:
        """Adds the datums' gradient to that of the next step; returns logprobs_T of each, and the summed loss.

        If it fails, all that was accumulated is dropped, because some of its passes have added their gradients. What is
        added until the next step is dropped, too, and that step is refused: a client may have sent it before it knew of
        the failure.

        Raises:
            NonFiniteUpdateError: the loss is not finite.
        """
        passes = self._passes(datums)
        try:
            logprobs_N, metrics = self.policy.accumulate(passes, objective)
        except BaseException:
            self.clear()
            self.spoil()
            raise
        self.accumulated += len(datums)
        return of_datums(logprobs_N, passes.whole), float(metrics["loss"])

    def forward(self, datums: Sequence[Datum], objective: PolicyObjective[DatumBatch]) -> tuple[list[Tensor], float]:
        """Returns the same as `forward_backward`, without any gradient."""
        passes = self._passes(datums)
        logprobs_N, loss = self.policy.evaluate(passes, objective)
        return of_datums(logprobs_N, passes.whole), loss

    def step(self, rates: AdamRates) -> dict[str, float]:
        """Takes an optimizer step; returns its metrics. Nothing is accumulated afterwards, also if it fails.

        Raises:
            ConfigurationError: there is no gradient, or a part of it is missing; nothing has changed.
            NonFiniteUpdateError: the gradient is not finite; nothing has changed.
            ExplodedWeightsError: nothing can be computed with the weights that the step has made.
        """
        if self.spoilt:
            self.clear()
            raise ConfigurationError(
                "optim_step is refused, because a forward_backward before it failed: it would step with a part of the "
                "gradient. Call forward_backward again for all of it."
            )
        if not self.accumulated:
            raise ConfigurationError(
                "optim_step has no gradient to step with: call forward_backward, with success, before it."
            )
        try:
            return {name: float(value) for name, value in self.policy.step(rates).items()}
        finally:
            self.clear()

    def spoil(self) -> None:
        """Refuses the next step."""
        self.spoilt = True

    def clear(self) -> None:
        """Drops all that was accumulated."""
        self.policy.clear()
        self.accumulated, self.spoilt = 0, False

    def _passes(self, datums: Sequence[Datum]) -> Passes[DatumBatch]:
        return split(pack_datums(datums), self.pass_tokens, padded=self.policy.padded())
