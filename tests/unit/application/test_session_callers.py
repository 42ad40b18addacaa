"""Callers of one session who ask at once, leave, come back and repeat themselves, as random as they like."""

import asyncio
import random
from collections import Counter
from contextlib import suppress
from typing import Any

from attrs import define
from hypothesis import given, settings
from hypothesis import strategies as st

from rollgrad.application.episodes.chat_request import ChatRequest, Origin, RefusedError, SessionLimits
from rollgrad.application.episodes.chat_service import ChatService, RecordedSession
from rollgrad.application.episodes.reply import ChatReply
from rollgrad.domain.episodes.generation import SamplingParams, StopReason
from rollgrad.domain.episodes.messages import Message, same_message
from rollgrad.domain.episodes.trajectory import SegmentKind
from rollgrad.domain.errors import EngineError
from rollgrad.testing.chat_codec import EOS, FakeChatCodec
from tests.fakes.scripted_engine import ScriptedEngine

GO = {"role": "user", "content": "go"}
MORE = {"role": "user", "content": "more"}
TURNS = 12


@define(eq=False)
class Caller:
    """A request, its task, and whether it repeats another one."""

    messages: list[Message]
    role: str
    streams: bool
    repeats: bool
    task: "asyncio.Task[ChatReply]"


class Agent:
    """Makes `steps` random moves on a session, and then ends."""

    def __init__(self, session: RecordedSession, engine: ScriptedEngine, rng: random.Random) -> None:
        self.session, self.engine, self.rng = session, engine, rng
        self.callers: list[Caller] = []
        self.histories: list[list[Message]] = [[GO]]

    def ask(self, messages: list[Message], role: str, *, streams: bool, retry: bool, repeats: bool) -> None:
        key = repr([role, *map(same_message, messages)])
        request = ChatRequest(messages=messages, role=role)
        origin = Origin(key=key, digest=key, is_retry=retry)
        on_piece = (lambda field, text: None) if streams else None
        task = asyncio.create_task(self.session.reply(request, origin=origin, on_piece=on_piece))
        self.callers.append(Caller(messages, role, streams, repeats, task))

    async def play(self, steps: int) -> None:
        for _ in range(steps):
            move = self.rng.random()
            running = [caller for caller in self.callers if not caller.task.done()]
            left = [caller for caller in self.callers if caller.task.cancelled()]
            if move < 0.35:
                messages, role = self.rng.choice(self.histories), self.rng.choice(["", "", "critic"])
                self.ask(messages, role, streams=self.rng.random() < 0.3, retry=False, repeats=False)
            elif move < 0.55 and running:
                self.rng.choice(running).task.cancel()
            elif move < 0.75 and left:
                old = self.rng.choice(left)
                self.ask(old.messages, old.role, streams=old.streams, retry=self.rng.random() < 0.6, repeats=True)
            elif move < 0.8:
                self.engine.failures += 1
            for _ in range(self.rng.randint(0, 6)):
                await asyncio.sleep(0)
            self.learn()
        if self.rng.random() < 0.5:  # others are asked for when the episode ends
            await asyncio.gather(*(caller.task for caller in self.callers), return_exceptions=True)
            self.learn()

    def learn(self) -> None:
        for caller in self.delivered():
            history = [*caller.messages, caller.task.result().parsed.message, MORE]
            if history not in self.histories:
                self.histories.append(history)

    def delivered(self) -> list[Caller]:
        tasks = [caller for caller in self.callers if caller.task.done() and not caller.task.cancelled()]
        return [caller for caller in tasks if caller.task.exception() is None]


def actions(session: RecordedSession) -> "Counter[Any]":
    """Gets what is learned from, each with all tokens before it."""
    if session.ledger.is_empty:
        return Counter()
    found: Counter[Any] = Counter()
    for trajectory in session.ledger.trajectories(group_id=0, sample_id=0, stop_reason=StopReason.STOP):
        tokens, logprobs = trajectory.token_ids_T.tolist(), trajectory.logprobs_T.tolist()
        for segment in trajectory.segments:
            if segment.kind is SegmentKind.ACTION:
                part = slice(segment.start, segment.stop)
                found[tuple(tokens[: segment.start]), tuple(tokens[part]), tuple(logprobs[part])] += 1
    return found


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 10**9))
async def test_what_callers_were_given_is_learned_from_once_and_nothing_else(seed: int) -> None:
    rng = random.Random(seed)
    codec = FakeChatCodec(forgetful=rng.random() < 0.5)
    said = iter(range(10**6))
    engine = ScriptedEngine(codec, EOS, lambda prompt: f"{rng.choice(['', '(hm)'])}{next(said)}")
    service = ChatService(engine, codec, max_waiting=100)
    session = service.open(SamplingParams(max_new_tokens=50, seed=3), SessionLimits(max_turns=TURNS))
    agent = Agent(session, engine, rng)
    await agent.play(rng.randint(1, 30))
    in_time = {caller.task.result().turn for caller in agent.delivered()}  # the agent has seen them when it ends
    await session.seal()
    for caller in agent.callers:
        with suppress(asyncio.CancelledError, RefusedError, EngineError):
            await caller.task

    turns = session.ledger._turns
    given = Counter(reply.turn for reply in (caller.task.result() for caller in agent.delivered()))
    parents = {turn.parent for turn in turns if not turn.dropped}
    for number, turn in enumerate(turns):
        assert not turn.dropped or (number not in in_time and number not in parents)
        assert turn.dropped or number in given or number in parents
    learned = actions(session)
    assert set(learned.values()) <= {1}
    assert set(learned) == {
        (
            session.ledger.token_ids(number)[: -len(turn.generation.token_ids)],
            tuple(turn.generation.token_ids),
            tuple(turn.generation.logprobs),
        )
        for number, turn in enumerate(turns)
        if not turn.dropped
    }
    sampled = {(prompt, tuple(reply.token_ids), tuple(reply.logprobs)) for prompt, reply in engine.said}
    assert set(learned) <= sampled
    for caller in agent.delivered():
        reply = caller.task.result()
        assert reply.turn is not None
        assert turns[reply.turn].role == caller.role
        assert turns[reply.turn].messages[: len(caller.messages)] == tuple(caller.messages)
        assert turns[reply.turn].generation.token_ids == reply.generation.token_ids
    for number, count in given.items():  # only who repeats a request shares the reply to it
        sharing = [caller for caller in agent.delivered() if caller.task.result().turn == number]
        assert count == 1 or sum(not caller.repeats for caller in sharing) <= 1
    assert len(turns) <= len(session._numbers) <= TURNS
    assert service.in_flight == 0
    assert engine.waiting == 0
