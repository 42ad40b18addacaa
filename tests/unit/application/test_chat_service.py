"""Replies to conversations that others lead, and episodes of agents that are clients."""

import asyncio
import pickle
import re
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import pytest
import structlog
from attrs import evolve

from rollgrad.application.episodes.chat_request import ChatRequest, Origin, RefusedError, SessionLimits
from rollgrad.application.episodes.chat_service import ChatService, RecordedSession
from rollgrad.application.episodes.external_agent import ServedAgentExecutor, _for_clients
from rollgrad.application.episodes.reply import ChatReply
from rollgrad.application.episodes.stop_text import StopText
from rollgrad.domain.episodes.generation import Generation, SamplingParams, StopReason
from rollgrad.domain.episodes.images import Image, PlacedImage
from rollgrad.domain.episodes.messages import ParsedReply
from rollgrad.domain.episodes.prompts import Prompt
from rollgrad.domain.episodes.rewards import FailureKind, RolloutFailure
from rollgrad.domain.episodes.trajectory import Trajectory
from rollgrad.domain.errors import ConfigurationError, EngineError
from rollgrad.domain.ports.agent_executor import EpisodeRequest
from rollgrad.domain.ports.agent_program import AgentProgram, AgentResult, AgentTask
from rollgrad.testing.chat_codec import EOS, FakeChatCodec
from rollgrad.testing.reward_source import FakeRewardSource
from rollgrad.testing.rollout_engine import FakeRolloutEngine
from tests.fakes.scripted_engine import Script, ScriptedEngine, assert_recorded

PROMPT = Prompt(token_ids=(1,), text="go", label="two", messages=({"role": "user", "content": "go"},))
PARAMS = SamplingParams(max_new_tokens=50, seed=3)


def ask(*texts: str, **changes: Any) -> ChatRequest:
    roles = ("user", "assistant")
    return ChatRequest(messages=[{"role": roles[i % 2], "content": t} for i, t in enumerate(texts)], changes=changes)


async def play(
    scenario: Callable[[RecordedSession, ScriptedEngine], Awaitable[None]], script: Script, **limits: Any
) -> None:
    engine = ScriptedEngine(FakeChatCodec(), EOS, script)
    service = ChatService(engine, FakeChatCodec(), max_waiting=limits.pop("max_waiting", 100))
    session = service.open(PARAMS, SessionLimits(**{"max_turns": 10, **limits}))
    assert service.session(session.key) is session
    await scenario(session, engine)
    await session.seal()
    assert service.session(session.key) is None
    assert service.in_flight == 0


def content(reply: ChatReply) -> str:
    return str(reply.parsed.message["content"])


async def test_clients_are_told_the_likely_tokens_they_ask_for_and_the_trainer_its_own() -> None:
    service = ChatService(FakeRolloutEngine(), FakeChatCodec(), max_waiting=10)
    session = service.open(evolve(PARAMS, top_logprobs=30), SessionLimits(max_turns=10))
    unasked = await session.reply(ask("go"))
    asked = await session.reply(ask("go", content(unasked), "more", top_logprobs=2))
    assert not unasked.generation.top_logprobs
    assert {len(told) for told in asked.generation.top_logprobs} == {2}
    await session.seal()
    recorded = session.ledger.trajectories(group_id=0, sample_id=0, stop_reason=StopReason.STOP)
    told = [each for trajectory in recorded for each in trajectory.top_logprobs or ()]
    assert {len(each) for each in told} == {30}
    assert len(told) == sum(trajectory.action_length for trajectory in recorded)


async def test_each_turn_has_a_seed_of_its_own() -> None:
    async def scenario(session: RecordedSession, engine: ScriptedEngine) -> None:
        await session.reply(ask("go"))
        engine.failures = 1
        with pytest.raises(EngineError):
            await session.reply(ask("go", "one", "more"))
        await session.reply(ask("go", "one", "more"))
        assert [request.params.seed for request in engine.requests] == [3, 4, 4]
        assert_recorded(session, engine.said)

    await play(scenario, ["one", "two"])


