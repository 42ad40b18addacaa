"""The schedule of a run's steps, and the outcome of a run."""

from collections.abc import Mapping
from typing import Any

from attrs import field, frozen

from rollgrad.domain.control.best_model import Best, BestModel


@frozen(kw_only=True)
class Schedule:
    """Schedule of `steps` steps; evaluation and model checkpoints every so many of them (-1: only at the ends). The
    state from which training continues is saved every `state_steps` steps (-1: not by steps), when the one before is
    `state_minutes` old (None: not by time), and at the end; never if neither is set. With `state_in_background` a run
    goes on while one is written, but at the end. `best_metric` of the evaluations says which model is kept as the best
    one, and `best_value` whether its highest or lowest value is the best; None keeps none. After `patience` evaluations
    in a row without a better value the run ends; None goes on. `measured`: the settings on which the values of
    evaluations depend."""

    steps: int
    eval_steps: int = -1
    save_steps: int = -1
    state_steps: int = -1
    state_minutes: float | None = None
    state_in_background: bool = False
    best_metric: str | None = None
    best_value: Best = Best.AUTO
    measured: Mapping[str, Any] = field(factory=dict)
    patience: int | None = None

    @property
    def saves_state(self) -> bool:
        """Whether the run saves training states."""
        return self.state_steps > 0 or self.state_minutes is not None


@frozen(kw_only=True)
class RunOutcome:
    """Outcome of a run: `steps` finished; held-out metrics `before` and `after`; whether it was interrupted; why it
    ended before its schedule did, if evaluations were the reason; and the evaluation whose model was kept as the `best`
    one, None if there is none."""

    steps: int
    before: Mapping[str, float] = field(factory=dict)
    after: Mapping[str, float] = field(factory=dict)
    interrupted: bool = False
    enough: str | None = None
    best: BestModel | None = None
