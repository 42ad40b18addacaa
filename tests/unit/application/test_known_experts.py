"""An engine says the experts of each token of an episode once, whatever branches the episode has."""

import random

import pytest
import torch
from attrs import evolve

from rollgrad.application.engines.resuming import ContinuingEngine
from rollgrad.application.episodes.ledger import TokenLedger
from rollgrad.application.episodes.reply import sample_tokens
from rollgrad.application.episodes.turns import Prepared
from rollgrad.domain.episodes.generation import Generation, GenerationRequest, SamplingParams, StopReason
from rollgrad.domain.episodes.messages import Message
from rollgrad.domain.episodes.routed import RoutedTokens, experts_of, recorded, unrecorded
from rollgrad.testing.chat_codec import FakeChatCodec
from rollgrad.testing.rollout_engine import FakeRolloutEngine

PARAMS = SamplingParams(max_new_tokens=4)


class SayingEngine(FakeRolloutEngine):
    """Says of each token but the last, from the first that the request does not know, an expert that its id chooses;
    ends replies early, as a pause does, so many times."""

    def __init__(self, aborts: int = 0) -> None:
        super().__init__()
        self.aborts = aborts
        self.said = 0

    async def generate(self, request: GenerationRequest, *, on_token: object = None) -> Generation:
        reply = await super().generate(request)
        if self.aborts:
            self.aborts -= 1
            cut = {name: getattr(reply, name)[:2] for name in ("token_ids", "logprobs", "versions")}
            reply = evolve(reply, stop_reason=StopReason.ABORTED, **cut)
        tokens = (*request.prompt_token_ids, *reply.token_ids)[request.known_experts : -1]
        self.said += len(tokens)
        experts_RLK = torch.tensor(tokens, dtype=torch.int64).remainder(7).to(torch.uint8)[:, None, None]
        return evolve(reply, routed=(RoutedTokens(start=request.known_experts, experts_RLK=experts_RLK),))


@pytest.mark.parametrize("forgetful", [False, True], ids=["kept", "rewritten"])
@pytest.mark.parametrize("seed", range(6))
async def test_each_token_has_its_experts_and_none_is_said_twice(seed: int, forgetful: bool) -> None:
    rng = random.Random(seed)
    codec, engine = FakeChatCodec(forgetful=forgetful), SayingEngine()
    ledger = TokenLedger(codec)
    conversations: list[list[Message]] = [[{"role": "user", "content": "3+4?"}]]
    new = 0
    for turn in range(5):
        messages = rng.choice(conversations) if rng.random() < 0.3 else conversations[-1]
        prepared = ledger.prepare(messages)
        reply = await sample_tokens(engine, prepared, evolve(PARAMS, seed=turn))
        message: Message = {"role": "assistant", "content": f"{turn}", "reasoning_content": rng.choice(["", "hm"])}
        ledger.commit(prepared, reply, message)
        # The last token of a reply gets its experts when another request reads it.
        begun = prepared.parent is not None
        new += len(prepared.token_ids) + 4 - 1 - (prepared.known_experts if begun else 0)
        assert begun == (prepared.known_experts > 0)
        conversations.append([*messages, message, {"role": "user", "content": "And?"}])
    assert engine.said == new
    for trajectory in ledger.trajectories(group_id=0, sample_id=0, stop_reason=StopReason.STOP):
        assert trajectory.experts_TLK is not None
        experts_T = trajectory.experts_TLK.flatten()
        assert torch.equal(experts_T[:-1].long(), trajectory.token_ids_T[:-1].remainder(7))
        assert experts_T[-1] == unrecorded(experts_T)


async def test_a_request_that_goes_on_after_an_abort_asks_for_the_rest() -> None:
    inner = SayingEngine(aborts=2)
    request = GenerationRequest(prompt_token_ids=(1, 2, 3, 4), params=evolve(PARAMS, max_new_tokens=9), known_experts=2)
    reply = await ContinuingEngine(inner).generate(request)
    assert [asked.known_experts for asked in inner.requests] == [2, 5, 7]
    assert inner.said == 4 + 9 - 1 - 2
    assert recorded(reply.routed, 2) == 12
    experts = experts_of(reply.routed, 13)
    assert experts is not None
    assert experts.flatten()[2:-1].tolist() == [token % 7 for token in (3, 4, *reply.token_ids[:-1])]


async def test_of_a_gap_nothing_is_known() -> None:
    part = (await SayingEngine().generate(GenerationRequest(prompt_token_ids=(1, 2), params=PARAMS))).routed
    assert recorded(part) == 5
    assert recorded([evolve(part[0], start=1)]) == 0
    assert recorded([evolve(part[0], start=1)], 1) == 6
    assert recorded(part, 9) == 9
    assert Prepared(token_ids=(1,)).known_experts == 0
