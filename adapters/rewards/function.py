"""Rewards from a Python function that the user wrote.

Invariant: whatever the function does, the answer is one finite reward a reply or one `RewardError` sentence.
A plain function runs in a thread of its own, so it never blocks the event loop; a thread cannot be killed, so one that
outlives its deadline is left behind as a daemon and does not keep the process alive.
"""

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rollgrad.adapters.openrlhf.finder import install
from rollgrad.adapters.rewards.answers import RewardParser, replies
from rollgrad.adapters.system.daemon_thread import in_daemon_thread
from rollgrad.adapters.system.python_file import load_python_file
from rollgrad.domain.errors import ConfigurationError, RewardError
from rollgrad.domain.ports.reward_source import RewardSource
from rollgrad.domain.rewards import Reward, RewardRequest

FUNCTION_NAME = "reward_func"


def load_reward_function(path: str) -> Callable[..., Any]:
    """The function `reward_func` of the Python file `path`, which may import OpenRLHF's helpers.

    Raises:
        ConfigurationError: there is no such file, it cannot be imported, or it defines no such function.
    """
    install()
    module = load_python_file(path, flag="--reward.function-path")
    function: Callable[..., Any] | None = getattr(module, FUNCTION_NAME, None)
    if not callable(function):
        raise ConfigurationError(
            f"--reward.function-path {path} defines no function {FUNCTION_NAME}(queries, prompts, labels)."
        )
    return function


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
        self._parser = RewardParser(name, weights)
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
        except (Exception, SystemExit) as error:  # whatever the user's function raises is one sentence
            if deadline.expired():
                raise RewardError(
                    f"{self._name} gave no answer for {replies(len(requests))} within {self._timeout:g} s: "
                    "make it faster, or raise --reward.timeout."
                ) from error
            raise RewardError(f"{self._name} raised {type(error).__name__}: {error}") from error
        return self._parser.parse(result, len(requests))

    async def _call(self, arguments: Mapping[str, list[Any]]) -> Any:
        positional = () if self._by_keyword else tuple(arguments.values())
        keywords = arguments if self._by_keyword else {}
        if self._is_async:
            return await self._func(*positional, **keywords)
        return await in_daemon_thread(lambda: self._func(*positional, **keywords), "reward-function")


def _takes_keywords(func: Callable[..., Any]) -> bool:
    try:
        inspect.signature(func).bind(queries=[], prompts=[], labels=[])
    except (TypeError, ValueError):
        return False
    return True
