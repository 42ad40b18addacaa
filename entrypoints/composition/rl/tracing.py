"""Chooses whether the parts of an episode are wrapped in spans: they are not unless somebody wants some."""

from collections.abc import Awaitable, Sequence
from pathlib import Path

from rollgrad.adapters.tracing.exporting import flush, tracer
from rollgrad.adapters.tracing.spans import (
    Spans,
    TracedEngine,
    TracedEnvironment,
    TracedExecutor,
    TracedReward,
    TracedTool,
)
from rollgrad.application.episodes.multi_turn import EnvironmentFactory
from rollgrad.domain.episodes.generation import SamplingParams
from rollgrad.domain.ports.agent_executor import AgentExecutor
from rollgrad.domain.ports.environment import Environment, Tool
from rollgrad.domain.ports.reward_source import RewardSource
from rollgrad.domain.ports.rollout_engine import RolloutEngine


class Tracing:
    """Returns what it is given, wrapped in spans if there is a tracer (`adapters.tracing.exporting.tracer`).

    `model`: the model's name, or the directory that it is in.
    """

    def __init__(self, model: str) -> None:
        self._model = Path(model).name
        found = tracer()
        self._spans = None if found is None else Spans(found)

    def engine(self, inner: RolloutEngine) -> RolloutEngine:
        """Returns an engine."""
        return inner if self._spans is None else TracedEngine(inner, self._spans, model=self._model)

    def rewards(self, inner: RewardSource | None) -> RewardSource | None:
        """Returns a reward source, None without one."""
        return inner if self._spans is None or inner is None else TracedReward(inner, self._spans)

    def tools(self, inner: Sequence[Tool]) -> Sequence[Tool]:
        """Returns tools."""
        spans = self._spans
        return inner if spans is None else [TracedTool(tool, spans) for tool in inner]

    def environments(self, inner: EnvironmentFactory) -> EnvironmentFactory:
        """Returns a factory of environments."""
        spans = self._spans
        if spans is None:
            return inner

        async def make(params: SamplingParams) -> Environment:
            made = inner(params)
            return TracedEnvironment(await made if isinstance(made, Awaitable) else made, spans)

        return make

    def executor(self, inner: AgentExecutor) -> AgentExecutor:
        """Returns an executor."""
        return inner if self._spans is None else TracedExecutor(inner, self._spans)

    def close(self) -> None:
        """Exports the spans so far; idempotent."""
        if self._spans is not None:
            flush()
