"""An agent that is a Python function."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from rollgrad.adapters.system.daemon_thread import in_daemon_thread
from rollgrad.adapters.system.own_loop import in_own_loop
from rollgrad.application.foreign import foreign_code, shown
from rollgrad.domain.errors import ForeignError
from rollgrad.domain.ports.agent_program import AgentProgram, AgentResult, AgentTask


class FunctionAgent(AgentProgram):
    """Calls `function(task)`. A blocking function runs in a thread of its own. Asynchronous functions share an event
    loop of their own: one that blocks all the same holds up the others, but not the server that it asks.

    It returns its answer (a text), its reward (a number), a mapping with `answer`, `reward`, `rewards` (of each role)
    and `metrics`, or None: then the last reply is the answer. A function that blocks keeps its thread until it returns,
    also when it is cancelled, but its session refuses further calls.
    """

    def __init__(self, function: Callable[[AgentTask], Any]) -> None:
        self._function = function

    async def run(self, task: AgentTask) -> AgentResult:
        """Implements `AgentProgram.run`.

        Raises:
            ForeignError: the function returned something else, or raised, be it by `sys.exit`, which must not end the
                training run.
        """
        with foreign_code(lambda words: ForeignError(f"The agent raised {words}"), located=True):
            if inspect.iscoroutinefunction(self._function):
                return agent_result(await in_own_loop(lambda: self._function(task)))
            value = await in_daemon_thread(lambda: self._function(task), "agent")
            return agent_result(await in_own_loop(lambda: value) if inspect.isawaitable(value) else value)


def agent_result(value: Any) -> AgentResult:
    """Returns what an agent says of its episode, with its numbers as they are.

    Raises:
        ForeignError: it says something else than `FunctionAgent` takes, or a mapping has other keys.
    """
    if isinstance(value, Mapping):
        unknown = value.keys() - {"answer", "reward", "rewards", "metrics"}
        if unknown:
            names = ", ".join(sorted(map(str, unknown)))
            raise ForeignError(
                f"The agent returned a mapping with {names}, but it has answer, reward, rewards and metrics."
            )
        answer, reward, rewards = value.get("answer"), value.get("reward"), value.get("rewards") or {}
        if not isinstance(rewards, Mapping):
            raise ForeignError(
                f"The agent returned rewards {shown(rewards)}, but they are a mapping of roles to numbers."
            )
        if rewards and not answer is reward is None:
            raise ForeignError(
                "The agent returned rewards of roles beside an answer or a reward: leave these out, because each role "
                "learns from its own reward."
            )
        if not isinstance(answer, str | None):
            raise ForeignError(f"The agent returned the answer {shown(answer)}, but answers are texts.")
        return AgentResult(
            answer=answer,
            reward=reward,
            metrics={str(name): number for name, number in (value.get("metrics") or {}).items()},
            rewards={str(role): number for role, number in rewards.items()},
        )
    if value is None or isinstance(value, str):
        return AgentResult(answer=value)
    with foreign_code(
        lambda _: ForeignError(
            f"The agent returned {shown(value)}, but it returns its answer (a text), its reward (a number), a mapping "
            "of both, or None."
        )
    ):
        number = float(value)
    return AgentResult(reward=number)
