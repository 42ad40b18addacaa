"""Training sees the tokens that the engine saw and sampled, one by one, on real chat templates."""

import asyncio
import copy
import random
from collections.abc import Sequence
from typing import Any

import pytest
from attrs import evolve
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from rollgrad.adapters.chat.template_codec import TemplateCodec
from rollgrad.application.episodes.digests import digests
from rollgrad.application.episodes.ledger import TokenLedger
from rollgrad.application.episodes.multi_turn import MultiTurnExecutor
from rollgrad.domain.episodes.generation import GenerationRequest, SamplingParams, StopReason
from rollgrad.domain.episodes.messages import Action, Message, assistant_message
from rollgrad.domain.episodes.prompts import Prompt
from rollgrad.domain.episodes.rewards import RolloutFailure
from rollgrad.domain.episodes.trajectory import NO_VERSION, SegmentKind, Trajectory
from rollgrad.domain.errors import DataError, TrajectoryError
from rollgrad.domain.ports.agent_executor import EpisodeRequest
from rollgrad.domain.ports.chat_codec import ChatCodec
from rollgrad.domain.ports.environment import StepResult
from rollgrad.testing.chat_codec import FakeChatCodec
from rollgrad.testing.environment import FakeEnvironment
from rollgrad.testing.tool import FakeTool
from tests.fakes.chat_templates import tokenizer_with
from tests.fakes.recording_engine import Exchange, RecordingEngine, random_tokens

FAMILIES = (
    "smollm2",
    "qwen2_5",
    "qwen3",
    "qwen3_5_think",
    "llama3_1",
    "gptoss",
    "glm4moe",
    "gemma3",
    "gemma4",
    "lfm2_v2",
)
UNLIKE = "smollm2", "qwen3_5_think", "gptoss", "glm4moe", "gemma4"
"""Those among them whose templates write thoughts, calls and ends of turns in different ways."""
TOOL = {
    "type": "function",
    "function": {"name": FakeTool.name, "description": FakeTool.description, "parameters": FakeTool.parameters},
}
CALL = '<tool_call>\n{"name": "repeat", "arguments": {"text": "x"}}\n</tool_call>'
SETTINGS = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))

TEXTS = st.one_of(
    st.text(alphabet="ab é漢🙂\n\ue000\uf8ff<|>{}", min_size=1, max_size=12),
    st.sampled_from(
        ["<|im_end|>", "<|im_start|>assistant\n", "<|eot_id|>", "<end_of_turn>", "<think>", "</think>", CALL]
    ),
)
SAID = st.one_of(
    TEXTS,
    st.sampled_from(
        [
            CALL,
            f"{CALL}\n{CALL}",
            f"<think>\nhm\n</think>\n\n{CALL}",
            "<think>\nhm\n</think>\n\nseven",
            "hm</think>seven",
            '{"name": "repeat", "parameters": {"text": "x"}}',
            "<tool_call>repeat\n<arg_key>text</arg_key>\n<arg_value>x</arg_value>\n</tool_call>",
            "<tool_call>\n<function=repeat>\n<parameter=text>\nx\n</parameter>\n</function>\n</tool_call>",
            "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>7<|return|>",
            "<|channel|>commentary to=functions.repeat <|constrain|>json<|message|>{}<|call|>",
            '<tool_call>{"name": "repeat", "arguments": {"text": "\\ud800"}}</tool_call>',
        ]
    ),
)
ENDS = ("", "<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<turn|>", "<|user|>", "<|return|>")


