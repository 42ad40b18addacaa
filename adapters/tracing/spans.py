"""Spans of an episode: its turns, and in them what was sampled, called and judged, how long each took and how it ended.

The ports that an episode is played through are wrapped; names of attributes are those of OpenTelemetry's conventions
for generative AI, where they have one. Invariant: no text of a prompt, a reply, an argument, a result or an error is in
a span, but numbers, names and kinds.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from rollgrad.application.engines.wrapped import WrappedEngine
from rollgrad.domain.episodes.generation import Generation, GenerationRequest
from rollgrad.domain.episodes.messages import Action, ToolResult
from rollgrad.domain.episodes.prompts import Prompt
from rollgrad.domain.episodes.rewards import Reward, RewardRequest, RolloutFailure
from rollgrad.domain.episodes.trajectory import Trajectory
from rollgrad.domain.ports.agent_executor import AgentExecutor, EpisodeRequest
from rollgrad.domain.ports.environment import (
    Environment,
    KeepsEpisodes,
    Observation,
    StepResult,
    Tool,
    offered,
    tool_for_episode,
)
from rollgrad.domain.ports.reward_source import RewardSource
from rollgrad.domain.ports.rollout_engine import RolloutEngine

if TYPE_CHECKING:
    from opentelemetry.trace import Span, Tracer

MODEL_MISTAKE = "tool_error"
"""Type of error of a tool's result in which the tool tells the model of a mistake."""


class Spans:
    """Begins spans of `tracer`."""

    def __init__(self, tracer: "Tracer") -> None:
        self._tracer = tracer

    @contextmanager
    def span(self, name: str, attributes: Mapping[str, Any]) -> Iterator["Span"]:
        """Records its block as a span below the current one; of an exception it has the type alone."""
        with self._tracer.start_as_current_span(
            name, attributes=attributes, record_exception=False, set_status_on_exception=False
        ) as span:
            try:
                yield span
            except BaseException as error:  # a cancellation, too
                failed(span, type(error).__name__)
                raise

    def turns(self) -> "Turns":
        """Returns the spans of an episode's turns, of which none has begun."""
        return Turns(self._tracer)


def failed(span: "Span", kind: str) -> None:
    """Marks a span as failed."""
    from opentelemetry.trace import StatusCode

    span.set_attribute("error.type", kind)
    span.set_status(StatusCode.ERROR)


class Turns:
    """The spans of the turns of one episode in an environment, one after the other: each begins as the reply is asked
    for, and ends with the environment's answer."""

    def __init__(self, tracer: "Tracer") -> None:
        self._tracer = tracer
        self._count = 0
        self._span: Span | None = None

    @contextmanager
    def under_way(self) -> Iterator[None]:
        """Makes the turn's span the current one inside its block, and begins it if there is none."""
        from opentelemetry import trace

        if self._span is None:
            self._count += 1
            self._span = self._tracer.start_span("turn", attributes={"rollgrad.turn": self._count})
        with trace.use_span(self._span, record_exception=False, set_status_on_exception=False):
            yield

    def end(self) -> None:
        """Ends the turn's span, if one has begun."""
        if self._span is not None:
            self._span.end()
            self._span = None


_turns: ContextVar[Turns | None] = ContextVar("turns", default=None)
"""Turns of the episode that is played in this context; None of one without an environment."""


class TracedExecutor(AgentExecutor):
    """An `AgentExecutor` each of whose episodes is a span."""

    def __init__(self, inner: AgentExecutor, spans: Spans) -> None:
        self._inner = inner
        self._spans = spans

    async def run(self, request: EpisodeRequest) -> list[Trajectory] | RolloutFailure:
        """Implements `AgentExecutor.run`."""
        names = {"rollgrad.group_id": request.group_id, "rollgrad.sample_id": request.sample_id}
        before = _turns.set(None)
        try:
            with self._spans.span("episode", names) as span:
                result = await self._inner.run(request)
                if isinstance(result, RolloutFailure):
                    failed(span, result.kind.value)
                else:
                    span.set_attributes(
                        {
                            "rollgrad.branches": len(result),
                            "rollgrad.reward": sum(trajectory.reward for trajectory in result),
                            "rollgrad.score": result[0].score,
                            "rollgrad.stop_reason": result[0].stop_reason.value,
                            "rollgrad.action_tokens": sum(trajectory.action_length for trajectory in result),
                        }
                    )
                return result
        finally:
            _turns.reset(before)


