"""Every field of a body that a wire reads is in its `fields`; of others the server says once that it reads them not."""

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import httpx2
import pytest
import structlog

from rollgrad.adapters.chat.template_codec import TemplateCodec
from rollgrad.adapters.servers.anthropic_wire import AnthropicWire
from rollgrad.adapters.servers.completions_wire import CompletionsWire
from rollgrad.adapters.servers.openai_wire import OpenAIWire
from rollgrad.adapters.servers.responses_wire import ResponsesWire
from rollgrad.adapters.servers.unread import MOST, UnreadFields
from rollgrad.adapters.servers.wire import Wire
from tests.fakes.scripted_engine import ScriptedEngine, serving

SAID = {"messages": [{"role": "user", "content": "go"}]}
BODIES: list[tuple[Wire, str, dict[str, Any]]] = [
    (OpenAIWire(), "/v1/chat/completions", SAID),
    (AnthropicWire(), "/v1/messages", {**SAID, "max_tokens": 4}),
    (ResponsesWire(), "/v1/responses", {"input": "go"}),
    (CompletionsWire(), "/v1/completions", {"prompt": "go"}),
]


class Read(dict[str, Any]):
    """A body that keeps which of its fields were asked for."""

    def __init__(self, body: Mapping[str, Any]) -> None:
        super().__init__(body)
        self.asked: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)

    def __getitem__(self, key: str) -> Any:
        self.asked.add(key)
        return super().__getitem__(key)


@pytest.mark.parametrize(("wire", "path", "body"), BODIES)
def test_a_wire_knows_the_fields_that_it_reads(wire: Wire, path: str, body: dict[str, Any]) -> None:
    read = Read(body)
    wire.decode(read)
    assert set(body) < read.asked <= wire.fields


async def post(codec: TemplateCodec, eos: int, path: str, body: Mapping[str, Any]) -> list[tuple[int, list[str]]]:
    """Returns the status, and what was logged, of a request that is made twice."""
    answers = []
    async with (
        serving(ScriptedEngine(codec, eos, ["one", "two"]), codec, stateless=True) as served,
        httpx2.AsyncClient(base_url=served.url) as http,
    ):
        for _ in range(2):
            with structlog.testing.capture_logs() as said:
                answer = await http.post(path, json=body)
            answers.append((answer.status_code, [line["event"] for line in said]))
    return answers


@pytest.mark.parametrize(("wire", "path", "body"), BODIES)
async def test_a_field_that_changes_nothing_is_said_once(
    tiny_tokenizer: Any, wire: Wire, path: str, body: dict[str, Any]
) -> None:
    asked = {**body, "user": "me", "metadata": {}, "verbosity": "low", "other": None}
    said = "a client sets 'verbosity', which this server does not read: its replies are as without it"
    codec = TemplateCodec(tiny_tokenizer)
    assert await post(codec, tiny_tokenizer.eos_token_id, path, asked) == [(200, [said]), (200, [])]


PARAMETERS = {"type": "object", "properties": {}}
STRICT: list[tuple[str, dict[str, Any], Any]] = [
    (
        "/v1/chat/completions",
        {**SAID, "tools": [{"type": "function", "function": {"name": "a", "parameters": PARAMETERS, "strict": True}}]},
        "required",
    ),
    (
        "/v1/messages",
        {**SAID, "max_tokens": 4, "tools": [{"name": "a", "input_schema": PARAMETERS, "strict": True}]},
        {"type": "any"},
    ),
    (
        "/v1/responses",
        {"input": "go", "tools": [{"type": "function", "name": "a", "parameters": PARAMETERS, "strict": True}]},
        "required",
    ),
]


@pytest.mark.parametrize(("path", "body", "required"), STRICT)
async def test_a_strict_tool_is_said_unless_its_call_is_prescribed(
    tiny_tokenizer: Any, path: str, body: dict[str, Any], required: Any
) -> None:
    codec, eos = TemplateCodec(tiny_tokenizer), tiny_tokenizer.eos_token_id
    said = "a client sets 'strict', which this server does not read: its replies are as without it"
    assert await post(codec, eos, path, body) == [(200, [said]), (200, [])]
    assert await post(codec, eos, path, {**body, "tool_choice": required}) == [(200, [])] * 2


async def test_an_agent_that_asks_for_another_model_is_told_of_once(tiny_tokenizer: Any) -> None:
    codec = TemplateCodec(tiny_tokenizer)
    async with (
        serving(ScriptedEngine(codec, tiny_tokenizer.eos_token_id, lambda prompt: "one"), codec) as served,
        httpx2.AsyncClient(base_url=served.root) as http,
    ):
        with structlog.testing.capture_logs() as said:
            for model in ("judge", "policy", None, "judge"):
                answer = await http.post("/v1/chat/completions", json={**SAID, "model": model})
                assert answer.status_code == 200
    (line,) = said
    assert line["event"].startswith("a client asks for the model 'judge', but the policy answers, and learns from")


EFFORTS = [
    ("/v1/chat/completions", {**SAID, "reasoning_effort": "high"}),
    ("/v1/responses", {"input": "go", "reasoning": {"effort": "high"}}),
    ("/v1/messages", {**SAID, "max_tokens": 4, "output_config": {"effort": "high"}}),
]


@pytest.mark.parametrize(("path", "body"), EFFORTS)
async def test_an_effort_is_the_servers_own_where_the_template_reads_it(
    tiny_tokenizer: Any, path: str, body: dict[str, Any]
) -> None:
    tokenizer, eos = deepcopy(tiny_tokenizer), tiny_tokenizer.eos_token_id
    (status, said), again = await post(TemplateCodec(tokenizer), eos, path, body)
    assert (status, len(said), again) == (200, 1, (200, []))
    assert "'reasoning_effort', which this server does not read" in said[0]
    tokenizer.chat_template += "{{ reasoning_effort }}"
    for own, expected in ({}, 400), ({"reasoning_effort": "low"}, 400), ({"reasoning_effort": "high"}, 200):
        assert await post(TemplateCodec(tokenizer, own), eos, path, body) == [(expected, [])] * 2


def test_a_client_cannot_fill_the_log() -> None:
    unread = UnreadFields()
    with structlog.testing.capture_logs() as said:
        unread.note(f"field {number}" for number in range(10 * MOST))
    assert len(said) == MOST