def check(trajectories: Sequence[Trajectory], exchanges: Sequence[Exchange], rewards: Sequence[float]) -> None:
    """The five promises of a sample's trajectories; `rewards` are those of the exchanges."""
    seen: list[int] = []
    for trajectory in trajectories:
        tokens = trajectory.token_ids_T.tolist()
        end = 0
        for segment in trajectory.segments:
            assert segment.start == end  # segments tile the tokens
            end = segment.stop
            part = slice(segment.start, segment.stop)
            if segment.kind is not SegmentKind.ACTION:
                assert segment.reward == 0.0
                assert set(trajectory.logprobs_T[part].tolist()) <= {0.0}  # I3
                assert set(trajectory.versions_T[part].tolist()) <= {NO_VERSION}
                continue
            logprobs = trajectory.logprobs_T[part].tolist()
            (index,) = (i for i, e in enumerate(exchanges) if list(e.generation.logprobs) == logprobs)
            exchange = exchanges[index]
            seen.append(index)
            assert tokens[: segment.stop] == [*exchange.prompt, *exchange.generation.token_ids]  # I1 and I5
            assert trajectory.versions_T[part].tolist() == list(exchange.generation.versions)
            assert segment.reward == rewards[index]  # I4
        assert end == len(tokens)
        assert trajectory.segments[-1].kind is SegmentKind.ACTION
    assert sorted(seen) == list(range(len(exchanges)))  # I2
    assert len({(t.group_id, t.sample_id, t.score) for t in trajectories}) == 1


class Chatty(FakeEnvironment):
    """Follows a script, in messages, with a tool."""

    tools = (FakeTool(),)


class Answers(Chatty):
    """Answers calls with results, and all else with the script."""

    async def step(self, action: Action) -> StepResult:
        result = await super().step(action)
        calls = [call for call in action.tool_calls if call.arguments is not None]
        if not calls:
            return result
        text = str(result.observation[0]["content"]) if result.observation else ""
        return evolve(
            result,
            observation=[{"role": "tool", "tool_call_id": c.id, "name": c.name, "content": text} for c in calls],
        )


def engine_for(codec: ChatCodec, vocabulary: int, replies: Sequence[str | int], seed: int) -> RecordingEngine:
    generator = random.Random(seed)

    def reply(request: GenerationRequest, number: int) -> Sequence[int]:
        said = replies[number]
        if isinstance(said, int):
            return random_tokens(generator, vocabulary, said)
        return [*codec.encode(said), *codec.encode(generator.choice(ENDS))] or [0]

    return RecordingEngine(reply)


async def play(
    codec: ChatCodec, engine: RecordingEngine, environment: Any, prompt: Prompt, max_tokens: int | None
) -> list[Trajectory] | RolloutFailure:
    executor = MultiTurnExecutor(engine, codec, lambda params: environment, max_turns=20, max_tokens=max_tokens)
    request = EpisodeRequest(prompt=prompt, params=SamplingParams(max_new_tokens=4096), group_id=3, sample_id=4)
    return await executor.run(request)


def script(data: st.DataObject, turns: int, observation: st.SearchStrategy[Any]) -> list[StepResult]:
    """The environment's answers, each turn with a reward of its own."""
    return [
        StepResult(observation=data.draw(observation), reward=2.0**-turn, terminated=turn == turns - 1)
        for turn in range(turns)
    ]


REPLIES = st.lists(st.one_of(SAID, SAID, st.integers(1, 12)), min_size=1, max_size=5)


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=() if name in UNLIKE else pytest.mark.wide) for name in FAMILIES]
)
@given(data=st.data(), replies=REPLIES, seed=st.integers(0, 2**32))
@SETTINGS
async def test_episodes_in_messages(
    family: str, tiny_tokenizer: Any, data: st.DataObject, replies: list[str | int], seed: int
) -> None:
    tokenizer = tokenizer_with(family, tiny_tokenizer)
    codec = TemplateCodec(tokenizer)
    engine = engine_for(codec, len(tokenizer), replies, seed)
    opening = [{"role": "user", "content": data.draw(TEXTS)}]
    if data.draw(st.booleans()):
        opening.insert(0, {"role": "system", "content": data.draw(TEXTS)})
    users = TEXTS.map(lambda text: [{"role": "user", "content": text}])
    results = script(data, len(replies), users)
    kind = data.draw(st.sampled_from([Chatty, Answers]))
    limit = data.draw(st.sampled_from([None, None, None, 700]))
    played = await play(codec, engine, kind(results, greeting=opening), Prompt(token_ids=(1,), text=""), limit)
    if isinstance(played, RolloutFailure):
        assert not engine.exchanges or "template refuses" in played.message
        return
    rewards = [result.reward for result in results][: len(engine.exchanges)]
    check(played, engine.exchanges, rewards)
    assert played[0].score == sum(rewards)
    assert played[0].metrics["branches"] == len(played)
    assert played[0].metrics["turns"] == len(engine.exchanges)
    if limit is None and not any(isinstance(said, int) for said in replies):
        assert len(engine.exchanges) == len(replies)


