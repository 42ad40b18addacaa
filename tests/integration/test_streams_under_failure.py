"""Two hundred streams at a time, with images and tools, while an engine dies and a newer checkpoint is loaded: each
gets the whole reply of one model, and no other's."""

import asyncio
import base64
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx2
import pytest
import torch

from rollgrad.adapters.chat.image_files import image_bytes
from rollgrad.adapters.chat.pictures import ImageRenderer, load_processor
from rollgrad.adapters.chat.template_codec import TemplateCodec
from rollgrad.adapters.engines.embedded.engine import EmbeddedEngine
from rollgrad.adapters.engines.embedded.grammars import Grammars
from rollgrad.adapters.models.torch.loading.loading import load_causal_lm, load_tokenizer
from rollgrad.adapters.servers.agent_server import AgentServer
from rollgrad.adapters.servers.openai_wire import OpenAIWire
from rollgrad.adapters.servers.operation import Operation
from rollgrad.adapters.servers.server import Server
from rollgrad.application.engines.fleet import EngineFleet
from rollgrad.application.engines.fleet_member import Taker
from rollgrad.application.episodes.assistant import Assistant
from rollgrad.domain.control.engine_health import FleetBounds
from rollgrad.domain.episodes.generation import SamplingParams
from rollgrad.domain.ports.rollout_engine import RolloutEngine
from rollgrad.entrypoints.composition.serving.reload import ModelReload
from tests.fakes.fleet_member import FakeFleetMember
from tests.tiny_vision import picture, save_tiny_vlm

STREAMS = 200
LATE = 40
"""Streams that begin while the newer checkpoint is loaded."""
TOLD_BEFORE_DEATH = 150
"""Tokens that the engine which dies has told before."""
PICTURES = [picture((200, 0, 0)), picture((0, 200, 0), width=56, height=24), picture((0, 0, 200))]
PATIENT = FleetBounds(suspect_after=1000.0, dead_after=1000.0)
TOOL = {
    "type": "function",
    "function": {
        "name": "ring",
        "parameters": {
            "type": "object",
            "properties": {"tune": {"type": "string", "pattern": "^[a-z]{4}$"}},
            "required": ["tune"],
            "additionalProperties": False,
        },
    },
}
Reply = tuple[str, list[tuple[str, str]], list[int]]
"""Text, calls (name and arguments) and tokens of a reply."""


def body(number: int) -> dict[str, Any]:
    """One request, of which every eighth requires a call, and every third has one of three images."""
    text: Any = f"go {number % 10}"
    if number % 3 == 0:
        uri = f"data:image/png;base64,{base64.b64encode(PICTURES[number // 3 % 3]).decode()}"
        text = [{"type": "image_url", "image_url": {"url": uri}}, {"type": "text", "text": text}]
    return {
        "messages": [{"role": "user", "content": text}],
        "tools": [TOOL],
        "tool_choice": "required" if number % 8 == 0 else "auto",
        "parallel_tool_calls": False,
        "seed": number,
        "max_tokens": 100 if number % 8 == 0 else 12,
        "stream": True,
        "return_token_ids": True,
    }


