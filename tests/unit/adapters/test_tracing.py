"""Spans of episodes, as OpenTelemetry's own exporter has them; and when there are none."""

import logging
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from rollgrad.adapters.environments.textarena import TextArenaEnvironment
from rollgrad.adapters.tracing import exporting
from rollgrad.adapters.tracing.spans import (
    Spans,
    TracedEngine,
    TracedEnvironment,
    TracedExecutor,
    TracedReward,
    TracedTool,
)
from rollgrad.application.episodes.multi_turn import MultiTurnExecutor
from rollgrad.application.episodes.single_turn import SingleTurnExecutor
from rollgrad.application.episodes.tool_environment import ToolEnvironment
from rollgrad.domain.episodes.generation import SamplingParams
from rollgrad.domain.episodes.messages import ToolResult
from rollgrad.domain.episodes.prompts import Prompt
from rollgrad.domain.episodes.rewards import RolloutFailure
from rollgrad.domain.ports.agent_executor import EpisodeRequest
from rollgrad.domain.ports.environment import KeepsEpisodes, OffersTools
from rollgrad.testing.chat_codec import EOS, FakeChatCodec
from rollgrad.testing.environment import FakeEnvironment
from rollgrad.testing.reward_source import FakeRewardSource
from rollgrad.testing.tool import FakeTool
from tests.fakes.scripted_engine import ScriptedEngine

CODEC = FakeChatCodec()
QUESTION, ARGUMENT, ANSWER, LABEL = "question-text", "argument-text", "answer-text", "label-text"
CONTENT = (QUESTION, ARGUMENT, ANSWER, LABEL)
PROMPT = Prompt(
    token_ids=CODEC.encode(QUESTION), text=QUESTION, messages=({"role": "user", "content": QUESTION},), label=LABEL
)
REQUEST = EpisodeRequest(prompt=PROMPT, params=SamplingParams(max_new_tokens=200, seed=5), group_id=3, sample_id=11)
CALL = f'@repeat {{"text": "{ARGUMENT}"}}'


class Recorded:
    """Spans of episodes that a test plays."""

    def __init__(self) -> None:
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import SimpleSpanProcessor
        from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

        self._exporter = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.spans = Spans(provider.get_tracer("test"))

    def all(self) -> list[Any]:
        """Spans that have ended, in the order of their beginnings."""
        return sorted(self._exporter.get_finished_spans(), key=lambda span: (span.start_time, span.context.span_id))

    def tree(self) -> list[tuple[int, str]]:
        """Depth and name of each."""
        spans = self.all()
        parents = {span.context.span_id: span.parent and span.parent.span_id for span in spans}

        def depth(span: int) -> int:
            parent = parents[span]
            return 0 if parent is None else 1 + depth(parent)

        return [(depth(span.context.span_id), span.name) for span in spans]

    def of(self, name: str) -> list[dict[str, Any]]:
        """Attributes of the spans of a name."""
        return [dict(span.attributes) for span in self.all() if span.name == name]


@pytest.fixture
def recorded() -> Recorded:
    return Recorded()


async def play_tools(
    recorded: Recorded,
    script: Sequence[str],
    answer: Callable[[str], ToolResult] = lambda text: ToolResult(content=text),
) -> Any:
    """Plays an episode with a tool, in which the model says the script's texts."""
    spans = recorded.spans
    engine = ScriptedEngine(CODEC, EOS, script)
    rewards = TracedReward(FakeRewardSource(lambda request: 0.5), spans)
    tool = TracedTool(FakeTool(answer), spans)
    executor = MultiTurnExecutor(
        TracedEngine(engine, spans, model="tiny"),
        CODEC,
        lambda params: TracedEnvironment(ToolEnvironment([tool], rewards=rewards), spans),
        max_turns=4,
    )
    return await TracedExecutor(executor, spans).run(REQUEST)


async def test_an_episode_is_a_tree_of_turns(recorded: Recorded) -> None:
    await play_tools(recorded, [CALL, ANSWER])
    assert recorded.tree() == [
        (0, "episode"),
        (1, "environment.reset"),
        (1, "turn"),
        (2, "text_completion tiny"),
        (2, "environment.step"),
        (3, "execute_tool repeat"),
        (1, "turn"),
        (2, "text_completion tiny"),
        (2, "environment.step"),
        (3, "reward"),
    ]
    (episode,) = recorded.of("episode")
    assert episode["rollgrad.group_id"] == 3
    assert episode["rollgrad.sample_id"] == 11
    assert episode["rollgrad.reward"] == episode["rollgrad.score"] == 0.5
    assert episode["rollgrad.stop_reason"] == "environment"
    assert [turn["rollgrad.turn"] for turn in recorded.of("turn")] == [1, 2]
    first, second = recorded.of("text_completion tiny")
    assert first["gen_ai.usage.output_tokens"] == len(CODEC.encode(CALL)) + 1
    assert first["gen_ai.response.finish_reasons"] == ("stop",)
    assert second["gen_ai.usage.input_tokens"] > first["gen_ai.usage.input_tokens"]
    assert episode["rollgrad.action_tokens"] == sum(one["gen_ai.usage.output_tokens"] for one in (first, second))
    assert recorded.of("reward") == [{"rollgrad.requests": 1, "rollgrad.reward": 0.5}]
    assert not any(span.status.status_code.name == "ERROR" for span in recorded.all())