async def test_an_unlearned_reply_that_is_asked_for_again_counts_once() -> None:
    async def scenario(session: RecordedSession, engine: ScriptedEngine) -> None:
        engine.free.clear()
        impatient = asyncio.create_task(session.unlearned.reply(ask("go")))
        while not engine.waiting:
            await asyncio.sleep(0)
        impatient.cancel()
        with suppress(asyncio.CancelledError):
            await impatient
        engine.free.set()
        engine.failures = 1
        with pytest.raises(EngineError):
            await session.unlearned.reply(ask("go"))
        for number in (1, 2):
            await session.unlearned.reply(ask("go"))
            assert session.unlearned.count == number
        with pytest.raises(RefusedError, match="has had its 2 unlearned replies"):
            await session.unlearned.reply(ask("go"))
        seeds = [request.params.seed for request in engine.requests]
        assert seeds[0] == seeds[1] == seeds[2] != seeds[3]

    await play(scenario, ["one", "two", "three"], max_turns=2)


async def test_settings_that_all_episodes_send_are_reported_once() -> None:
    service = ChatService(ScriptedEngine(FakeChatCodec(), EOS, ["one"] * 3), FakeChatCodec())
    with structlog.testing.capture_logs() as logs:
        for temperature in (0.1, 0.2, 0.3):
            session = service.open(PARAMS, SessionLimits(max_turns=10))
            await session.reply(ask("go", temperature=temperature))
            await session.seal()
    assert [(event["event"], event["names"]) for event in logs] == [("client_settings_ignored", "temperature")]


async def test_the_trainers_stops_stay_and_the_clients_are_added() -> None:
    async def scenario(session: RecordedSession, engine: ScriptedEngine) -> None:
        reply = await session.reply(ask("go", stop_strings=("END",), max_new_tokens=20))
        assert content(reply) == "one "
        assert reply.stopped_by == "END"
        again = await session.reply(ask("go", "one ", "more"))
        assert content(again) == "two"
        assert_recorded(session, engine.said)

    await play(scenario, ["one END of it", "two"])


async def test_a_retry_takes_the_reply_that_nobody_got() -> None:
    """Two alike at once, as for best-of-two; the first caller goes away and asks again."""

    async def scenario(session: RecordedSession, engine: ScriptedEngine) -> None:
        engine.free.clear()
        first, again = Origin(key="k", digest="d"), Origin(key="k", digest="d", is_retry=True)
        callers = [asyncio.create_task(session.reply(ask("go"), origin=first)) for _ in range(2)]
        while engine.waiting < 2:
            await asyncio.sleep(0)
        callers[0].cancel()
        retry = asyncio.create_task(session.reply(ask("go"), origin=again))
        await asyncio.sleep(0)
        engine.free.set()
        assert content(await retry) == "one"
        assert content(await callers[1]) == "two"
        await session.seal()
        assert_recorded(session, engine.said, branches=2)

    await play(scenario, ["one", "two"])


@pytest.mark.parametrize("streams", [False, True])
async def test_the_same_request_gets_the_reply_that_nobody_saw(streams: bool) -> None:
    """The caller may have seen the beginning of a stream, and asks for another reply."""

    async def scenario(session: RecordedSession, engine: ScriptedEngine) -> None:
        how: dict[str, Any] = {"origin": Origin(key="k", digest="d")}
        if streams:
            how["on_piece"] = lambda *piece: None
        engine.free.clear()
        left = asyncio.create_task(session.reply(ask("go"), **how))
        while not engine.waiting:
            await asyncio.sleep(0)
        left.cancel()
        with suppress(asyncio.CancelledError):
            await left
        engine.free.set()
        assert content(await session.reply(ask("go"), **how)) == ("two" if streams else "one")

    await play(scenario, ["one", "two"])


async def test_a_caller_that_gives_up_behind_its_retry_takes_nothing_away() -> None:
    async def scenario(session: RecordedSession, engine: ScriptedEngine) -> None:
        engine.free.clear()
        first = asyncio.create_task(session.reply(ask("go"), origin=Origin(key="k", digest="d")))
        while not engine.waiting:
            await asyncio.sleep(0)
        retry = asyncio.create_task(session.reply(ask("go"), origin=Origin(key="k", digest="d", is_retry=True)))
        await asyncio.sleep(0)
        first.cancel()
        engine.free.set()
        assert content(await retry) == "one"
        await session.seal()
        assert_recorded(session, engine.said)

    await play(scenario, ["one"])


