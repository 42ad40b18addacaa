"""The caller's function of each finished step: metrics that it adds, and how it ends a run.

Invariant: whatever the function does, the run gets numbers under names that the step has not taken, or one
`ForeignError` sentence. Does not own: where the function comes from, and what is saved when the run ends.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any

from rollgrad.application.foreign import foreign_code, shown
from rollgrad.domain.errors import ConfigurationError, ForeignError

NOTHING: Mapping[str, float] = {}
"""Metrics of a function that adds none."""


class StopTraining(Exception):  # noqa: N818 (no error: like StopIteration it says that nothing more is to be done)
    """Raised by `on_step`: the run ends after this step, and is evaluated and saved as after its last one. Its words
    say why."""


class StepCallback:
    """Calls `function`, if there is one, with the number of each finished step, its metrics and its samples.

    Raises:
        ConfigurationError: `function` cannot be called so, or would have to be awaited.
    """

    def __init__(self, function: Callable[..., Any] | None) -> None:
        self._function = function
        self.enough: str | None = None
        """Why the function has ended the run; None before."""
        if function is None:
            return
        if inspect.iscoroutinefunction(function):
            raise ConfigurationError(
                "on_step is a coroutine function, and nothing would await it: give a plain function, without async."
            )
        try:
            inspect.signature(function).bind(1, NOTHING, ())
        except TypeError as error:
            raise ConfigurationError(
                f"on_step cannot be called with the three arguments step, metrics and groups ({error}): write "
                "def on_step(step, metrics, groups)."
            ) from error
        except ValueError:  # of a builtin, which has no signature
            return

    def __call__(self, step: int, metrics: Mapping[str, float], samples: Sequence[Any]) -> Mapping[str, float]:
        """Returns the metrics that the function adds to those of the step.

        Raises:
            ForeignError: the function failed, or returned something other than numbers by new names.
        """
        if self._function is None:
            return NOTHING
        added: Any = None
        with foreign_code(lambda words: ForeignError(f"on_step failed after step {step}: {words}"), located=True):
            try:
                added = self._function(step, dict(metrics), samples)
            except StopTraining as stop:
                self.enough = f"on_step: {stop}" if str(stop) else "on_step said so"
        if added is None:
            return NOTHING
        problem = _problem(added, metrics)
        if problem is not None:
            raise ForeignError(
                f"on_step returned {problem} after step {step}: return None, or numbers by names of your own, such as "
                "{'mine/score': 0.5}."
            )
        return {name: float(value) for name, value in added.items()}


def _problem(added: Any, metrics: Mapping[str, float]) -> str | None:
    """Returns what is wrong with the metrics that a function has returned."""
    if not isinstance(added, Mapping):
        return shown(added)
    for name, value in added.items():
        if not isinstance(name, str) or not isinstance(value, Real):
            return f"{shown(value)} by the name {shown(name)}"
        if name in metrics:
            return f"{name}, which is a metric of the step already,"
    return None
