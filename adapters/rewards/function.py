"""Rewards from a Python function that the user wrote, for rollgrad, OpenRLHF, TRL or verl.

Invariant: whatever the function does, the result is one finite reward for each reply, or one `RewardError` sentence.

A plain function runs in a thread of its own, so it never blocks the event loop. A thread cannot be killed: one that
exceeds its deadline remains as a daemon, and does not keep the process alive. Does not own: the function's arguments
(`signatures`) and parsing its answers (`answers`).
"""

import asyncio
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any

import structlog
from attrs import evolve

from rollgrad.adapters.rewards.answers import RewardParser, replies
from rollgrad.adapters.rewards.signatures import Call, Convention, Notes, Signature, conversational
from rollgrad.adapters.system.daemon_thread import in_daemon_thread
from rollgrad.adapters.system.python_file import load_python
from rollgrad.adapters.system.stand_ins import install
from rollgrad.application.foreign import foreign_code
from rollgrad.application.settings.function_path import FunctionPath
from rollgrad.domain.episodes.generation import StopReason
from rollgrad.domain.episodes.prompts import Prompt
from rollgrad.domain.episodes.rewards import Reward, RewardRequest
from rollgrad.domain.errors import ConfigurationError, NotApplicableError, RewardError
from rollgrad.domain.ports.reward_source import RewardSource

FUNCTION_NAMES = ("reward_func", "compute_score")
"""Names of reward functions in a file, in order of precedence: OpenRLHF's and TRL's examples, and verl's default."""

log = structlog.get_logger(__name__)


def load_reward_function(path: str) -> Callable[..., Any]:
    """Returns the reward function of a Python file, which may import OpenRLHF's helpers.

    Args:
        path: the file, or `FILE:NAME`; without a name `reward_func` or `compute_score`.

    Raises:
        ConfigurationError: there is no such file, it cannot be imported, or it defines no such function.
    """
    install()
    place = FunctionPath.parse(path)
    module = load_python(place.file, flag="--reward.function_path")
    wanted = FUNCTION_NAMES if place.name is None else (place.name,)
    found: Callable[..., Any] | None = next(
        (f for f in (getattr(module, n, None) for n in wanted) if callable(f)), None
    )
    if found is None:
        own = [
            name
            for name, value in vars(module).items()
            if (inspect.isfunction(value) and value.__module__ == module.__name__)
            or (callable(value) and type(value).__module__ == module.__name__)  # an object that is called
        ]
        raise ConfigurationError(
            f"--reward.function_path {path} defines no function {' or '.join(wanted)} (it defines "
            f"{', '.join(own) or 'none'}): name one of its functions with --reward.function_path {place.file}:NAME."
        )
    if inspect.isclass(found):
        raise ConfigurationError(
            f"--reward.function_path {path} names the class {found.__name__}, of which an instance judges: write "
            f"judge = {found.__name__}() into the file, and name it with --reward.function_path {place.file}:judge."
        )
    return found