async def test_a_reply_that_one_of_its_callers_still_waits_for_is_not_given_to_another_request() -> None:
    """A client left, asked again, and left again, while another one had taken over: a third one asks for itself."""

    async def scenario(session: RecordedSession, engine: ScriptedEngine) -> None:
        engine.free.clear()
        request, retry = Origin(key="k", digest="d"), Origin(key="k", digest="d", is_retry=True)

        async def asked(origin: Origin) -> "asyncio.Task[ChatReply]":
            caller = asyncio.create_task(session.reply(ask("go"), origin=origin))
            for _ in range(20):
                await asyncio.sleep(0)
            return caller

        first = await asked(request)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        second, repeated = await asked(request), await asked(retry)
        repeated.cancel()
        await asyncio.gather(repeated, return_exceptions=True)
        third = await asked(request)
        engine.free.set()
        assert [content(reply) for reply in await asyncio.gather(second, third)] == ["one", "two"]

    await play(scenario, ["one", "two"])


async def test_the_judge_reads_the_reply_that_is_trained_not_one_that_reached_nobody() -> None:
    engine = ScriptedEngine(FakeChatCodec(), EOS, ["right", "wrong"])
    service = ChatService(engine, FakeChatCodec())
    rewards = FakeRewardSource(lambda request: 1.0)

    class Racing(AgentProgram):
        """Gives up a second request, whose reply comes all the same."""

        async def run(self, task: AgentTask) -> AgentResult:
            session = service.session(task.api_key)
            assert session is not None
            await session.reply(ask("go"))
            second = asyncio.create_task(session.reply(ask("other")))
            while not engine.waiting:
                await asyncio.sleep(0)
            second.cancel()
            while session.ledger.turns < 2:
                await asyncio.sleep(0)
            return AgentResult()

    async def url() -> str:
        return "http://unused"

    limits = SessionLimits(max_turns=10)
    executor = ServedAgentExecutor(Racing(), service, FakeChatCodec(), url, rewards, model="m", limits=limits)
    result = await executor.run(EpisodeRequest(prompt=PROMPT, params=PARAMS, group_id=0, sample_id=0))
    assert isinstance(result, list)
    (request,) = rewards.requests
    assert request.response == "right"
    assert "right" in request.query


async def test_a_reply_that_reached_nobody_is_dropped_unless_it_is_continued() -> None:
    async def scenario(session: RecordedSession, engine: ScriptedEngine) -> None:
        for texts in (("go",), ("other",)):
            engine.free.clear()
            caller = asyncio.create_task(session.reply(ask(*texts)))
            while not engine.waiting:
                await asyncio.sleep(0)
            caller.cancel()
            engine.free.set()
            while engine.waiting:
                await asyncio.sleep(0)
        assert content(await session.reply(ask("go", "one", "more"))) == "three"
        await session.seal()
        assert_recorded(session, [engine.said[0], engine.said[2]])

    await play(scenario, ["one", "two", "three"])


async def test_refusals_have_kinds_and_are_counted() -> None:
    async def scenario(session: RecordedSession, engine: ScriptedEngine) -> None:
        engine.free.clear()
        blocked = asyncio.create_task(session.reply(ask("go")))
        while not engine.waiting:
            await asyncio.sleep(0)
        with pytest.raises(RefusedError, match="1 requests are in flight") as busy:
            await session.reply(ask("go"))
        assert busy.value.kind == "busy"
        engine.free.set()
        await blocked
        with pytest.raises(RefusedError, match="no room") as long:
            await session.reply(ask("x" * 100))
        assert session.stopped is StopReason.LENGTH
        await session.reply(ask("go", "one", "more"))
        with pytest.raises(RefusedError, match=r"its 2 replies \(rollout\.max_turns\)") as many:
            await session.reply(ask("go"))
        assert (long.value.kind, many.value.kind) == ("context_length", "turn_limit")
        await session.seal()
        with pytest.raises(RefusedError) as over:
            await session.reply(ask("go"))
        assert over.value.kind == "sealed"
        copy = pickle.loads(pickle.dumps(many.value))
        assert (str(copy), copy.kind) == (str(many.value), "turn_limit")
        assert session.refused == {"context_length": 1, "turn_limit": 1, "sealed": 1}

    await play(scenario, ["one", "two"], max_turns=2, max_tokens=90, max_waiting=1)


