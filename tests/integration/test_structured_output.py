"""Replies of a prescribed form on the embedded engine: what it samples, and the log-probs that it tells."""

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx2
import pytest
import torch
from jsonschema import validate

from rollgrad.adapters.chat.template_codec import TemplateCodec
from rollgrad.adapters.engines.embedded.engine import EmbeddedEngine
from rollgrad.adapters.engines.embedded.grammars import Grammars
from rollgrad.adapters.models.torch.forward import PackedLM
from rollgrad.adapters.models.torch.heads.allowed_tokens import follow_grammars
from rollgrad.adapters.models.torch.loading.loading import load_causal_lm, load_tokenizer
from rollgrad.adapters.servers.agent_server import AgentServer
from rollgrad.adapters.servers.server import Server
from rollgrad.application.episodes.chat_request import ChatRequest, SessionLimits
from rollgrad.application.episodes.chat_service import ChatService
from rollgrad.application.episodes.reply import sample_tokens
from rollgrad.application.episodes.turns import Prepared
from rollgrad.domain.batches.packed import pack
from rollgrad.domain.episodes.generation import Generation, GenerationRequest, SamplingParams, StopReason
from rollgrad.domain.episodes.messages import ReplyForm
from rollgrad.domain.episodes.prompts import Prompt
from rollgrad.domain.episodes.trajectory import Trajectory, TrajectoryBuilder
from rollgrad.domain.errors import ConfigurationError, DataError, EngineError
from rollgrad.domain.ports.rollout_engine import RolloutEngine

SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "n": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["ok", "n"],
    "additionalProperties": False,
}
TOLERANCE = 1e-5


class Sampler:
    """A tiny model with its codec and a new engine."""

    def __init__(self, path: Path) -> None:
        self.tokenizer = load_tokenizer(str(path), flag="model")
        self.model = load_causal_lm(str(path), dtype=torch.float32, device=torch.device("cpu"), flag="model")
        self.codec = TemplateCodec(self.tokenizer)
        self.grammars = Grammars(self.tokenizer, [self.tokenizer.eos_token_id])
        self.engine = EmbeddedEngine(
            self.model, eos_token_ids=[self.tokenizer.eos_token_id], decode=self.codec.decode, grammars=self.grammars
        )
        prompt = self.codec.render([{"role": "user", "content": "go"}])
        self.prompt = prompt.token_ids
        self.grammar = self.codec.grammar(ReplyForm(schema=SCHEMA), prompt.text)

    def ask(self, seed: int, *, grammar: bool = True, begun: tuple[int, ...] = (), **params: Any) -> GenerationRequest:
        text = self.grammar if grammar else None
        settings = {"max_new_tokens": 60 - len(begun), "seed": seed, "grammar": text, **params}
        tokens = (*self.prompt, *begun)
        return GenerationRequest(prompt_token_ids=tokens, params=SamplingParams(**settings), begun=len(begun))


@pytest.fixture
def sampler(tiny_model_dir: Path) -> Sampler:
    return Sampler(tiny_model_dir)


@pytest.mark.parametrize("limits", [{}, {"temperature": 0.6}, {"temperature": 1.4, "top_k": 3}])
async def test_log_probs_are_of_the_distribution_of_allowed_tokens(
    sampler: Sampler, tiny_model_dir: Path, limits: dict[str, Any]
) -> None:
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float32).eval()
    for seed in range(3):
        reply = await sampler.engine.generate(sampler.ask(seed, top_logprobs=2, **limits))
        assert reply.stop_reason is StopReason.STOP
        validate(json.loads(sampler.codec.decode(reply.token_ids)), SCHEMA)
        with torch.no_grad():
            logits = plain(input_ids=torch.tensor([[*sampler.prompt, *reply.token_ids]])).logits[0]
        matcher = sampler.grammars.begin(sampler.grammar)
        for place, (token, told, likeliest) in enumerate(
            zip(reply.token_ids, reply.logprobs, reply.top_logprobs, strict=True)
        ):
            row = logits[len(sampler.prompt) + place - 1] / limits.get("temperature", 1.0)
            matcher.restrict(row)
            if "top_k" in limits:
                row[row < row.topk(limits["top_k"]).values[-1]] = float("-inf")
            expected = row.log_softmax(-1)
            assert told == pytest.approx(float(expected[token]), abs=TOLERANCE)
            best = expected.topk(2).values
            assert [logprob for _, logprob in likeliest] == pytest.approx(
                best[best > float("-inf")].tolist(), abs=TOLERANCE
            )
            assert all(logprob == pytest.approx(float(expected[one]), abs=TOLERANCE) for one, logprob in likeliest)
            matcher.advance(token)


