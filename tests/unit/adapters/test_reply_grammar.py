"""Grammars of replies: whatever a model samples under one is a reply of the form, which the parser reads."""

import json
from typing import Any, Literal

import pytest
import torch
from jsonschema import validate
from pydantic import BaseModel, Field
from tokenizers import AddedToken

from rollgrad.adapters.chat.template_codec import TemplateCodec
from rollgrad.adapters.engines.embedded.grammars import Grammars
from rollgrad.application.episodes.reply import sample_reply
from rollgrad.application.episodes.turns import Prepared
from rollgrad.domain.episodes.generation import SamplingParams
from rollgrad.domain.episodes.messages import ReplyForm
from rollgrad.domain.errors import DataError
from tests.fakes.chat_templates import tokenizer_with
from tests.fakes.scripted_engine import ScriptedEngine

PARAMETERS = {
    "type": "object",
    "properties": {"unit": {"enum": ["C", "F"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["unit", "days"],
    "additionalProperties": False,
}
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "grade": {"enum": ["good", "bad 漢"]}},
    "required": ["ok", "grade"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "", "parameters": PARAMETERS}}
    for name in ("weather", "forecast")
]
MESSAGES = [{"role": "user", "content": "go"}]
TEMPLATES = ("smollm2", "qwen2_5", "qwen3", "qwen3_instruct_2507", "llama3_1", "deepseekv3", "gemma3")
DRAWS = 4
MOST_TOKENS = 400


def sampled(tokenizer: Any, grammar: str, seed: int) -> list[int]:
    """A reply of a model that knows nothing: any token that may come next is as likely as any other."""
    matcher = Grammars(tokenizer, [tokenizer.eos_token_id]).begin(grammar)
    generator = torch.Generator().manual_seed(seed)
    tokens: list[int] = []
    while not tokens or tokens[-1] != tokenizer.eos_token_id:
        assert len(tokens) < MOST_TOKENS
        logits = torch.zeros(len(tokenizer) + 3)
        matcher.restrict(logits)
        assert torch.isinf(logits[len(tokenizer) :]).all(), "no row of the head without a token is sampled"
        tokens.append(int(torch.multinomial(logits.exp(), 1, generator=generator)))
        matcher.advance(tokens[-1])
    return tokens


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize(
    "form",
    [
        ReplyForm(schema=SCHEMA),
        ReplyForm(calls=("weather", "forecast")),
        ReplyForm(calls=("forecast",)),
        ReplyForm(schema=SCHEMA, calls=("weather", "forecast")),
    ],
    ids=["text", "any", "named", "either"],
)
def test_what_is_sampled_has_the_form(tiny_tokenizer: Any, template: str, form: ReplyForm) -> None:
    tokenizer = tokenizer_with(template, tiny_tokenizer)
    codec = TemplateCodec(tokenizer)
    tools = TOOLS if form.calls else []
    prompt = codec.render(MESSAGES, tools).text
    grammar = codec.grammar(form, prompt, tools).replace(r"/(.|\n)*/", r"/[a-z]{0,9}/")  # thinks briefly
    for seed in range(DRAWS):
        tokens = sampled(tokenizer, grammar, seed)
        parsed = codec.parse(codec.decode(tokens, special_tokens=True), prompt, tools, form)
        assert parsed.error is None
        if parsed.tool_calls:
            (call,) = parsed.tool_calls
            assert call.error is None
            assert call.name in form.calls
            validate(call.arguments, PARAMETERS)
            assert not parsed.message["content"]
        else:
            assert form.schema is not None
            validate(json.loads(str(parsed.message["content"])), SCHEMA)


@pytest.mark.parametrize("special", [False, True])
def test_thinking_comes_first_where_the_prompt_has_opened_it(tiny_tokenizer: Any, special: bool) -> None:
    tokenizer = tokenizer_with("qwen3_5_think", tiny_tokenizer)
    if special:
        tokenizer.add_tokens([AddedToken("</think>", special=True)], special_tokens=True)
    codec = TemplateCodec(tokenizer)
    prompt = codec.render(MESSAGES).text
    assert prompt.rstrip().endswith("<think>")
    form = ReplyForm(schema=SCHEMA)
    matcher = Grammars(tokenizer, [tokenizer.eos_token_id]).begin(codec.grammar(form, prompt))
    text = 'Is {"ok": 1} it?</think>\n\n{"ok": true, "grade": "good"}'
    for token in (*codec.encode(text), tokenizer.eos_token_id):
        logits = torch.zeros(len(tokenizer))
        matcher.restrict(logits)
        assert logits[token] == 0, tokenizer.decode([token])
        matcher.advance(token)
    message = codec.parse(text, prompt, (), form).message
    assert message["reasoning_content"] == 'Is {"ok": 1} it?'
    assert json.loads(message["content"]) == {"ok": True, "grade": "good"}


class Part(BaseModel):
    name: Literal["a#b", "http://c"]


class Whole(BaseModel):
    """Has parts, http://x # of a kind."""

    parts: list[Part] = Field(max_length=2)
    other: Part | None