STOPS = [("END",), ("END", "E"), ("aab",), ("\n", "END"), ("never",)]


@pytest.mark.parametrize("stops", STOPS)
@pytest.mark.parametrize("size", [1, 2, 3, 100])
@pytest.mark.parametrize("text", ["", "EEND of", "aaaab then", "one\ntwo END", "EN", "no such text aa"])
def test_stop_texts_in_pieces_are_those_of_the_whole(stops: tuple[str, ...], size: int, text: str) -> None:
    pieces: list[str] = []
    cut = StopText(stops, lambda field, piece: pieces.append(piece))
    for start in range(0, len(text), size):
        cut.hear("content", text[start : start + size])
    generation = Generation(token_ids=[1], logprobs=[0.0], versions=[0], stop_reason=StopReason.STOP)
    message = {"role": "assistant", "content": text}
    whole = cut.finish(ChatReply(parsed=ParsedReply(message=message), generation=generation, prompt_token_ids=(1,)))
    places = [text.find(stop) for stop in stops if stop in text]
    assert content(whole) == text[: min(places, default=len(text))]
    assert "".join(pieces) == content(whole)
    assert (whole.stopped_by is None) == (not places)


def test_thinking_is_not_held_back_by_stop_texts() -> None:
    pieces: list[tuple[str, str]] = []
    StopText(("END",), lambda *piece: pieces.append(piece)).hear("reasoning_content", "E")
    assert pieces == [("reasoning_content", "E")]


# Episodes


class Agent(AgentProgram):
    """Asks the service as its client would, without a socket."""

    def __init__(self, service: ChatService, behave: Callable[[RecordedSession], Awaitable[Any]]) -> None:
        self._service, self._behave = service, behave
        self.tasks: list[AgentTask] = []

    async def run(self, task: AgentTask) -> AgentResult:
        self.tasks.append(task)
        session = self._service.session(task.api_key)
        assert session is not None
        result = await self._behave(session)
        return AgentResult() if result is None else result


async def episode(
    behave: Callable[[RecordedSession], Awaitable[Any]], script: Script = ("one", "two", "three"), **how: Any
) -> tuple[list[Trajectory] | RolloutFailure, FakeRewardSource]:
    engine = ScriptedEngine(FakeChatCodec(), EOS, script)
    service = ChatService(engine, FakeChatCodec())
    rewards = FakeRewardSource(how.get("judge", lambda request: float(request.response == request.label)))
    agent = Agent(service, behave)

    async def url() -> str:
        return "http://127.0.0.1:1"

    limits = SessionLimits(max_turns=3, max_tokens=how.get("max_tokens"))
    executor = ServedAgentExecutor(
        agent,
        service,
        FakeChatCodec(),
        url,
        rewards,
        model="policy",
        limits=limits,
        max_seconds=how.get("max_seconds"),
    )
    result = await executor.run(EpisodeRequest(prompt=PROMPT, params=PARAMS, group_id=4, sample_id=9))
    (task,) = agent.tasks
    assert task.base_url == f"http://127.0.0.1:1/s/{task.api_key}/v1"
    assert service.session(task.api_key) is None, "the session is closed however the episode ends"
    return result, rewards


async def two_turns(session: RecordedSession) -> None:
    await session.reply(ask("go"))
    await session.reply(ask("go", "one", "more"))


def test_clients_are_given_images_in_data_uris_and_other_messages_as_they_are() -> None:
    """Also those that a row may have without a content, or with parts without a type."""
    image = Image(digest="d", data=b"\x89PNG", tensors={})
    called = {"role": "assistant", "tool_calls": [{"function": {"name": "look", "arguments": {}}}]}
    asked = {"role": "user", "content": [{"text": "What is"}, {"type": "image", "image": "a.png"}]}
    prompt = Prompt(
        token_ids=(1, 2),
        text="go",
        messages=(called, asked),
        images=(PlacedImage(image=image, start=0, stop=1),),
    )
    first, second = _for_clients(prompt).messages
    assert first == called
    uri = "data:image/png;base64,iVBORw=="
    assert second["content"] == [{"text": "What is"}, {"type": "image_url", "image_url": {"url": uri}}]


