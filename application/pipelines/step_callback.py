"""The caller's function of each finished step: metrics that it adds, what it may ask of the run, and how it ends one.

Invariant: whatever the function does, the run gets numbers under names that the step has not taken, or one
`ForeignError` sentence. Does not own: where the function comes from, and what is saved when the run ends.
"""

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from numbers import Real
from typing import Any

from rollgrad.application.foreign import foreign_code, shown
from rollgrad.domain.errors import ConfigurationError, ForeignError

NOTHING: Mapping[str, float] = {}
"""Metrics of a function that adds none."""


class StopTraining(Exception):  # noqa: N818 (no error: like StopIteration it says that nothing more is to be done)
    """Raised by `on_step`: the run ends after this step, and is evaluated and saved as after its last one. Its words
    say why."""


Ask = Callable[..., Awaitable[list[str]]]
"""Samples replies (`StepQuestions`)."""


class RunAccess:
    """Answers an `async def on_step(step, metrics, groups, run)` between two steps, in one process and in clusters
    alike: the engines have the weights of the step, and no update is under way."""

    def __init__(self, evaluate: Callable[[], Awaitable[Mapping[str, float]]], ask: Ask | None) -> None:
        self._evaluate = evaluate
        self._ask = ask

    async def evaluate(self) -> Mapping[str, float]:
        """Returns the metrics of the held-out data after this step; nothing where there are none. It is an evaluation
        as `--eval.steps` has them: logged, compared with the best, and made once a step."""
        return await self._evaluate()

    async def generate(self, prompts: Sequence[Any], **sampling: Any) -> list[str]:
        """Samples a reply to each prompt with the weights of this step, and returns their texts.

        Args:
            prompts: each a text, which is a user's message, a list of messages, or a `Prompt` such as `group.prompt`.
            sampling: fields of `SamplingParams` that differ from those of the run, such as `temperature=0`.

        Raises:
            ConfigurationError: nothing samples in this run, or `prompts` is no list, or a field is unknown.
            EngineError: sampling failed.
        """
        if self._ask is None:
            raise ConfigurationError(
                "on_step asks for replies (run.generate), but no engine samples in this run: replies are sampled by "
                "rollgrad train rl."
            )
        return await self._ask(prompts, **sampling)


class StepCallback:
    """Calls `function`, if there is one, with the number of each finished step, its metrics and its samples; one that
    is a coroutine function may take the run (`RunAccess`) fourth, and is awaited.

    Raises:
        ConfigurationError: `function` cannot be called so.
    """

    def __init__(self, function: Callable[..., Any] | None) -> None:
        self._function = function
        self.waits = inspect.iscoroutinefunction(function)
        """Whether the function is awaited."""
        self._takes_run = False
        self.enough: str | None = None
        """Why the function has ended the run; None before."""
        if function is None:
            return
        try:
            signature = inspect.signature(function)
        except ValueError:  # a builtin has no signature
            return
        try:
            signature.bind(1, NOTHING, ())
        except TypeError as error:
            self._takes_run = _takes(signature, 4)
            if not self._takes_run:
                raise ConfigurationError(
                    f"on_step cannot be called with the three arguments step, metrics and groups ({error}): write "
                    "def on_step(step, metrics, groups), or async def on_step(step, metrics, groups, run)."
                ) from error
        if self._takes_run and not self.waits:
            raise ConfigurationError(
                "on_step takes the run, whose methods are awaited, but is no coroutine function: write "
                "async def on_step(step, metrics, groups, run)."
            )

    async def __call__(
        self, step: int, metrics: Mapping[str, float], samples: Sequence[Any], run: RunAccess
    ) -> Mapping[str, float]:
        """Returns the metrics that the function adds to those of the step.

        Raises:
            ForeignError: the function failed, or returned something other than numbers by new names.
        """
        if self._function is None:
            return NOTHING
        added: Any = None
        with foreign_code(lambda words: ForeignError(f"on_step failed after step {step}: {words}"), located=True):
            try:
                added = self._function(step, dict(metrics), samples, *([run] if self._takes_run else []))
                if self.waits:
                    added = await added
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


def _takes(signature: inspect.Signature, arguments: int) -> bool:
    try:
        signature.bind(*range(arguments))
    except TypeError:
        return False
    return True


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