class Table(Chatty):
    """Has players who act in the order of `roles`, of which some share what they are told."""

    def __init__(self, results: Sequence[StepResult], roles: Sequence[str], **options: Any) -> None:
        super().__init__(results, **options)
        self._roles = roles

    @property
    def acting_role(self) -> str:
        return self._roles[min(len(self.actions), len(self._roles) - 1)]


@pytest.mark.parametrize("family", ["smollm2", "qwen3", "llama3_1", "gemma4"])
@given(data=st.data(), replies=REPLIES, seed=st.integers(0, 2**32))
@SETTINGS
async def test_episodes_of_several_roles(
    family: str, tiny_tokenizer: Any, data: st.DataObject, replies: list[str | int], seed: int
) -> None:
    tokenizer = tokenizer_with(family, tiny_tokenizer)
    codec = TemplateCodec(tokenizer)
    engine = engine_for(codec, len(tokenizer), replies, seed)
    roles = data.draw(st.lists(st.sampled_from("abc"), min_size=len(replies), max_size=len(replies)))
    told = st.one_of(TEXTS, TEXTS.map(lambda text: [{"role": "user", "content": text}]))
    results = script(data, len(replies), told)
    extra = {role: 2.0**-20 * (place + 1) for place, role in enumerate("abc")}
    results[-1] = evolve(results[-1], rewards=extra)
    opening = {"role": "user", "content": data.draw(TEXTS)}
    table = Table(results, roles, greeting=data.draw(st.sampled_from(["", "Begin."])))
    prompt = Prompt(token_ids=(1,), text="", messages=(opening,))
    played = await play(codec, engine, table, prompt, None)
    if isinstance(played, RolloutFailure):
        assert not engine.exchanges or "template refuses" in played.message
        return
    count = len(engine.exchanges)
    rewards = [result.reward for result in results][:count]
    if table.actions and count == len(replies):
        for role in set(roles):
            rewards[count - 1 - roles[::-1].index(role)] += extra[role]
    for role in set(roles[:count]):
        own = [turn for turn in range(count) if roles[turn] == role]
        mine = [trajectory for trajectory in played if trajectory.role == role]
        check(mine, [engine.exchanges[turn] for turn in own], [rewards[turn] for turn in own])
        assert mine[0].score == pytest.approx(sum(rewards[turn] for turn in own))
    assert {trajectory.role for trajectory in played} == set(roles[:count])


@pytest.mark.parametrize("family", ["smollm2", "llama3_1", "qwen3"])
@given(data=st.data(), replies=REPLIES, seed=st.integers(0, 2**32))
@SETTINGS
async def test_episodes_in_text(
    family: str, tiny_tokenizer: Any, data: st.DataObject, replies: list[str | int], seed: int
) -> None:
    tokenizer = tokenizer_with(family, tiny_tokenizer)
    codec = TemplateCodec(tokenizer)
    engine = engine_for(codec, len(tokenizer), replies, seed)
    results = script(data, len(replies), st.one_of(st.just(""), TEXTS))
    greeting = data.draw(st.one_of(st.just(""), TEXTS))
    prompt = Prompt(token_ids=codec.encode("What?"), text="What?")
    played = await play(codec, engine, FakeEnvironment(results, greeting=greeting), prompt, None)
    assert isinstance(played, list)
    assert len(played) == 1  # text only ever continues
    check(played, engine.exchanges, [result.reward for result in results])
    between = [s for s in played[0].segments if s.kind is SegmentKind.OBSERVATION]
    written = [result.observation for result in results[:-1] if result.observation]
    tokens = played[0].token_ids_T.tolist()
    assert [tuple(tokens[s.start : s.stop]) for s in between] == [codec.encode(str(text)) for text in written]