async def play_one(engine: RolloutEngine, sample_id: int, request: GenerationRequest) -> tuple[Generation, Trajectory]:
    """A rollout of one reply."""
    generation = await sample_tokens(engine, Prepared(token_ids=request.prompt_token_ids), request.params)
    builder = TrajectoryBuilder(request.prompt_token_ids, group_id=0, sample_id=sample_id)
    builder.add_action(generation)
    return generation, builder.build(stop_reason=generation.stop_reason)


async def test_the_loss_is_of_the_distribution_that_was_sampled(sampler: Sampler, tiny_model_dir: Path) -> None:
    """Values and gradients, against a plain model in float64; other replies share the pass, and the prompt."""
    from transformers import AutoModelForCausalLM

    temperature = 0.7
    asked = [sampler.ask(seed, grammar=seed != 1, temperature=temperature, max_new_tokens=20) for seed in range(4)]
    played = [(await play_one(sampler.engine, seed, request))[1] for seed, request in enumerate(asked)]
    batch = pack(played)
    whole = PackedLM(sampler.model, temperature=temperature)
    with pytest.raises(ConfigurationError, match="sampled in a prescribed form"):
        whole(batch)
    follow_grammars(sampler.model, sampler.grammars.masks)
    count = int(batch.action_mask_N.sum())
    pull = torch.randn(2, count, generator=torch.Generator().manual_seed(0))
    scored = torch.stack(whole(batch)[:2])
    torch.testing.assert_close(scored[0], batch.rollout_logprobs_N[batch.action_mask_N], rtol=0, atol=TOLERANCE)
    names = [name for name, _ in sampler.model.named_parameters()]
    gradients = torch.autograd.grad((pull * scored).sum(), [*sampler.model.parameters()])

    plain = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.float64).eval()
    columns = []
    for rollout in played:
        logits_TV = plain(input_ids=rollout.token_ids_T[None]).logits[0] / temperature
        forbidden_TV = torch.zeros_like(logits_TV, dtype=torch.bool)
        for segment in rollout.prescribed:
            matcher = sampler.grammars.begin(str(segment.grammar))
            for place in range(segment.start, segment.stop):
                matcher.restrict(row := torch.zeros(logits_TV.shape[1]))
                forbidden_TV[place - 1] = row.isinf()
                matcher.advance(int(rollout.token_ids_T[place]))
        table_TV = logits_TV.masked_fill(forbidden_TV, float("-inf")).log_softmax(-1)
        (action,) = rollout.segments[1:]
        own = range(action.start - 1, action.stop - 1)
        logprobs_A = table_TV[own].gather(1, rollout.token_ids_T[action.start : action.stop, None])[:, 0]
        entropy_A = -(table_TV.exp() * table_TV.masked_fill(forbidden_TV, 0)).sum(-1)[own]
        columns.append(torch.stack([logprobs_A, entropy_A]))
    expected = torch.cat(columns, dim=1)
    torch.testing.assert_close(scored, expected.float(), rtol=0, atol=TOLERANCE)
    theirs = dict(plain.named_parameters())
    oracle = torch.autograd.grad((pull.double() * expected).sum(), [theirs[name] for name in names])
    for name, mine, wanted in zip(names, gradients, oracle, strict=True):
        scale = float(wanted.abs().max())
        torch.testing.assert_close(mine, wanted.float(), rtol=0, atol=TOLERANCE * max(1.0, scale), msg=name)

    alone = torch.cat([torch.stack(whole(batch.select([index]))[:2]) for index in range(4)], dim=1)
    torch.testing.assert_close(alone, scored, rtol=0, atol=TOLERANCE)


def test_tokens_that_leave_their_grammar_have_no_log_prob(sampler: Sampler) -> None:
    follow_grammars(sampler.model, sampler.grammars.masks)
    builder = TrajectoryBuilder(sampler.prompt, group_id=0, sample_id=0)
    builder.add_action(
        Generation(token_ids=[5], logprobs=[-1.0], versions=[0], stop_reason=StopReason.LENGTH, grammar=sampler.grammar)
    )
    with pytest.raises(DataError, match="cannot be followed"):
        PackedLM(sampler.model)(pack([builder.build(stop_reason=StopReason.LENGTH)]))