async def test_no_text_is_in_a_span(recorded: Recorded) -> None:
    def fails(text: str) -> ToolResult:
        raise ValueError(f"cannot say {text}")

    await play_tools(recorded, [CALL, "@repeat {}", ANSWER], fails)
    spans = recorded.all()
    written = "".join(span.to_json() for span in spans)
    assert "execute_tool repeat" in written
    assert not [text for text in CONTENT if text in written]
    assert [call.get("error.type") for call in recorded.of("execute_tool repeat")] == ["ValueError", "tool_error"]
    assert not any(span.events for span in spans), "OpenTelemetry's own record of an exception has its text"


async def test_a_failed_episode_says_its_kind(recorded: Recorded) -> None:
    engine = ScriptedEngine(CODEC, EOS, [ANSWER])
    engine.failures = 1
    executor = SingleTurnExecutor(
        TracedEngine(engine, recorded.spans, model="tiny"), CODEC, TracedReward(FakeRewardSource(), recorded.spans)
    )
    assert isinstance(await TracedExecutor(executor, recorded.spans).run(REQUEST), RolloutFailure)
    assert recorded.tree() == [(0, "episode"), (1, "text_completion tiny")]
    assert [span.status.status_code.name for span in recorded.all()] == ["ERROR", "ERROR"]
    assert recorded.of("episode")[0]["error.type"] == "infrastructure"
    assert recorded.of("text_completion tiny")[0]["error.type"] == "EngineError"


async def test_a_turn_whose_reply_failed_ends_with_its_episode(recorded: Recorded) -> None:
    engine = ScriptedEngine(CODEC, EOS, [ANSWER])
    engine.failures = 1
    executor = MultiTurnExecutor(
        TracedEngine(engine, recorded.spans, model="tiny"),
        CODEC,
        lambda params: TracedEnvironment(FakeEnvironment([]), recorded.spans),
        max_turns=2,
    )
    assert isinstance(await TracedExecutor(executor, recorded.spans).run(REQUEST), RolloutFailure)
    assert "turn" in [name for _, name in recorded.tree()], "a span is exported only when it has ended"


async def test_replies_outside_of_an_episode_have_no_turn(recorded: Recorded) -> None:
    await play_tools(recorded, [ANSWER])
    executor = SingleTurnExecutor(
        TracedEngine(ScriptedEngine(CODEC, EOS, [ANSWER]), recorded.spans, model="tiny"), CODEC, FakeRewardSource()
    )
    await executor.run(REQUEST)
    assert recorded.tree()[-1] == (0, "text_completion tiny")


def test_an_environment_offers_the_tools_that_it_has(recorded: Recorded) -> None:
    inner = ToolEnvironment([])
    traced = TracedEnvironment(inner, recorded.spans)
    assert isinstance(traced, OffersTools)
    assert tuple(traced.tools) == ()
    inner.tools = (FakeTool(),)
    assert traced.tools == inner.tools
    assert TracedEnvironment(FakeEnvironment([]), recorded.spans).tools == ()
    assert TracedEnvironment(FakeEnvironment([]), recorded.spans).acting_role == ""
    assert TracedEnvironment(TextArenaEnvironment(object, players=2), recorded.spans).acting_role == "player-0"


def test_the_tool_of_an_episode_is_traced_as_the_one_that_it_is_of(recorded: Recorded) -> None:
    class Keeps(FakeTool, KeepsEpisodes):
        def for_episode(self) -> FakeTool:
            return FakeTool()

    shared, plain = TracedTool(Keeps(), recorded.spans), TracedTool(FakeTool(), recorded.spans)
    environment = ToolEnvironment([shared, plain])
    assert environment.tools[0] is not shared
    assert isinstance(environment.tools[0], TracedTool)
    assert environment.tools[1] is plain


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The environment without any variable of OpenTelemetry's."""
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)
    return monkeypatch


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"OTEL_SERVICE_NAME": "mine"},
        {"OTEL_TRACES_EXPORTER": "none"},
        {"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"},
        {"OTEL_TRACES_EXPORTER": "console", "OTEL_SDK_DISABLED": "true"},
    ],
)
def test_nobody_wants_spans(variables: dict[str, str], environment: pytest.MonkeyPatch) -> None:
    for name, value in variables.items():
        environment.setenv(name, value)
    assert exporting.tracer() is None


def test_an_exporter_that_is_not_there_is_named(
    environment: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    environment.setenv("OTEL_TRACES_EXPORTER", "jaeger")
    assert exporting.tracer() is None
    told = capsys.readouterr().out
    assert "no spans go to the exporter 'jaeger'" in told
    assert "otlp" in told


def test_a_package_that_is_not_there_is_named(
    environment: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    environment.setenv("OTEL_TRACES_EXPORTER", "otlp")
    environment.setitem(sys.modules, "opentelemetry", None)
    assert exporting.tracer() is None
    assert "pip install rollgrad[opentelemetry]" in capsys.readouterr().out


def test_of_the_problems_of_an_exporter_the_first_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    its_log = logging.Logger("opentelemetry.exporter")
    its_log.addHandler(exporting.FirstProblem())
    its_log.info("all is well")
    for attempt in range(3):
        its_log.warning("connection refused, attempt %d", attempt)
    told = capsys.readouterr().out
    assert told.count("spans are lost") == 1
    assert "connection refused, attempt 0" in told