async def test_a_template_that_drops_thinking_opens_a_branch_a_question(tiny_tokenizer: Any) -> None:
    codec = TemplateCodec(tokenizer_with("qwen3", tiny_tokenizer))
    replies = [
        f"<think>\nhm\n</think>\n\n{CALL}<|im_end|>",
        "<think>\nso\n</think>\n\nseven<|im_end|>",
        "bye<|im_end|>",
    ]
    engine = RecordingEngine(lambda request, number: codec.encode(replies[number]))
    results = [
        StepResult(observation=[{"role": "user", "content": text}], reward=reward, terminated=text == "")
        for text, reward in (("x", 1.0), ("And?", 2.0), ("", 4.0))
    ]
    environment = Answers(results, greeting=[{"role": "user", "content": "3+4?"}])
    played = await play(codec, engine, environment, Prompt(token_ids=(1,), text=""), None)
    assert isinstance(played, list)
    check(played, engine.exchanges, [1.0, 2.0, 4.0])
    assert len(played) == 2
    assert [sum(s.kind is SegmentKind.ACTION for s in t.segments) for t in played] == [2, 1]
    prompt = codec.decode(engine.exchanges[2].prompt, special_tokens=True)
    assert "hm" not in prompt
    assert "seven" in prompt


class Recorder:
    """A client's requests on one ledger, sampled by a recording engine."""

    def __init__(self, codec: ChatCodec) -> None:
        self.codec = codec
        self.ledger = TokenLedger(codec)
        self.rewards: list[float] = []
        self.said: list[str] = []
        self.engine = RecordingEngine(lambda request, number: self.codec.encode(self.said[-1]))

    def ask(self, messages: Sequence[Message], said: str, tools: Sequence[Any] = ()) -> Message:
        """The reply's message; the turn is worth a power of two of its own."""
        prepared = self.ledger.prepare(messages, tools)
        self.said.append(said)
        request = GenerationRequest(prompt_token_ids=prepared.token_ids, params=SamplingParams(max_new_tokens=999))
        generation = asyncio.run(self.engine.generate(request))
        text = self.codec.decode(generation.token_ids, special_tokens=True)
        message = self.codec.parse(text, self.codec.decode(prepared.token_ids[-64:]), tools).message
        turn = self.ledger.commit(prepared, generation, message)
        self.rewards.append(2.0**-turn)
        self.ledger.set_reward(turn, self.rewards[-1])
        return message

    def trajectories(self, dropped: Sequence[int] = ()) -> list[Trajectory]:
        """Returns the samples that are learned from, checked."""
        made = self.ledger.trajectories(group_id=0, sample_id=1, stop_reason=StopReason.STOP)
        kept = [i for i in range(self.ledger.turns) if i not in dropped]
        check(made, [self.engine.exchanges[i] for i in kept], [self.rewards[i] for i in kept])
        assert made[0].score == sum(self.rewards[i] for i in kept)
        return made


@pytest.fixture(params=["fake", "qwen2_5", "gemma4", "lfm2_v2"])
def recorder(request: pytest.FixtureRequest, tiny_tokenizer: Any) -> Recorder:
    if request.param == "fake":
        return Recorder(FakeChatCodec())
    return Recorder(TemplateCodec(tokenizer_with(request.param, tiny_tokenizer)))


USER = {"role": "user", "content": "3+4?"}
MORE = {"role": "user", "content": "And?"}