async def test_every_wire_samples_the_same_tokens(sampler: Sampler) -> None:
    params = SamplingParams(max_new_tokens=60, seed=11)
    expected = (await sampler.engine.generate(sampler.ask(11))).token_ids
    service = ChatService(sampler.engine, sampler.codec)

    async def answer(request: Any, on_piece: Any) -> Any:
        return await service.reply(request, params, on_piece=on_piece)

    server = Server(AgentServer(service, sampler.codec, model="m", answer=answer).app(), name="agent server")
    async with httpx2.AsyncClient(base_url=await server.start(), timeout=120) as http:
        asked = {"messages": [{"role": "user", "content": "go"}], "return_token_ids": True}
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
        chat = (await http.post("/v1/chat/completions", json={**asked, "response_format": form})).json()
        text = {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}
        items = {"input": "go", "return_token_ids": True, "text": text}
        responses = (await http.post("/v1/responses", json=items)).json()
        config = {"format": {"type": "json_schema", "schema": SCHEMA}}
        message = (await http.post("/v1/messages", json={**asked, "output_config": config})).json()
        stream = (await http.post("/v1/chat/completions", json={**asked, "response_format": form, "stream": True})).text
    await server.stop()
    assert chat["choices"][0]["token_ids"] == responses["token_ids"] == list(expected)
    content = chat["choices"][0]["message"]["content"]
    assert content == message["content"][0]["text"] == responses["output"][0]["content"][0]["text"]
    assert f'"token_ids": {list(expected)}' in stream


async def test_a_rollout_samples_what_is_served_and_keeps_the_grammar(sampler: Sampler) -> None:
    expected = await sampler.engine.generate(sampler.ask(11))
    service = ChatService(sampler.engine, sampler.codec, unprescribed=None)
    prompt = Prompt(token_ids=(), text="", messages=({"role": "user", "content": "go"},))
    session = service.open(SamplingParams(max_new_tokens=60, seed=11), SessionLimits(max_turns=2))
    asked = ChatRequest(messages=prompt.messages, form=ReplyForm(schema=SCHEMA))
    reply = await session.reply(asked)
    assert list(reply.generation.token_ids) == list(expected.token_ids)
    await session.seal()
    (kept,) = session.ledger.trajectories(group_id=0, sample_id=0, stop_reason=StopReason.ENVIRONMENT)
    assert [segment.grammar for segment in kept.prescribed] == [sampler.grammar]
    assert kept.token_ids_T.tolist() == [*sampler.prompt, *expected.token_ids]


async def test_neighbours_change_nothing(sampler: Sampler) -> None:
    asked = [sampler.ask(seed, grammar=seed % 2 == 0) for seed in range(6)]
    together = await asyncio.gather(*map(sampler.engine.generate, asked))
    alone = [await sampler.engine.generate(each) for each in asked]
    assert [list(g.token_ids) for g in together] == [list(g.token_ids) for g in alone]
    for reply in together[::2]:
        validate(json.loads(sampler.codec.decode(reply.token_ids)), SCHEMA)


async def test_a_reply_that_is_continued_stays_in_its_form(sampler: Sampler) -> None:
    whole = await sampler.engine.generate(sampler.ask(4))
    begun = tuple(whole.token_ids[:5])
    rest = await sampler.engine.generate(sampler.ask(4, begun=begun))
    assert [*begun, *rest.token_ids] == list(whole.token_ids)


async def test_what_cannot_be_followed_fails_alone(sampler: Sampler) -> None:
    other = asyncio.create_task(sampler.engine.generate(sampler.ask(0, grammar=False)))
    await asyncio.sleep(0)
    with pytest.raises(DataError, match="cannot be followed"):
        await sampler.engine.generate(sampler.ask(0, begun=(5, 6)))
    endless = '%llguidance {}\nstart: more\nmore: more "a"\n'
    with pytest.raises(DataError, match=r"cannot be followed: \w+$"):
        await sampler.engine.generate(GenerationRequest(prompt_token_ids=(5,), params=SamplingParams(grammar=endless)))
    for prompt, stops in (((5, 100_000), ()), ((5,), (100_000,))):
        params = SamplingParams(max_new_tokens=2, min_new_tokens=1, stop_token_ids=stops)
        with pytest.raises(DataError, match="token id 100000"):
            await sampler.engine.generate(GenerationRequest(prompt_token_ids=prompt, params=params))
    assert (await other).token_ids
    without = EmbeddedEngine(sampler.model, eos_token_ids=[])
    with pytest.raises(EngineError, match="Grammars need a tokenizer"):
        await without.generate(sampler.ask(0))
