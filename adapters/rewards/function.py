"""Rewards from a Python function that the user wrote.

Invariant: whatever the function does, the answer is one finite reward a reply or one `RewardError` sentence.
A plain function runs in a thread of its own, so it never blocks the event loop; a thread cannot be killed, so one that
outlives its deadline is left behind as a daemon and does not keep the process alive.
"""

import asyncio
import inspect
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rollgrad.adapters.system.python_file import load_python_file
from rollgrad.domain.errors import ConfigurationError, RewardError
from rollgrad.domain.ports.reward_source import RewardSource
from rollgrad.domain.rewards import Reward, RewardRequest

FUNCTION_NAME = "reward_func"


def load_reward_function(path: str) -> Callable[..., Any]:
    """The function `reward_func` of the Python file `path`.

    Raises:
        ConfigurationError: there is no such file, it cannot be imported, or it defines no such function.
    """
    module = load_python_file(path, flag="--reward.function-path")
    function = getattr(module, FUNCTION_NAME, None)
    if not callable(function):
        raise ConfigurationError(
            f"--reward.function-path {path} defines no function {FUNCTION_NAME}(queries, prompts, labels)."
        )
    return function  # type: ignore[no-any-return]


class FunctionReward(RewardSource):
    """Scores replies with `func(queries, prompts, labels)`, called by keyword where it takes these names.

    `queries` are prompt and reply in one text. `func` may be async. It returns the rewards (list, tensor, or a number
    for one reply), or a mapping with `rewards` and optionally `scores` (for filtering and evaluation) and
    `extra_logs` (name -> number, or one number a reply). `rewards` may itself be a mapping of named rewards (name ->
    one number a reply); a reply's reward is then their sum by `weights` (default: 1 each). `timeout`: seconds one call
    may take. `name` stands for the function in errors.
    """

    def __init__(
        self,
        func: Callable[..., Any],
        *,
        timeout: float,
        name: str = FUNCTION_NAME,
        weights: Mapping[str, float] | None = None,
    ) -> None:
        self._func = func
        self._weights = weights
        self._timeout = timeout
        self._name = name
        self._is_async = inspect.iscoroutinefunction(func) or inspect.iscoroutinefunction(type(func).__call__)
        self._by_keyword = _takes_keywords(func)

    async def score(self, requests: Sequence[RewardRequest]) -> list[Reward]:
        """One reward a request, in order; one call of the function.

        Raises:
            RewardError: the function raised, took too long, or returned something other than one finite number each.
        """
        if not requests:
            return []
        arguments: dict[str, list[Any]] = {
            "queries": [request.query for request in requests],
            "prompts": [request.prompt.text for request in requests],
            "labels": [request.label for request in requests],
        }
        try:
            async with asyncio.timeout(self._timeout) as deadline:
                result = await self._call(arguments)
        except Exception as error:
            if deadline.expired():
                raise RewardError(
                    f"{self._name} gave no answer for {_replies(len(requests))} within {self._timeout:g} s: "
                    "make it faster, or raise --reward.timeout."
                ) from error
            raise RewardError(f"{self._name} raised {type(error).__name__}: {error}") from error
        return self._rewards(result, len(requests))

    async def _call(self, arguments: Mapping[str, list[Any]]) -> Any:
        positional = () if self._by_keyword else tuple(arguments.values())
        keywords = arguments if self._by_keyword else {}
        if self._is_async:
            return await self._func(*positional, **keywords)
        return await _in_daemon_thread(lambda: self._func(*positional, **keywords))

    def _rewards(self, result: Any, count: int) -> list[Reward]:
        answer = result if isinstance(result, Mapping) else {"rewards": result}
        if "rewards" not in answer:
            raise RewardError(
                f"{self._name} returned a mapping with {sorted(map(str, answer))}: it needs the key 'rewards'."
            )
        parts = self._parts(answer["rewards"], count)
        if parts:
            weights = self._weights or dict.fromkeys(parts, 1.0)
            values = [
                math.fsum(weights[name] * numbers[index] for name, numbers in parts.items()) for index in range(count)
            ]
        else:
            values = self._numbers(answer["rewards"], "rewards", count)
        given_scores = answer.get("scores")
        scores = values if given_scores is None else self._numbers(given_scores, "scores", count)
        for what, numbers in (("reward", values), ("score", scores)):
            for index, number in enumerate(numbers):
                if not math.isfinite(number):
                    raise RewardError(
                        f"{self._name} returned the {what} {number} for reply {index} of {count}: "
                        "each must be a finite number."
                    )
        logs = {
            str(key): self._numbers(value, f"extra_logs[{key!r}]", count, broadcast=True)
            for key, value in (answer.get("extra_logs") or {}).items()
        }
        return [
            Reward(
                value=value,
                score=score,
                metrics={key: numbers[index] for key, numbers in (logs | parts).items()},
                parts={key: numbers[index] for key, numbers in parts.items()},
            )
            for index, (value, score) in enumerate(zip(values, scores, strict=True))
        ]

    def _parts(self, rewards: Any, count: int) -> dict[str, list[float]]:
        """The named rewards, empty if they have no names."""
        if not isinstance(rewards, Mapping):
            if self._weights is not None:
                raise RewardError(
                    f"{self._name} returned rewards without names, but reward.weights is {dict(self._weights)}: return "
                    "a mapping of named rewards, or leave --reward.weights out."
                )
            return {}
        parts = {str(name): self._numbers(value, f"rewards[{name!r}]", count) for name, value in rewards.items()}
        if self._weights is not None and parts.keys() != self._weights.keys():
            raise RewardError(
                f"{self._name} returned the rewards {', '.join(parts)}, but reward.weights names "
                f"{', '.join(self._weights)}: give one weight to each with --reward.weights."
            )
        return parts

    def _numbers(self, value: Any, what: str, count: int, *, broadcast: bool = False) -> list[float]:
        """`value` as `count` floats: a sequence, a tensor or array of any shape, or a number."""
        if hasattr(value, "reshape"):
            value = value.reshape(-1).tolist()
        elif isinstance(value, (int, float)):
            value = [value] * (count if broadcast else 1)
        try:
            items = list(value)
            if any(isinstance(item, str) for item in items):
                raise TypeError("text is not a number")
            numbers = [float(item) for item in items]
        except (TypeError, ValueError) as error:
            raise RewardError(f"{self._name} returned {what} that are not numbers ({value!r}): {error}.") from error
        if broadcast and len(numbers) == 1:
            numbers *= count
        if len(numbers) != count:
            raise RewardError(
                f"{self._name} returned {len(numbers)} {what} for {_replies(count)}: it must return one each."
            )
        return numbers


def _replies(count: int) -> str:
    return "1 reply" if count == 1 else f"{count} replies"


def _takes_keywords(func: Callable[..., Any]) -> bool:
    try:
        inspect.signature(func).bind(queries=[], prompts=[], labels=[])
    except (TypeError, ValueError):
        return False
    return True


async def _in_daemon_thread(call: Callable[[], Any]) -> Any:
    """Awaits `call` in a thread that, unlike an executor's, nobody joins when the process ends."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def settle(result: Any, error: BaseException | None) -> None:
        if future.done():
            return
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)

    def run() -> None:
        result, error = None, None
        try:
            result = call()
        except Exception as raised:
            error = raised
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, name="reward-function", daemon=True).start()
    return await future