async def test_the_last_reply_is_judged_and_has_the_reward() -> None:
    result, rewards = await episode(two_turns)
    assert isinstance(result, list)
    (trajectory,) = result
    (request,) = rewards.requests
    assert request.response == "two"
    assert request.query.endswith("[assistant]two<eos>"), "as the model saw and wrote it"
    assert request.token_ids is not None
    assert FakeChatCodec().decode(request.token_ids, special_tokens=True) == request.query
    assert [s.reward for s in trajectory.segments if s.kind == "action"] == [0.0, 1.0]
    assert (trajectory.group_id, trajectory.sample_id, trajectory.score) == (4, 9, 1.0)
    assert trajectory.stop_reason is StopReason.ENVIRONMENT
    assert trajectory.metrics == {"turns": 2.0, "branches": 1.0}


async def test_branches_share_a_sample_and_one_reward() -> None:
    async def branching(session: RecordedSession) -> AgentResult:
        await asyncio.gather(*(session.reply(ask(text)) for text in ("go", "left", "right")))
        return AgentResult(reward=2.5, metrics={"helpers": 2.0})

    result, rewards = await episode(branching)
    assert isinstance(result, list)
    assert sorted(trajectory.reward for trajectory in result) == [0.0, 0.0, 2.5]
    assert {trajectory.score for trajectory in result} == {2.5}
    assert {trajectory.sample_id for trajectory in result} == {9}
    assert {tuple(sorted(t.metrics.items())) for t in result} == {(("branches", 3.0), ("helpers", 2.0), ("turns", 3.0))}
    assert not rewards.requests


async def sides(session: RecordedSession) -> None:
    """Two sides of a game ask the same; the second is then shown its own history, the first that of the second."""
    first, second = (evolve(ask("go"), role=role) for role in ("first", "second"))
    await session.reply(first)
    await session.reply(second)
    await session.reply(evolve(ask("go", "two", "more"), role="first"))


async def test_each_role_has_branches_and_a_reward_of_its_own() -> None:
    async def playing(session: RecordedSession) -> AgentResult:
        await sides(session)
        return AgentResult(rewards={"first": 1.0, "second": -1.0, "never asked": 5.0})

    result, rewards = await episode(playing)
    assert isinstance(result, list)
    assert [(t.role, t.reward, t.score, t.sample_id) for t in result] == [
        ("first", 0.0, 1.0, 9),
        ("second", -1.0, -1.0, 9),
        ("first", 1.0, 1.0, 9),
    ]
    assert [sum(s.kind == "action" for s in t.segments) for t in result] == [1, 1, 1], "what the other said is context"
    assert not rewards.requests


async def test_roles_may_share_the_episodes_reward() -> None:
    async def playing(session: RecordedSession) -> AgentResult:
        await sides(session)
        return AgentResult(reward=0.5)

    result, _ = await episode(playing)
    assert isinstance(result, list)
    assert [(t.role, t.reward, t.score) for t in result] == [
        ("first", 0.0, 0.5),
        ("second", 0.5, 0.5),
        ("first", 0.5, 0.5),
    ]


async def test_a_role_continues_its_own_tokens() -> None:
    async def playing(session: RecordedSession) -> AgentResult:
        for text in (("go",), ("go", "one", "more")):
            await session.reply(evolve(ask(*text), role="first"))
        return AgentResult(rewards={"first": 1.0})

    result, _ = await episode(playing)
    assert isinstance(result, list)
    (trajectory,) = result
    assert [s.reward for s in trajectory.segments if s.kind == "action"] == [0.0, 1.0]


@pytest.mark.parametrize(
    ("roles", "sentence"),
    [
        (("first", "second"), "rewards of the roles first, but second replied, too: return a reward for each role"),
        (("first", ""), "but also asked for replies with task.api_key, which are no role's"),
    ],
)
async def test_a_reply_that_no_reward_is_for_fails_the_episode(roles: tuple[str, ...], sentence: str) -> None:
    async def playing(session: RecordedSession) -> AgentResult:
        for role in roles:
            await session.reply(evolve(ask("go"), role=role))
        return AgentResult(rewards={"first": 1.0})

    result, _ = await episode(playing)
    assert isinstance(result, RolloutFailure)
    assert sentence in result.message