def test_a_history_that_clients_garble_still_continues(recorder: Recorder) -> None:
    recorder.ask([USER], "x", [TOOL])
    turn = recorder.ledger._turns[0]
    call = {"id": "abcdefghi", "type": "function", "function": {"name": "repeat", "arguments": {"text": "x", "n": 1}}}
    turn.messages = (USER, {**assistant_message("", reasoning="hm"), "tool_calls": [call]})
    recorder.ledger._same = {digests(turn.messages, [TOOL], "")[-1]: [0]}
    garbled = copy.deepcopy(call)
    garbled["id"] = "call_2"
    garbled["function"] = {"arguments": {"n": 1, "text": "x"}, "name": "repeat"}
    echo = {"tool_calls": [garbled], "content": None, "role": "assistant"}
    result = {"role": "tool", "tool_call_id": "call_2", "content": "x", "name": "repeat"}
    prepared = recorder.ledger.prepare([USER, echo, result], [TOOL])
    assert prepared.parent == 0
    assert prepared.token_ids[: turn.length] == recorder.ledger.token_ids(0)
    assert prepared.messages[:2] == turn.messages


def test_lost_thinking_is_remembered_where_the_history_is_written_anew() -> None:
    class Stubborn(FakeChatCodec):
        def extend(self, *args: Any, **kwargs: Any) -> None:
            return None

    recorder = Recorder(Stubborn())
    reply = recorder.ask([USER], "(hm)seven")
    assert reply["reasoning_content"] == "hm"
    echoed = {"role": "assistant", "content": "seven"}
    assert "(hm)seven" in recorder.codec.decode(recorder.ledger.prepare([USER, echoed, MORE]).token_ids)
    recorder.ask([USER, echoed, MORE], "bye")
    recorder.trajectories()


@pytest.mark.parametrize(
    "change",
    [
        lambda h: [{"role": "user", "content": "3+5?"}, *h[1:]],
        lambda h: [h[0], {"role": "assistant", "content": "eight"}, *h[2:]],
        lambda h: [{"role": "system", "content": "Be kind."}, *h],
        lambda h: [h[0], *h[2:]],
    ],
    ids=["question", "reply", "system", "reply left out"],
)
def test_a_changed_history_is_another_branch(recorder: Recorder, change: Any) -> None:
    history = [USER, recorder.ask([USER], "seven"), MORE]
    recorder.ask(history, "indeed")
    recorder.ask(change(history), "no")
    assert recorder.ledger.branches == 2
    assert len(recorder.trajectories()) == 2


def test_other_tools_are_another_branch(recorder: Recorder) -> None:
    history = [USER, recorder.ask([USER], "seven"), MORE]
    other = {"type": "function", "function": {**TOOL["function"], "name": "other"}}
    recorder.ask(history, "indeed", [other])
    assert len(recorder.trajectories()) == 2


def test_a_shared_turn_is_trained_once(recorder: Recorder) -> None:
    start = [USER, recorder.ask([USER], "seven")]
    for text in ("a", "b", "c"):
        recorder.ask([*start, {"role": "user", "content": text}], f"said {text}")
    first, *others = recorder.trajectories()
    assert recorder.ledger.branches == 3
    assert sum(s.kind is SegmentKind.ACTION for s in first.segments) == 2
    for other in others:
        assert [s.kind for s in other.segments] == [SegmentKind.PROMPT, SegmentKind.ACTION]
        shared = list(first.token_ids_T[: first.segments[1].stop])
        assert list(other.token_ids_T[: len(shared)]) == shared


def test_the_same_question_again_is_another_sample(recorder: Recorder) -> None:
    recorder.ask([USER], "seven")
    recorder.ask([USER], "seven")
    assert len(recorder.trajectories()) == 2


def test_a_sub_agent_in_between_leaves_the_conversation_alone(recorder: Recorder) -> None:
    sub = [{"role": "system", "content": "You add."}, USER]
    main: list[Message] = [{"role": "system", "content": "You talk."}, USER]
    for turn in range(3):
        main = [*main, recorder.ask(main, f"main {turn}"), MORE]
        sub = [*sub, recorder.ask(sub, f"sub {turn}"), MORE]
    made = recorder.trajectories()
    assert len(made) == 2
    assert [sum(s.kind is SegmentKind.ACTION for s in t.segments) for t in made] == [3, 3]


