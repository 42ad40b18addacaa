"""ReplyParser: the formats of model families, and what models do wrong in them."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from attrs import frozen
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollgrad.adapters.chat.reply_formats import FORMATS, HERMES
from rollgrad.adapters.chat.reply_parser import MAX_DEPTH, ReplyParser
from rollgrad.adapters.chat.special_text import SpecialTokens
from rollgrad.adapters.chat.template_codec import TemplateCodec
from rollgrad.domain.episodes.messages import ParsedReply
from tests.fakes.chat_templates import TEMPLATES, tokenizer_with

SPECIAL = ("<|im_end|>", "<|eot_id|>", "<|call|>", "<|return|>", "<|end|>", "</s>", "<｜end▁of▁sentence｜>")
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "",
            "parameters": {
                "type": "object",
                "properties": {
                    "a": {"type": "integer"},
                    "s": {"type": "string"},
                    "list": {"type": "array"},
                    "yes": {"type": "boolean"},
                },
            },
        },
    }
    for name in ("f", "g")
]


@frozen
class Style:
    """How a family writes a call, what ends its reply, and what stands around text, thinking and several calls."""

    mark: str
    call: Callable[[str, str], str]
    end: str = "<|im_end|>"
    think: Callable[[str], str] | None = lambda text: f"<think>\n{text}\n</think>\n\n"
    say: Callable[[str], str] | None = lambda text: text
    join: str = "\n"


def qwen_xml(name: str, arguments: str) -> str:
    values = json.loads(arguments)
    written = "".join(f"<parameter={k}>\n{as_text(v)}\n</parameter>\n" for k, v in values.items())
    return f"<tool_call>\n<function={name}>\n{written}</function>\n</tool_call>"


def glm(name: str, arguments: str) -> str:
    pairs = json.loads(arguments).items()
    written = "".join(f"<arg_key>{k}</arg_key>\n<arg_value>{as_text(v)}</arg_value>\n" for k, v in pairs)
    return f"<tool_call>{name}\n{written}</tool_call>"


def as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def harmony(name: str, arguments: str) -> str:
    return f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{arguments}<|call|>"


STYLES = {
    "qwen_xml": Style("<function=", qwen_xml),
    "glm": Style("<arg_key>", glm),
    "hermes": Style("<tool_call>", lambda n, a: f'<tool_call>\n{{"name": "{n}", "arguments": {a}}}\n</tool_call>'),
    "deepseek": Style(
        "<｜tool▁call▁begin｜>",
        lambda n, a: f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{n}\n```json\n{a}\n```<｜tool▁call▁end｜>",
        end="<｜tool▁calls▁end｜><｜end▁of▁sentence｜>",
    ),
    "harmony": Style(
        "<|channel|>",
        harmony,
        end="",
        think=lambda text: f"<|channel|>analysis<|message|>{text}<|end|><|start|>assistant",
        say=None,
        join="<|start|>assistant",
    ),
    "mistral": Style("[TOOL_CALLS]", lambda n, a: f"[TOOL_CALLS]{n}[ARGS]{a}", end="</s>", join=""),
    "mistral_list": Style(
        "[TOOL_CALLS]", lambda n, a: f'[TOOL_CALLS][{{"name": "{n}", "arguments": {a}}}]', end="</s>", join=""
    ),
    "python_tag": Style(
        "<|python_tag|>",
        lambda n, a: f'{{"name": "{n}", "parameters": {a}}}',
        end="<|eot_id|>",
        think=None,
        say=None,
        join="; ",
    ),
    "parameters": Style(
        '"parameters": ', lambda n, a: f'{{"name": "{n}", "parameters": {a}}}', think=None, say=None, join="\n"
    ),
}
THINKS = {name: style for name, style in STYLES.items() if style.think and not name.startswith("mistral")}
JSON = {name: style for name, style in STYLES.items() if name not in ("qwen_xml", "glm")}


def parser(mark: str) -> ReplyParser:
    return ReplyParser(mark, None, SPECIAL)


def parse(style: Style, text: str, prompt: str = "assistant\n") -> ParsedReply:
    return parser(style.mark).parse(text, prompt, TOOLS)


def every(styles: dict[str, Style]) -> Any:
    return pytest.mark.parametrize("style", styles.values(), ids=styles)


def test_every_format_is_tested() -> None:
    assert {mark for mark, _ in FORMATS} == {style.mark for style in STYLES.values()}


@every(STYLES)
def test_one_call(style: Style) -> None:
    arguments = {"a": 3, "s": "ü <b> 漢", "list": [1, "x"], "yes": True}
    reply = parse(style, style.call("f", json.dumps(arguments, ensure_ascii=False)) + style.end)
    (call,) = reply.tool_calls
    assert (call.name, call.arguments, call.error) == ("f", arguments, None)
    assert reply.message["content"] == ""
    assert reply.message["tool_calls"][0]["function"] == {"name": "f", "arguments": arguments}
    assert reply.message["tool_calls"][0]["id"] == call.id
    assert len(call.id) == 9
    assert call.id.isalnum()
    assert reply.error is None


@every(STYLES)
def test_twelve_calls_at_once_have_ids_of_their_own(style: Style) -> None:
    text = style.join.join(style.call("fg"[i % 2], json.dumps({"a": i})) for i in range(12)) + style.end
    calls = parse(style, text).tool_calls
    assert [(call.name, call.arguments) for call in calls] == [("fg"[i % 2], {"a": i}) for i in range(12)]
    assert len({call.id for call in calls}) == 12


@every({name: style for name, style in STYLES.items() if style.say})
def test_a_call_after_text(style: Style) -> None:
    reply = parse(style, "  I shall look.\n" + style.call("f", '{"a": 1}') + style.end)
    assert reply.message["content"] == "I shall look."
    assert reply.tool_calls[0].arguments == {"a": 1}


@every(THINKS)
def test_thinking_then_a_call(style: Style) -> None:
    assert style.think is not None
    reply = parse(style, style.think("hmm\n\nyes") + style.call("f", '{"a": 1}') + style.end)
    assert reply.message["reasoning_content"] == "hmm\n\nyes"
    assert reply.message["content"] == ""
    assert reply.tool_calls[0].arguments == {"a": 1}


@every({name: style for name, style in THINKS.items() if name != "harmony"})
def test_thinking_that_the_prompt_opened(style: Style) -> None:
    reply = parse(style, "hmm\n</think>\n\nSeven." + style.end, "assistant\n<think>\n")
    assert reply.message == {"role": "assistant", "content": "Seven.", "reasoning_content": "hmm"}
    unfinished = parse(style, "hmm" + style.end, "assistant\n<think>\n")
    assert unfinished.message == {"role": "assistant", "content": "", "reasoning_content": "hmm"}


@every(STYLES)
def test_plain_text(style: Style) -> None:
    assert parse(style, " Seven, or {7}. \n" + style.end).message == {"role": "assistant", "content": "Seven, or {7}."}
    assert parse(style, style.end).message == {"role": "assistant", "content": ""}


def test_the_final_channel_is_the_answer() -> None:
    reply = parse(
        STYLES["harmony"],
        "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>7<|return|>",
    )
    assert reply.message == {"role": "assistant", "content": "7", "reasoning_content": "hm"}


@every(JSON)
@pytest.mark.parametrize("broken", ['{"a": 1', '{"a": }', "{'a': 1}", "{a}"])
def test_broken_json_is_told_and_kept_as_text(style: Style, broken: str) -> None:
    text = style.call("f", broken) + style.end
    (call,) = parse(style, text).tool_calls
    assert call.arguments is None
    assert call.error
    message = parse(style, text).message
    assert broken in message["content"]
    assert "tool_calls" not in message


@pytest.mark.parametrize("said", ["", "Now:\n", "<think>\n<tool_call>{</tool_call>\n</think>\n\n"])
def test_arguments_may_have_the_marks_of_calls_in_them(said: str) -> None:
    style, code = STYLES["hermes"], 'print("<tool_call>")\nif "</tool_call>" in reply:\n    pass'
    calls = [style.call("f", json.dumps({"s": code})), style.call("g", json.dumps({"s": "<b>"}))]
    read = parse(style, said + style.join.join(calls) + style.end)
    assert [(call.name, call.arguments) for call in read.tool_calls] == [("f", {"s": code}), ("g", {"s": "<b>"})]
    assert (read.message["content"], read.error) == ("Now:" if said.startswith("N") else "", None)
    assert ("reasoning_content" in read.message) == said.startswith("<")
    stream = parser(style.mark).stream("assistant\n", TOOLS)
    told = [*(piece for letter in said + style.join.join(calls) + style.end for piece in stream.feed(letter))]
    assert "".join(text for name, text in [*told, *stream.finish()] if name == "content") == read.message["content"]
    assert stream.tool_calls == read.tool_calls


@every({name: style for name, style in JSON.items() if name not in ("python_tag", "parameters")})
def test_a_broken_call_hides_no_other(style: Style) -> None:
    text = style.join.join([style.call("f", '{"a": }'), style.call("g", '{"a": 2}')]) + style.end
    broken, good = parse(style, text).tool_calls
    assert broken.arguments is None
    assert (good.name, good.arguments) == ("g", {"a": 2})


@every(STYLES)
def test_any_beginning_of_a_reply_is_read_without_raising(style: Style) -> None:
    text = (style.think or str)("hm") + style.join.join([style.call("f", '{"a": 1}')] * 2) + style.end
    for length in range(len(text)):
        calls = parse(style, text[:length]).tool_calls
        assert all(call.arguments is not None or call.error for call in calls)


@every(STYLES)
def test_an_unknown_function_is_told(style: Style) -> None:
    (call,) = parse(style, style.call("h", '{"a": 1}') + style.end).tool_calls
    assert call.error == "There is no function 'h'; the functions are f, g."
    assert parser(style.mark).parse(style.call("h", '{"a": 1}'), "", []).tool_calls[0].error is None


@every(JSON)
def test_arguments_may_be_json_in_a_string(style: Style) -> None:
    (call,) = parse(style, style.call("f", json.dumps('{"a": 1}')) + style.end).tool_calls
    if style.mark in ("<｜tool▁call▁begin｜>", "<|channel|>"):  # the region is the string
        assert call.arguments is None
    elif "[ARGS]" in text_of(style):
        assert call.error == "The arguments are not a JSON object."
    else:
        assert call.arguments == {"a": 1}


def text_of(style: Style) -> str:
    return style.call("f", "{}")


@every(JSON)
@pytest.mark.parametrize("arguments", ["[1]", "3", "null"])
def test_arguments_that_are_no_object(style: Style, arguments: str) -> None:
    (call,) = parse(style, style.call("f", arguments) + style.end).tool_calls
    assert call.arguments is None
    assert call.error == "The arguments are not a JSON object."


@every(JSON)
@pytest.mark.parametrize("depth", [MAX_DEPTH + 1, 900, 50_000])
def test_deep_nesting_is_told(style: Style, depth: int) -> None:
    (call,) = parse(style, style.call("f", '{"a": ' + "[" * depth + "]" * depth + "}") + style.end).tool_calls[:1]
    assert call.arguments is None
    assert call.error


def test_moderate_nesting_is_read() -> None:
    deep = '{"a": ' + "[" * (MAX_DEPTH - 1) + "]" * (MAX_DEPTH - 1) + "}"
    assert parse(STYLES["hermes"], STYLES["hermes"].call("f", deep)).tool_calls[0].error is None


@pytest.mark.parametrize("name", ["qwen_xml", "glm"])
def test_xml_arguments_take_their_types_from_the_tool(name: str) -> None:
    style = STYLES[name]
    arguments = {"a": "12", "s": "12", "list": "[1, 2]", "yes": "true", "other": "5"}
    (call,) = parse(style, style.call("f", json.dumps(arguments))).tool_calls
    assert call.arguments == {"a": 12, "s": "12", "list": [1, 2], "yes": True, "other": "5"}
    (wrong,) = parse(style, style.call("f", '{"a": "twelve"}')).tool_calls
    assert wrong.arguments == {"a": "twelve"}


@pytest.mark.parametrize("name", ["qwen_xml", "glm"])
def test_xml_arguments_keep_indentation_and_tags(name: str) -> None:
    code = "    def f():\n\n        return '<b>'  "
    (call,) = parse(STYLES[name], STYLES[name].call("f", json.dumps({"s": code}))).tool_calls
    assert call.arguments == {"s": code}


def test_the_end_of_the_reply_ends_an_argument() -> None:
    (call,) = parse(STYLES["qwen_xml"], "<tool_call>\n<function=f>\n<parameter=s>\nab<|im_end|>").tool_calls
    assert call.arguments == {"s": "ab"}
    (closed,) = parse(
        STYLES["qwen_xml"], "<tool_call><function=f><parameter=a>\n3\n</function>\n</tool_call>"
    ).tool_calls
    assert closed.arguments == {"a": 3}


HUGE = 100_000
PIECES = (
    "<tool_call>", "<tool_call><function=f>", "<parameter=a>", "</parameter>", "<arg_key>a</arg_key>", "<arg_key>",
    "<arg_value>", "to=functions.", "<|channel|>", "<think>", "</think>", "[TOOL_CALLS]", "[ARGS]", "{", "[", '"', "{}",
    " ", "\n", "\n```", "<｜tool▁call▁begin｜>", "<|im_", "<", "a",
)  # fmt: skip


@pytest.mark.timeout(60)
@pytest.mark.parametrize("piece", PIECES)
@every(STYLES)
def test_huge_replies_are_read(style: Style, piece: str) -> None:
    for before in ("", "<tool_call><function=f><parameter=s>", "<tool_call>f\n<arg_key>s</arg_key>\n<arg_value>"):
        parse(style, before + piece * (HUGE // len(piece)))


@every(STYLES)
def test_a_huge_argument_arrives_whole(style: Style) -> None:
    text = "ab 漢\n" * (HUGE // 5)
    (call,) = parse(style, style.call("f", json.dumps({"s": text + "."})) + style.end).tool_calls
    assert call.arguments == {"s": text + "."}


FRAGMENTS = st.lists(
    st.one_of(
        st.sampled_from([*PIECES, *SPECIAL, "<|im_<|im_end|>end|>", "end|>", "</tool_call>", "<function=f>", "</s>"]),
        st.sampled_from([style.call("f", '{"a": 1}') for style in STYLES.values()]),
        st.sampled_from(
            [STYLES["hermes"].call("f", '{"a": "</tool_call> <tool_call>"}'), '<tool_call> {"name": "</tool_call>']
        ),
        st.sampled_from([style.think("hm") for style in STYLES.values() if style.think]),
        st.text(max_size=6),
    ),
    max_size=10,
).map("".join)


@every(STYLES)
@given(text=FRAGMENTS, data=st.data())
@settings(max_examples=60, deadline=None)
def test_however_a_reply_is_cut_its_fields_are_those_of_the_whole(style: Style, text: str, data: st.DataObject) -> None:
    opened = data.draw(st.booleans())
    prompt = "<think>\n" if opened else "x"
    whole = parse(style, text, prompt)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=len(text))))
    stream = parser(style.mark).stream(prompt, TOOLS)
    fields = {"content": "", "reasoning_content": ""}
    for start, stop in zip([0, *cuts], [*cuts, len(text)], strict=True):
        for name, piece in stream.feed(text[start:stop]):
            fields[name] += piece
    for name, piece in stream.finish():
        fields[name] += piece
    assert fields["content"] == whole.message["content"]
    assert fields["reasoning_content"] == whole.message.get("reasoning_content", "")
    assert stream.tool_calls == whole.tool_calls


OWN = {
    "start_anchor": "assistant\n",
    "fields": {
        "thinking": {"open": "[", "close": "]", "content": "text"},
        "tool_calls": {
            "open": "<c>",
            "close": "</c>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": {"name": "f", "arguments": "{content.x}"}},
        },
        "content": {"content": "text", "repeats": True, "join": ""},
    },
}


def test_a_checkpoints_own_format_comes_first() -> None:
    own = ReplyParser("<tool_call>", OWN, SPECIAL)
    reply = own.parse('[hm] Seven <c>{"x": {"a": 1}}</c>', "user\nassistant\n", TOOLS)
    assert reply.message["content"] == "Seven"
    assert reply.message["reasoning_content"] == "hm"
    assert reply.tool_calls[0].arguments == {"a": 1}
    assert own.parse("rest]7", "user\nassistant\n[", TOOLS).message["content"] == "7"


@given(
    text=st.lists(st.sampled_from(["[", "]", "<c>", "</c>", '{"x": {"a": 1}}', "{", '{"y": 1}', " a"])).map("".join),
    cut=st.integers(0, 30),
)
@settings(max_examples=100, deadline=None)
def test_a_checkpoints_own_format_never_raises_either(text: str, cut: int) -> None:
    own = ReplyParser(None, OWN, SPECIAL)
    reply = own.parse(text, "assistant\n", TOOLS)
    stream = own.stream("assistant\n", TOOLS)
    pieces = [*stream.feed(text[:cut]), *stream.feed(text[cut:]), *stream.finish()]
    if reply.error is None:
        assert "".join(piece for name, piece in pieces if name == "content") == reply.message["content"]
    else:
        assert reply.error == "The tool call could not be read."
        assert reply.message["content"] or reply.message.get("reasoning_content") or not text.strip()


def test_a_model_without_a_known_format_is_read_as_hermes() -> None:
    assert ReplyParser("nothing", None, SPECIAL)._template["fields"] is HERMES
    assert ReplyParser(None, None, SPECIAL)._template["fields"] is HERMES


@pytest.mark.parametrize("name", TEMPLATES)
@given(data=st.data())
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_tokens_that_stream_give_the_fields_of_the_whole(name: str, tiny_tokenizer: Any, data: st.DataObject) -> None:
    tokenizer = tokenizer_with(name, tiny_tokenizer)
    codec = TemplateCodec(tokenizer)
    random_ids = st.lists(st.integers(0, len(tokenizer) - 1), max_size=30)
    ids = data.draw(st.one_of(random_ids, FRAGMENTS.map(lambda text: list(codec.encode(text)))))
    parsed = codec.parse(codec.decode(ids, special_tokens=True), "<think>\n", TOOLS)
    stream = codec.stream("<think>\n", TOOLS)
    pieces = [piece for token in ids for piece in stream.feed(token)] + list(stream.finish())
    for field in ("content", "reasoning_content"):
        assert "".join(piece for name, piece in pieces if name == field) == parsed.message.get(field, "")


@given(text=st.text(alphabet="ab<>", max_size=12), cut=st.integers(0, 12))
def test_removing_tokens_piece_by_piece_is_removing_them(text: str, cut: int) -> None:
    special = SpecialTokens(["<a>", "<a>b", "<<", "b<a"])
    first, rest = special.remove_settled(text[:cut])
    second, rest = special.remove_settled(rest + text[cut:])
    assert first + second + special.remove(rest) == special.remove(text)
