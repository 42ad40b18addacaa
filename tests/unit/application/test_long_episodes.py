"""An episode of many turns is recorded without keeping its beginning with each turn."""

import sys

import pytest
from attrs import evolve

from rollgrad.application.episodes.ledger import TokenLedger
from rollgrad.domain.episodes.generation import Generation, StopReason
from rollgrad.domain.episodes.messages import Message
from rollgrad.domain.errors import TrajectoryError
from rollgrad.testing.chat_codec import FakeChatCodec

TURNS = 40


def talk(turns: int) -> TokenLedger:
    codec = FakeChatCodec()
    ledger = TokenLedger(codec)
    messages: list[Message] = [{"role": "user", "content": "3+4?"}]
    for turn in range(turns):
        text = f"It is {turn}."
        ids = [*codec.encode(text), *codec.encode(codec.end_of_turn)]
        reply = Generation(
            token_ids=ids, logprobs=[-1.0] * len(ids), versions=[0] * len(ids), stop_reason=StopReason.STOP
        )
        message: Message = {"role": "assistant", "content": text}
        assert ledger.commit(ledger.prepare(messages), reply, message) == turn
        messages += [message, {"role": "user", "content": "Is it?"}]
    return ledger


def test_each_token_is_kept_once() -> None:
    ledger = talk(TURNS)
    kept = [token for turn in ledger._turns for token in turn.own]
    assert kept == list(ledger.token_ids(TURNS - 1))
    (trajectory,) = ledger.trajectories(group_id=0, sample_id=0, stop_reason=StopReason.ENVIRONMENT)
    assert trajectory.token_ids_T.tolist() == kept
    digests = sum(sys.getsizeof(turn.conversation) for turn in ledger._turns)
    assert digests < 60 * TURNS


def test_a_prompt_that_does_not_begin_with_what_it_continues_is_refused() -> None:
    ledger = talk(2)
    following = ledger.prepare([*ledger._turns[1].messages, {"role": "user", "content": "Sure?"}])
    assert following.parent == 1
    changed = evolve(following, token_ids=(following.token_ids[0] + 1, *following.token_ids[1:]))
    turn = ledger._turns[1]
    for prompt in (changed, evolve(following, token_ids=following.token_ids[: turn.length - 1])):
        with pytest.raises(TrajectoryError, match="rewritten"):
            ledger.commit(prompt, turn.generation, turn.messages[-1])
    assert ledger.turns == 2