def test_schemas_of_nested_models(tiny_tokenizer: Any) -> None:
    codec = TemplateCodec(tiny_tokenizer)
    grammar = codec.grammar(ReplyForm(schema=Whole.model_json_schema()), "")
    closed = grammar.replace('"type": "object"', '"type": "object", "additionalProperties": false')
    for seed in range(DRAWS):
        Whole.model_validate_json(codec.decode(sampled(tiny_tokenizer, closed, seed)))
    tool = {"type": "function", "function": {"name": "f", "parameters": Whole.model_json_schema()}}
    assert codec.grammar(ReplyForm(calls=("f",)), "", [tool])


def test_several_calls(tiny_tokenizer: Any) -> None:
    codec = TemplateCodec(tiny_tokenizer)
    call = '<tool_call>\n{"name": "weather", "arguments": {"unit": "C", "days": 3}}\n</tool_call>'
    grammars = Grammars(tiny_tokenizer, [tiny_tokenizer.eos_token_id])
    tokens = [*codec.encode(f"{call}\n{call}"), tiny_tokenizer.eos_token_id]
    assert grammars.begin(codec.grammar(ReplyForm(calls=("weather",), several=True), "", TOOLS), tokens)
    with pytest.raises(DataError, match="cannot be followed"):
        grammars.begin(codec.grammar(ReplyForm(calls=("weather",)), "", TOOLS), tokens)
    assert len(codec.parse(f"{call}\n{call}", "", TOOLS).tool_calls) == 2


@pytest.mark.parametrize(
    ("template", "form", "told"),
    [
        ("smollm2", ReplyForm(schema={"type": "nope"}), "Invalid type: nope"),
        ("smollm2", ReplyForm(schema={"not": {}}), "Unimplemented keys"),
        ("smollm2", ReplyForm(schema={"$ref": "#"}), "no text has it"),
        ("smollm2", ReplyForm(schema=False), "no JSON schema that a text can follow"),
        ("smollm2", ReplyForm(schema={"const": "a<|im_end|>"}), "spells out the control token <|im_end|>"),
        (
            "smollm2",
            ReplyForm(schema={"items": {"minItems": 9}, "maxItems": 10**7}),
            "maxItems of its schemas are 1e.07",
        ),
        ("smollm2", ReplyForm(schema={"minItems": float("inf")}), "are inf together, but they may be 16384"),
        ("glm4moe", ReplyForm(calls=("weather",)), "A call of a tool cannot be prescribed to this model, only to"),
        ("gptoss", ReplyForm(schema=SCHEMA), "channels"),
    ],
)
def test_what_cannot_be_prescribed_is_told(tiny_tokenizer: Any, template: str, form: ReplyForm, told: str) -> None:
    codec = TemplateCodec(tokenizer_with(template, tiny_tokenizer))
    with pytest.raises(DataError, match=told):
        codec.grammar(form, "", TOOLS)


def test_lists_of_thousands_can_be_prescribed(tiny_tokenizer: Any) -> None:
    schema = {"type": "array", "items": {"type": "integer"}, "minItems": 4000, "maxItems": 8000}
    grammar = TemplateCodec(tiny_tokenizer).grammar(ReplyForm(schema=schema), "")
    assert Grammars(tiny_tokenizer, [tiny_tokenizer.eos_token_id]).begin(grammar)


def test_bounds_of_the_items_of_a_call_count_too(tiny_tokenizer: Any) -> None:
    parameters = {"type": "object", "properties": {"days": {"type": "array", "maxItems": 10**7}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    codec = TemplateCodec(tokenizer_with("qwen3", tiny_tokenizer))
    assert codec.grammar(ReplyForm(schema=SCHEMA), "", tools)
    with pytest.raises(DataError, match="minItems and maxItems"):
        codec.grammar(ReplyForm(calls=("f",)), "", tools)


def test_a_text_that_looks_like_a_token_of_the_grammar(tiny_tokenizer: Any) -> None:
    codec = TemplateCodec(tiny_tokenizer)
    grammar = codec.grammar(ReplyForm(schema={"enum": ["<[5]>"]}), "")
    assert tiny_tokenizer.decode(sampled(tiny_tokenizer, grammar, 0)[:-1]) == '"<[5]>"'


async def test_the_stream_of_a_prescribed_text_has_the_marks_in_it(tiny_tokenizer: Any) -> None:
    codec = TemplateCodec(tokenizer_with("smollm2", tiny_tokenizer))
    text = '{"a": "<tool_call>x", "b": 1}'
    pieces: list[str] = []
    engine = ScriptedEngine(codec, tiny_tokenizer.eos_token_id, [text])
    prepared = Prepared(token_ids=codec.render(MESSAGES).token_ids)
    reply = await sample_reply(
        engine,
        codec,
        prepared,
        SamplingParams(),
        form=ReplyForm(schema={"type": "object"}),
        on_piece=lambda field, piece: pieces.append(piece),
    )
    assert "".join(pieces) == reply.parsed.message["content"] == text