class Models:
    """Engines over copies of one checkpoint, and the newer weights that a reload brings."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.tokenizer = load_tokenizer(str(path), flag="model")
        processor = load_processor(str(path), self.tokenizer, flag="model")
        self.codec = TemplateCodec(self.tokenizer, images=ImageRenderer(processor))
        self._ends = [self.tokenizer.eos_token_id]
        self._grammars = Grammars(self.tokenizer, self._ends)

    def load(self, name: str) -> Any:
        model = load_causal_lm(str(self._path), dtype=torch.float32, device=torch.device("cpu"), flag="model")
        if name == "newer":
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
        return model

    def engine(self, name: str = "older") -> EmbeddedEngine:
        return EmbeddedEngine(
            self.load(name), eos_token_ids=self._ends, decode=self.codec.decode, grammars=self._grammars
        )

    def assistant(self, engine: RolloutEngine) -> Assistant:
        async def tools() -> list[Any]:
            return []

        params = SamplingParams()
        return Assistant(engine, self.codec, tools, params=params, max_tokens=engine.max_tokens, read_image=image_bytes)

    async def expected(self, name: str) -> list[Reply]:
        """The answers of one engine that is left in peace."""
        assistant = self.assistant(self.engine(name))

        async def one(number: int) -> Reply:
            told: list[str] = []
            request = OpenAIWire().decode(body(number)).request
            reply = await assistant.answer(request, lambda field, text: told.append(text))
            calls = [call["function"] for call in reply.parsed.message.get("tool_calls") or ()]
            named = [(call["name"], json.dumps(call["arguments"])) for call in calls]
            return "".join(told), named, list(reply.generation.token_ids)

        return list(await asyncio.gather(*map(one, range(STREAMS))))


class Mortal(FakeFleetMember):
    """An engine of a fleet, which dies when it has told so many tokens."""

    dies_after = 10**9

    async def generate(self, request: Any, *, on_token: Any = None) -> Any:
        def hear(token: int) -> None:
            self.dies_after -= 1
            if self.dies_after == 0:
                self.kill()
            on_token(token)

        return await super().generate(request, on_token=hear)


async def stream(http: httpx2.AsyncClient, number: int) -> Reply:
    text, calls, tokens, ends = "", [], [], 0
    async with http.stream("POST", "/v1/chat/completions", json=body(number)) as answer:
        assert answer.status_code == 200
        async for line in answer.aiter_lines():
            if not line.startswith("data: "):
                continue
            if line == "data: [DONE]":
                ends += 1
                continue
            event = json.loads(line.removeprefix("data: "))
            assert "error" not in event, event
            (choice,) = event["choices"]
            text += choice["delta"].get("content") or ""
            calls += [call["function"] for call in choice["delta"].get("tool_calls", ())]
            tokens += choice.get("token_ids", ())
    assert ends == 1
    named = [(call["name"], json.dumps(json.loads(call["arguments"]))) for call in calls]
    return text, named, tokens


@pytest.mark.chaos
@pytest.mark.wide
async def test_each_of_two_hundred_streams_is_whole_and_its_own(tmp_path: Path) -> None:
    await played(Models(Path(save_tiny_vlm("qwen2_5_vl", tmp_path, positions=1024))))


async def played(models: Models) -> None:
    members = [Mortal(models.engine) for _ in range(2)]
    fleet = EngineFleet(members, bounds=PATIENT, ping_seconds=0.01)
    newest: Any = None
    changing = asyncio.Lock()

    async def take(takers: list[Taker], version: int) -> None:
        for taker in takers:
            assert isinstance(taker.member, Mortal)
            await taker.member.engine.load_weights(newest.named_parameters(), version)
        fleet.took(takers, version)

    async def push(model: Any, version: int) -> None:
        nonlocal newest
        async with changing:
            fleet.new_weights(version)
            newest = model
            await take(await fleet.takers(), version)

    async def refresh(taker: Taker) -> None:
        async with changing:
            if newest is not None:
                await take([taker], fleet.health.version)

    fleet.refresh = refresh
    assistant = models.assistant(fleet)
    reload = ModelReload(fleet, push, lambda name: models.load("newer"), model="older", follow=None)
    operation = Operation(assistant.service, reload=reload.reload)
    app = AgentServer(assistant.service, models.codec, model="m", answer=assistant.answer, operation=operation).app()
    server = Server(app, name="agent server")
    older, newer = await models.expected("older"), await models.expected("newer")
    assert sum(before != after for before, after in zip(older, newer, strict=True)) > 0.9 * STREAMS
    limits = httpx2.Limits(max_connections=None)
    async with (
        httpx2.AsyncClient(base_url=await server.start(), timeout=None, limits=limits) as http,
    ):
        members[0].dies_after = TOLD_BEFORE_DEATH
        early = [asyncio.create_task(stream(http, number)) for number in range(STREAMS - LATE)]
        while not (members[0].dead or members[0].restarts):
            await asyncio.sleep(0.001)
        loading = asyncio.create_task(http.post("/reload"))
        late = [asyncio.create_task(stream(http, number)) for number in range(STREAMS - LATE, STREAMS)]
        replies = await asyncio.gather(*early, *late)
        loaded: Mapping[str, Any] = (await loading).json()
        assert loaded == {"model": "older", "version": 1}
        last = await stream(http, 1)
    assert last == newer[1] != older[1]
    assert fleet.replayed > 0
    assert fleet.health.deaths.total() == 1
    wrong = [number for number, reply in enumerate(replies) if reply not in (older[number], newer[number])]
    assert not wrong, [(replies[number], older[number], newer[number]) for number in wrong[:2]]
    assert sum(bool(calls) for _, calls, _ in replies) >= STREAMS // 8
    await server.stop()
    await fleet.aclose()