async def test_a_limit_truncates_the_episode_also_when_the_agent_fails_of_it() -> None:
    async def greedy(session: RecordedSession) -> None:
        for _ in range(4):
            await session.reply(ask("go"))

    result, _ = await episode(greedy)
    assert isinstance(result, list)
    assert {trajectory.stop_reason for trajectory in result} == {StopReason.TURN_LIMIT}
    assert {trajectory.score for trajectory in result} == {0.0}


async def test_an_agent_that_shortens_its_conversation_was_not_ended_by_the_limit() -> None:
    async def compacting(session: RecordedSession) -> None:
        with pytest.raises(RefusedError, match="no room"):
            await session.reply(ask("x" * 200))
        await session.reply(ask("go"))

    result, _ = await episode(compacting, max_tokens=100)
    assert isinstance(result, list)
    assert [trajectory.stop_reason for trajectory in result] == [StopReason.ENVIRONMENT]


async def test_a_last_reply_that_was_cut_off_truncates_the_episode_unless_the_agent_answers() -> None:
    async def cut(session: RecordedSession) -> None:
        await session.reply(ask("go", max_new_tokens=2))

    async def answering(session: RecordedSession) -> AgentResult:
        await cut(session)
        return AgentResult(answer="two")

    for behave, stop_reason, score in ((cut, StopReason.LENGTH, 0.0), (answering, StopReason.ENVIRONMENT, 1.0)):
        result, rewards = await episode(behave)
        assert isinstance(result, list)
        assert [(trajectory.stop_reason, trajectory.score) for trajectory in result] == [(stop_reason, score)]
        assert rewards.requests[0].stop_reason is (StopReason.LENGTH if behave is cut else StopReason.STOP)


async def test_the_wall_clock_truncates_too() -> None:
    async def slow(session: RecordedSession) -> None:
        await session.reply(ask("go"))
        await asyncio.sleep(1000)

    result, _ = await episode(slow, max_seconds=2.0)
    assert isinstance(result, list)
    assert result[0].stop_reason is StopReason.TIMEOUT


async def test_a_reply_that_the_agent_left_is_no_turn_and_counted() -> None:
    async def leaving(session: RecordedSession) -> AgentResult:
        left = asyncio.create_task(session.reply(ask("other")))
        await asyncio.sleep(0)  # it has begun
        left.cancel()
        while session.ledger.turns == 0:
            await asyncio.sleep(0)
        await session.reply(ask("go"))
        return AgentResult(reward=1.0)

    result, _ = await episode(leaving)
    assert isinstance(result, list)
    (trajectory,) = result
    assert trajectory.metrics == {"turns": 1.0, "dropped_turns": 1.0, "branches": 1.0}


async def test_an_agents_own_timeout_is_its_failure() -> None:
    async def impatient(session: RecordedSession) -> None:
        await session.reply(ask("go"))
        raise TimeoutError("the web is slow")

    result, _ = await episode(impatient, max_seconds=1000)
    assert isinstance(result, RolloutFailure)
    assert result.kind is FailureKind.ENVIRONMENT
    assert "TimeoutError: the web is slow" in result.message


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (1.0, "returned 1.0, but a program returns an AgentResult"),
        (AgentResult(reward=float("nan")), "returned the reward nan: it must be a finite number."),
        (AgentResult(reward="0.5"), "returned the reward '0.5': it must be a finite number."),  # type: ignore[arg-type]
        (
            AgentResult(reward=1.0, metrics=[2.0]),  # type: ignore[arg-type]
            "returned the metrics [2.0]: they must be a mapping from names to numbers, or left out.",
        ),
        (
            AgentResult(metrics={"helpers": float("inf")}),
            "returned the metric helpers inf: it must be a finite number.",
        ),
        (
            AgentResult(rewards={"first": "much"}),  # type: ignore[dict-item]
            "returned the reward of the role first 'much': it must be a finite number.",
        ),
    ],
)
async def test_a_result_that_cannot_be_learned_from_is_the_agents_failure(result: Any, message: str) -> None:
    async def wrong(session: RecordedSession) -> Any:
        await session.reply(ask("go"))
        return result

    failure, _ = await episode(wrong)
    assert isinstance(failure, RolloutFailure)
    assert failure.kind is FailureKind.ENVIRONMENT
    assert message in failure.message


