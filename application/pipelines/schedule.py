"""The schedule of a run's steps, and the outcome of a run."""

from collections.abc import Mapping
from typing import Any

from attrs import field, frozen

from rollgrad.domain.control.best_model import Best, BestModel

FIRST_STATE_MINUTES = 5.0
"""Age of a run at which it has its first training state at the latest: until then a kill loses all of it, and nobody
knows whether states can be written where they are to be."""


@frozen(kw_only=True)
class Schedule:
    """The steps of a run, and when it evaluates and saves. An interval of -1 steps means only at the ends of the
    run."""

    steps: int
    eval_steps: int = -1
    """Steps between evaluations."""
    save_steps: int = -1
    """Steps between checkpoints of the model."""
    state_steps: int = -1
    """Steps between training states, from which training continues; -1 saves none by steps. If this or `state_minutes`
    is set, there is one at the end, too."""
    state_minutes: float | None = None
    """Age of the last training state at which the next is saved; None saves none by time."""
    state_in_background: bool = False
    """Whether the run goes on while a training state is written; at the end it waits."""
    best_metric: str | None = None
    """Metric of evaluations that says which model is kept as the best one; None keeps none."""
    best_value: Best = Best.AUTO
    """Whether the highest or the lowest value of `best_metric` is the best."""
    measured: Mapping[str, Any] = field(factory=dict)
    """Settings on which the values of evaluations depend."""
    patience: int | None = None
    """Evaluations in a row without a better value after which the run ends; None goes on."""

    @property
    def saves_state(self) -> bool:
        """Whether the run saves training states."""
        return self.state_steps > 0 or self.state_minutes is not None

    def minutes_to_state(self, *, first: bool) -> float | None:
        """Returns the age of the last training state, or of the run before its `first`, at which one is saved; None
        where none is saved by time."""
        return min(self.state_minutes, FIRST_STATE_MINUTES) if first and self.state_minutes else self.state_minutes


@frozen(kw_only=True)
class RunOutcome:
    """Outcome of a run."""

    steps: int
    """Finished steps."""
    before: Mapping[str, float] = field(factory=dict)
    """Held-out metrics before the first step."""
    after: Mapping[str, float] = field(factory=dict)
    """Held-out metrics after the last step."""
    interrupted: bool = False
    enough: str | None = None
    """Why the run ended before its schedule did, if evaluations were the reason."""
    best: BestModel | None = None
    """Evaluation whose model was kept as the best one; None if there is none."""