def test_a_turn_left_out_is_not_trained(recorder: Recorder) -> None:
    recorder.ask([USER], "seven")
    recorder.ask([USER], "eight")
    recorder.ledger.drop_leaf(0)
    assert len(recorder.trajectories(dropped=[0])) == 1
    recorder.ledger.drop_leaf(1)
    assert recorder.ledger.is_empty
    assert recorder.ledger.branches == 0
    with pytest.raises(TrajectoryError, match="no sampled token"):
        recorder.trajectories(dropped=[0, 1])


def test_a_turn_that_is_continued_stays(recorder: Recorder) -> None:
    reply = recorder.ask([USER], "seven")
    recorder.ask([USER, reply, MORE], "indeed")
    recorder.ledger.drop_leaf(0)
    recorder.trajectories()


def test_a_turn_that_is_continued_after_it_was_left_out_comes_back(recorder: Recorder) -> None:
    history = [USER, recorder.ask([USER], "seven"), MORE]
    prepared = recorder.ledger.prepare(history)
    recorder.ledger.drop_leaf(0)
    recorder.said.append("indeed")
    request = GenerationRequest(prompt_token_ids=prepared.token_ids, params=SamplingParams())
    generation = asyncio.run(recorder.engine.generate(request))
    recorder.rewards.append(0.0)
    recorder.ledger.commit(prepared, generation, assistant_message("indeed"))
    recorder.trajectories()


def test_a_history_left_out_is_not_continued(recorder: Recorder) -> None:
    history = [USER, recorder.ask([USER], "seven"), MORE]
    recorder.ledger.drop_leaf(0)
    assert recorder.ledger.prepare(history).parent is None


@pytest.mark.parametrize("family", ["fake", "qwen3", "llama3_2", "gemma4"])
@given(data=st.data())
@SETTINGS
def test_any_agent_on_one_ledger(family: str, tiny_tokenizer: Any, data: st.DataObject) -> None:
    """An agent that forks, rewrites, forgets and starts anew as it likes."""
    codec: ChatCodec = FakeChatCodec(forgetful=data.draw(st.booleans()))
    if family != "fake":
        codec = TemplateCodec(tokenizer_with(family, tiny_tokenizer))
    recorder = Recorder(codec)
    histories: list[list[Message]] = [[USER]]

    for _ in range(data.draw(st.integers(1, 7))):
        history = list(data.draw(st.sampled_from(histories)))
        said = data.draw(
            st.sampled_from(["seven", "(hm)7", "<think>\nhm\n</think>\n\n7<|im_end|>", CALL, "漢<|im_end|>"])
        )
        said = data.draw(st.sampled_from([said, "a" + said]))
        try:
            reply = dict(recorder.ask(history, said, [TOOL]))
        except DataError:  # a template that wants turns to alternate
            assume(False)
        for name in data.draw(st.sets(st.sampled_from(["reasoning_content"]))):
            reply.pop(name, None)
        if data.draw(st.integers(0, 5)) == 0:
            reply["content"] = "changed"
        answer = (
            {"role": "tool", "tool_call_id": "c", "name": "repeat", "content": "x"} if "tool_calls" in reply else MORE
        )
        histories.append([*history, reply, answer])
        if data.draw(st.integers(0, 5)) == 0:
            turn = data.draw(st.integers(0, recorder.ledger.turns - 1))
            recorder.ledger.drop_leaf(turn)
    turns = recorder.ledger._turns
    dropped = {i for i, turn in enumerate(turns) if turn.dropped}
    for index, turn in enumerate(turns):
        if turn.parent is not None:
            before = recorder.ledger.token_ids(turn.parent)
            assert recorder.ledger.token_ids(index)[: len(before)] == before
            assert turn.dropped or not turns[turn.parent].dropped
    if len(dropped) < len(turns):
        assert len(recorder.trajectories(sorted(dropped))) == recorder.ledger.branches
