"""Learning a reward model from pairs: what `examples.py` does, and the mean and spread of the scores in its files."""

from collections.abc import Mapping, Sequence
from typing import Any

import structlog

from rollgrad.application.learning.examples import ExampleLearner
from rollgrad.domain.episodes.examples import Preference
from rollgrad.domain.ports.checkpoint_store import CheckpointStore
from rollgrad.domain.ports.models import TrainedReward

log = structlog.get_logger(__name__)


class RewardLearner(ExampleLearner[Preference]):
    """Trains a reward model on pairs. What it saves has the mean and the standard deviation of held-out scores, if they
    were measured after the last step; takes the same arguments as `ExampleLearner`."""

    def __init__(self, model: TrainedReward, **arguments: Any) -> None:
        super().__init__(model, **arguments)
        self._reward = model
        self._moments: tuple[float, float] | None = None

    def learn(self, examples: Sequence[Preference]) -> dict[str, float]:
        """Takes one optimizer step, as `ExampleLearner.learn` does; the scores are others then."""
        metrics = super().learn(examples)
        self._moments = None
        return metrics

    def note(self, mean: float, std: float) -> None:
        """Takes down the mean and the standard deviation of the present model's scores; replies that all have one score
        have none."""
        self._moments = (mean, std) if std > 0 else None

    def save(self, checkpoints: CheckpointStore, name: str) -> None:
        """Writes the model under `name`."""
        if self._moments is None:
            log.warning(
                "the saved reward model has no mean and std: no held-out scores were measured after the last step",
                model=name,
            )
        self._reward.set_moments(self._moments)
        super().save(checkpoints, name)

    def state_dict(self) -> dict[str, Any]:
        """Returns the state of `ExampleLearner`, and what was measured."""
        return {**super().state_dict(), "moments": self._moments}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from `state`."""
        super().load_state_dict(state)
        self._moments = None if state["moments"] is None else tuple(state["moments"])
