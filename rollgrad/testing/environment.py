"""An `Environment` that follows a script."""

from collections.abc import Sequence

from rollgrad.domain.episodes.messages import Action
from rollgrad.domain.episodes.prompts import Prompt
from rollgrad.domain.ports.environment import Environment, Observation, StepResult


class FakeEnvironment(Environment):
    """Answers each action with the next of `results`; keeps the actions it saw."""

    def __init__(self, results: Sequence[StepResult], *, greeting: Observation = "") -> None:
        self._results = list(results)
        self._greeting = greeting
        self.actions: list[str] = []
        self.closed = False

    async def reset(self, prompt: Prompt) -> Observation:
        """Forgets the actions and returns the greeting."""
        self.actions.clear()
        return self._greeting

    async def step(self, action: Action) -> StepResult:
        """Keeps the action's text and returns the next result."""
        self.actions.append(action.text)
        return self._results[len(self.actions) - 1]

    async def close(self) -> None:
        """Sets `closed`."""
        self.closed = True