async def test_what_an_agent_measured_is_kept_also_where_its_answer_is_judged() -> None:
    async def searching(session: RecordedSession) -> AgentResult:
        await session.reply(ask("go"))
        return AgentResult(answer="two", metrics={"searches": 3.0})

    result, _ = await episode(searching)
    assert isinstance(result, list)
    assert [(t.score, t.metrics["searches"]) for t in result] == [(1.0, 3.0)]


async def test_an_agent_that_asks_nothing_fails_and_says_why() -> None:
    async def silent(session: RecordedSession) -> None:
        pass

    result, _ = await episode(silent)
    assert isinstance(result, RolloutFailure)
    assert "did not ask for one" in result.message


async def test_an_agent_that_leaves_before_each_reply_is_told_so() -> None:
    async def hasty(session: RecordedSession) -> AgentResult:
        asked = asyncio.create_task(session.reply(ask("go")))
        await asyncio.sleep(0)
        asked.cancel()
        return AgentResult(reward=1.0)

    result, _ = await episode(hasty)
    assert isinstance(result, RolloutFailure)
    assert "without a reply that came to its end (it asked for 1, and left them, or they failed)" in result.message


async def test_settings_that_clients_send_in_vain_are_told_once_for_all_episodes() -> None:
    service = ChatService(ScriptedEngine(FakeChatCodec(), EOS, lambda prompt: "one"), FakeChatCodec())
    with structlog.testing.capture_logs() as logs:
        for changes in ({"temperature": 0.1}, {"temperature": 0.2}, {"temperature": 0.1, "top_k": 3}):
            session = service.open(PARAMS, SessionLimits(max_turns=9))
            await session.reply(ask("go", **changes))
            await session.seal()
    assert [log["names"] for log in logs] == ["temperature", "top_k"]


async def test_an_agent_that_hangs_before_its_first_request_is_told_the_limit() -> None:
    async def hung(session: RecordedSession) -> None:
        await asyncio.sleep(1000)

    result, _ = await episode(hung, max_seconds=0.1)
    assert isinstance(result, RolloutFailure)
    assert result.message.endswith("without a reply: its 0.1 s were over (--rollout.max_episode_seconds).")


@pytest.mark.parametrize("length", [90, 10_000], ids=["by its tokens", "by its characters"])
async def test_an_agent_whose_only_request_was_refused_is_told_what_it_was_told(length: int) -> None:
    async def wordy(session: RecordedSession) -> None:
        with suppress(RefusedError):
            await session.reply(ask("x" * length))

    result, _ = await episode(wordy, max_tokens=60)
    assert isinstance(result, RolloutFailure)
    assert re.search(
        r"refused: 1 context_length\)\. The conversation has .* leaves no room for a reply", result.message
    )


async def test_a_judge_that_fails_is_a_reward_failure() -> None:
    result, _ = await episode(two_turns, judge=lambda request: float("nan"))
    assert isinstance(result, RolloutFailure)
    assert result.kind is FailureKind.REWARD


async def test_a_misconfiguration_ends_the_run() -> None:
    async def wrong(session: RecordedSession) -> None:
        raise ConfigurationError("no such program")

    with pytest.raises(ConfigurationError, match="no such program"):
        await episode(wrong)


async def test_a_call_still_running_when_the_agent_returns_is_ended_and_not_recorded() -> None:
    async def hasty(session: RecordedSession) -> AgentResult:
        await session.reply(ask("go"))
        asyncio.get_running_loop().slow = asyncio.create_task(session.reply(ask("late")))  # type: ignore[attr-defined]
        await asyncio.sleep(0)
        return AgentResult(reward=1.0)

    result, _ = await episode(hasty)
    assert isinstance(result, list)
    (trajectory,) = result
    assert trajectory.metrics["turns"] == 1