class TracedEngine(WrappedEngine):
    """A `RolloutEngine` each of whose replies is a span; `model` is the model's name."""

    def __init__(self, inner: RolloutEngine, spans: Spans, *, model: str) -> None:
        super().__init__(inner)
        self._spans = spans
        self._model = model

    async def generate(
        self, request: GenerationRequest, *, on_token: Callable[[int], None] | None = None
    ) -> Generation:
        """Implements `RolloutEngine.generate`."""
        params, turns = request.params, _turns.get()
        asked = {
            "gen_ai.operation.name": "text_completion",
            "gen_ai.request.model": self._model,
            "gen_ai.request.max_tokens": params.max_new_tokens,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.seed": params.seed,
            "gen_ai.usage.input_tokens": len(request.prompt_token_ids),
        }
        turn = nullcontext() if turns is None else turns.under_way()
        with turn, self._spans.span(f"text_completion {self._model}", asked) as span:
            generation = await self._inner.generate(request, on_token=on_token)
            span.set_attributes(
                {
                    "gen_ai.usage.output_tokens": len(generation.token_ids),
                    "gen_ai.response.finish_reasons": [generation.stop_reason.value],
                }
            )
            if generation.versions:
                span.set_attribute("rollgrad.version_first", int(min(generation.versions)))
                span.set_attribute("rollgrad.version_last", int(max(generation.versions)))
            return generation


class TracedReward(RewardSource):
    """A `RewardSource` each of whose judgements is a span."""

    def __init__(self, inner: RewardSource, spans: Spans) -> None:
        self._inner = inner
        self._spans = spans

    async def score(self, requests: Sequence[RewardRequest]) -> list[Reward]:
        """Implements `RewardSource.score`."""
        with self._spans.span("reward", {"rollgrad.requests": len(requests)}) as span:
            rewards = await self._inner.score(requests)
            if len(rewards) == 1:
                span.set_attribute("rollgrad.reward", rewards[0].value)
                span.set_attributes({f"rollgrad.reward_part.{name}": part for name, part in rewards[0].parts.items()})
            return rewards


class TracedTool(Tool, KeepsEpisodes):
    """A `Tool` each of whose calls is a span."""

    def __init__(self, inner: Tool, spans: Spans) -> None:
        self._inner = inner
        self._spans = spans

    @property
    def name(self) -> str:
        """The inner tool's."""
        return self._inner.name

    @property
    def description(self) -> str:
        """The inner tool's."""
        return self._inner.description

    @property
    def parameters(self) -> Mapping[str, Any]:
        """The inner tool's."""
        return self._inner.parameters

    async def call(self, arguments: Mapping[str, Any]) -> ToolResult:
        """Implements `Tool.call`."""
        names = {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": self.name, "gen_ai.tool.type": "function"}
        with self._spans.span(f"execute_tool {self.name}", names) as span:
            result = await self._inner.call(arguments)
            if result.is_error:
                failed(span, MODEL_MISTAKE)
            return result

    def for_episode(self) -> Tool:
        """Implements `KeepsEpisodes.for_episode`; this one itself if the inner tool keeps nothing."""
        inner = tool_for_episode(self._inner)
        return self if inner is self._inner else TracedTool(inner, self._spans)

    async def close(self) -> None:
        """Implements `Tool.close`."""
        await self._inner.close()


class TracedEnvironment(Environment):
    """An `Environment` whose turns, and whose answers in them, are spans."""

    def __init__(self, inner: Environment, spans: Spans) -> None:
        self._inner = inner
        self._spans = spans
        self._turns = spans.turns()

    @property
    def tools(self) -> Sequence[Tool]:
        """The inner environment's, which may have none."""
        return offered(self._inner, "tools", ())

    @property
    def acting_role(self) -> str:
        """The inner environment's, which may have no roles."""
        return offered(self._inner, "acting_role", "")

    async def reset(self, prompt: Prompt) -> Observation:
        """Implements `Environment.reset`."""
        _turns.set(self._turns)
        with self._spans.span("environment.reset", {}):
            return await self._inner.reset(prompt)

    async def step(self, action: Action) -> StepResult:
        """Implements `Environment.step`."""
        try:
            with self._turns.under_way(), self._spans.span("environment.step", {}) as span:
                result = await self._inner.step(action)
                if result.reward is not None:
                    span.set_attribute("rollgrad.reward", result.reward)
                return result
        finally:
            self._turns.end()

    async def close(self) -> None:
        """Implements `Environment.close`."""
        self._turns.end()  # ends the span of a turn whose reply failed
        await self._inner.close()