class FunctionReward(RewardSource):
    """Scores replies with `func`; the names of its parameters decide what it is passed (`signatures`).

    `func` may be async. It returns the rewards (list, tensor, or a number for one reply), or a mapping with `rewards`
    and, optionally:

    - `scores`, for filtering and evaluation;
    - `answers`, what each reply answered, by which evaluations vote;
    - `feedback`, a text on each reply that a teacher may be told, or None;
    - `extra_logs`, from name to a number, or to one number a reply.

    `rewards` may itself be a mapping of named rewards (name -> one number a reply); a reply's reward is then their sum,
    weighted by `weights` (default: 1 each). None instead of a number means that the reward does not apply to the reply.

    A function of verl's convention returns a number, or a mapping with `score`. Of such a mapping `pred` is the answer
    and `feedback` a text on the reply; its other numbers are logged.

    Args:
        func: the function.
        timeout: seconds that a call may take.
        name: name of the function, for errors.
        weights: weights of named rewards.

    Raises:
        ConfigurationError: nothing can be passed to `func`.
    """

    def __init__(
        self,
        func: Callable[..., Any],
        *,
        timeout: float,
        name: str = FUNCTION_NAMES[0],
        weights: Mapping[str, float] | None = None,
    ) -> None:
        self._func = func
        self._signature = Signature(func, name)
        self._parser = RewardParser(name, weights)
        self._timeout = timeout
        self._name = name
        self._is_async = inspect.iscoroutinefunction(func) or inspect.iscoroutinefunction(type(func).__call__)
        self._dropped: set[str] = set()

    @classmethod
    def load(
        cls, path: str, *, timeout: float, weights: Mapping[str, float] | None = None, name: str | None = None
    ) -> "FunctionReward":
        """Returns the reward of a file's function, which `load_reward_function` loads; `name` is its own by default."""
        func = load_reward_function(path)
        name = getattr(func, "__name__", path) if name is None else name
        return cls(func, timeout=timeout, name=name, weights=weights)

    def check(self, prompt: Prompt) -> None:
        """Checks that the function can be called for replies to a prompt, without calling it.

        Raises:
            ConfigurationError: it has a parameter that is neither known nor a column of the row.
        """
        self._signature.calls([RewardRequest(prompt=prompt, response="", stop_reason=StopReason.STOP)], Notes())

    async def score(self, requests: Sequence[RewardRequest]) -> list[Reward]:
        """Returns one reward for each request, in order. The function is called once, or once a request by verl's
        convention.

        Raises:
            NotApplicableError: the function returned None for a request.
            RewardError: the function raised, took too long, or returned something other than one finite number each.
            ConfigurationError: it has a parameter that is neither known nor a column of the row.
        """
        if not requests:
            return []
        notes = Notes()
        calls = self._signature.calls(requests, notes)
        try:
            async with asyncio.timeout(self._timeout):
                results = await self._run(
                    calls, lambda words: RewardError(f"{self._name} raised {words}{self._hint(requests)}")
                )
        except TimeoutError as error:
            raise RewardError(
                f"{self._name} gave no answer for {replies(len(requests))} within {self._timeout:g} s: "
                "make it faster, or raise --reward.timeout."
            ) from error
        with foreign_code(lambda words: RewardError(f"{self._name} returned what cannot be read: {words}")):
            if self._signature.convention is Convention.VERL:
                return [self._reward_of(result) for result in results]
            return self._with_notes(self._parser.parse(self._applicable(results[0]), len(requests)), notes)

    async def _run(self, calls: Sequence[Call], refusal: Callable[[str], RewardError]) -> list[Any]:
        async def one(call: Call) -> Any:
            # Inside gather's task, where a SystemExit would end the event loop.
            with foreign_code(refusal, located=True):
                return await self._func(*call.positional, **call.keywords)

        if self._is_async:
            return list(await asyncio.gather(*map(one, calls)))
        with foreign_code(refusal, located=True):
            results = await in_daemon_thread(
                lambda: [self._func(*call.positional, **call.keywords) for call in calls], "reward-function"
            )
            return [await result if inspect.isawaitable(result) else result for result in results]

    def _hint(self, requests: Sequence[RewardRequest]) -> str:
        """Returns a hint for a function that was written for messages and gets text here; else nothing."""
        if self._signature.convention is not Convention.TRL or all(conversational(r.prompt) for r in requests):
            return ""
        return " (completions are texts, as the rows have their prompts as texts; messages follow prompts in messages)"

    def _reward_of(self, result: Any) -> Reward:
        """Returns the reward of one reply, as verl's functions return it."""
        if not isinstance(result, Mapping):
            return self._parser.parse(self._applicable([result]), 1)[0]
        if "score" not in result:
            raise RewardError(
                f"{self._name} returned a mapping with {sorted(map(str, result))}: it needs the key 'score'."
            )
        logs = {
            str(k): float(v) for k, v in result.items() if isinstance(v, Real) and k != "score" and math.isfinite(v)
        }
        texts = {"answers": [result.get("pred")], "feedback": [result.get("feedback")]}
        read = {"rewards": self._applicable([result["score"]]), **texts, "extra_logs": logs}
        return self._parser.parse(read, 1)[0]

    def _applicable(self, result: Any) -> Any:
        """Returns `result` with 0 for named rewards that do not apply.

        Raises:
            NotApplicableError: no reward applies to one of the replies.
        """
        rewards = result.get("rewards") if isinstance(result, Mapping) else result
        parts = rewards if isinstance(rewards, Mapping) else {"": rewards}
        lists = {name: list(part) for name, part in parts.items() if isinstance(part, list | tuple)}
        if not any(value is None for part in lists.values() for value in part):
            return result
        if len(lists) == len(parts):
            for index, values in enumerate(zip(*lists.values(), strict=False)):
                if all(value is None for value in values):
                    raise NotApplicableError(f"{self._name} returned None for reply {index}: no reward applies to it.")
        filled = {
            name: [0.0 if v is None else v for v in lists[name]] if name in lists else parts[name] for name in parts
        }
        return {**result, "rewards": filled} if isinstance(rewards, Mapping) else result

    def _with_notes(self, rewards: list[Reward], notes: Notes) -> list[Reward]:
        """Returns the rewards with the numbers that the function logged by TRL's callbacks."""
        columns = {
            name: values
            for name, values in notes.columns.items()
            if len(values) == len(rewards) and all(isinstance(value, Real) for value in values)
        }
        lost = notes.columns.keys() - columns.keys() - self._dropped
        if lost:
            self._dropped |= lost
            log.warning("log_extra keeps numbers only, one for each reply", function=self._name, dropped=sorted(lost))
        return [
            evolve(
                reward,
                metrics={
                    **notes.metrics,
                    **{name: float(values[index]) for name, values in columns.items()},
                    **reward.metrics,
                },
            )
            for index, reward in enumerate(rewards)
        ]
