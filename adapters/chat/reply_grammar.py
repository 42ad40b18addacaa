"""Writes grammars of replies, in the dialect of Lark that llguidance reads (and vLLM with it).

JSON is written as Python's `json.dumps` does, in one line: templates write it so, and a model cannot fill its reply
with spaces. A special token is matched as itself, never as its text.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

from rollgrad.adapters.chat.reply_formats import DEEPSEEK, HARMONY, HERMES, LLAMA, MISTRAL
from rollgrad.domain.episodes.messages import ReplyForm
from rollgrad.domain.errors import DataError
from rollgrad.domain.ports.chat_codec import ToolSchema

WRITTEN_AS_DUMPS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""Options of llguidance for JSON as `json.dumps` writes it."""
MOST_ITEMS = 2**14
"""Largest sum of `minItems` and `maxItems` in the schemas of a reply, which llguidance takes half a second for. It
writes a rule an item before its own bound of a grammar's size holds: 10^9 of them would take all memory."""
ANYTHING = r"/(.|\n)*/"
NEWLINES = r"/\n*/"
CALLABLE = "the families of Hermes, Qwen 2.5 and 3, Llama 3, Mistral and DeepSeek"


class ReplyGrammar:
    """Writes the grammars of replies of a model.

    Args:
        chat_template: the model's, None for a model without one.
        fields: the format of its replies, one of `reply_formats`; None for one that only the checkpoint describes.
        special_id: returns the id of a special token, None for any other text.
    """

    def __init__(
        self,
        chat_template: str | None,
        fields: Mapping[str, Any] | None,
        special_id: Callable[[str], int | None],
    ) -> None:
        self._template = chat_template or ""
        self._fields = fields
        self._special_id = special_id

    def write(self, form: ReplyForm, prompt: str, tools: Sequence[ToolSchema]) -> str:
        """Returns the grammar of replies of this form to `prompt`.

        Raises:
            DataError: a schema cannot be followed, or it is not known how this model writes calls.
        """
        if self._fields is HARMONY:
            raise DataError("Replies of this model (gpt-oss) have channels, whose form cannot be prescribed.")
        items = _items([form.schema, *(tool for tool in tools if tool["function"]["name"] in form.calls)])
        if items > MOST_ITEMS:
            raise DataError(
                f"The form of the reply cannot be prescribed: minItems and maxItems of its schemas are {items:g} "
                f"together, but they may be {MOST_ITEMS}: lower them, or leave maxItems out."
            )
        from llguidance import LLMatcher

        # Ids of special tokens are known to a tokenizer alone, so that here their texts stand for them.
        plain = ReplyGrammar(self._template, self._fields, lambda text: None)._lark(form, prompt, tools)
        matcher = LLMatcher(_bytes(), LLMatcher.grammar_from_lark(plain), log_level=0)
        if matcher.is_error():
            raise DataError(f"The form of the reply cannot be prescribed: {matcher.get_error().splitlines()[0]}")
        matcher.compute_logit_bias()
        if matcher.is_error():
            raise DataError("The form of the reply cannot be prescribed: no text has it.")
        return self._lark(form, prompt, tools)

    def _lark(self, form: ReplyForm, prompt: str, tools: Sequence[ToolSchema]) -> str:
        rules = []
        choices = []
        if form.schema is not None:
            choices.append("text")
            rules.append(f"text: {_json(form.schema, 'the schema of the reply')}")
        if form.calls:
            choices.append("calls")
            rules += self._calls(form, tools)
        return "\n".join(["%llguidance {}", *self._beginning(prompt), f"reply: {' | '.join(choices)}", *rules, ""])

    def _beginning(self, prompt: str) -> list[str]:
        """Returns the rules for thinking, which the prompt may have opened."""
        if self._special_id("</think>") is None:  # ends at the first one; llguidance would look for the last
            rest = [f"thought: thinking {NEWLINES}", f'thinking[suffix="</think>"]: {ANYTHING}']
        else:
            rest = [f"thought: {ANYTHING} {self._mark('</think>')} {NEWLINES}"]
        if prompt.rstrip().endswith("<think>"):
            return ["start: thought reply", *rest]
        if "<think>" in self._template:
            return [f"start: ({self._mark('<think>')} thought)? reply", *rest]
        return ["start: reply"]

    def _calls(self, form: ReplyForm, tools: Sequence[ToolSchema]) -> list[str]:
        """Returns the rules of calls, of which `calls` is the first, in the form that the template reads."""
        schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in tools}
        names = {name: f"call_{index}" for index, name in enumerate(form.calls)}
        arguments = {name: _json(schemas[name], f"the parameters of {name}") for name in names}
        call = f"call: {' | '.join(names.values())}"
        if self._fields is HERMES:
            return [*self._hermes_calls(form.several), call, *_objects(names, arguments, "arguments")]
        if self._fields is LLAMA:
            return ["calls: call", call, *_objects(names, arguments, "parameters")]
        if self._fields is MISTRAL and "[ARGS]" in self._template:
            opening = self._mark("[TOOL_CALLS]")
            calls = f"({opening} call)+" if form.several else f"{opening} call"
            named = [f"{rule}: {_text(name)} {self._mark('[ARGS]')} {arguments[name]}" for name, rule in names.items()]
            return [f"calls: {calls}", call, *named]
        if self._fields is MISTRAL:
            listed = f"call ({_text(', ')} call)*" if form.several else "call"
            calls = f"{self._mark('[TOOL_CALLS]')} {_text('[')} {listed} {_text(']')}"
            return [f"calls: {calls}", call, *_objects(names, arguments, "arguments")]
        if self._fields is DEEPSEEK:
            calls, *named = self._deepseek_calls(form.several, names, arguments)
            return [calls, call, *named]
        raise DataError(
            f"A call of a tool cannot be prescribed to this model, only to {CALLABLE}: leave tool_choice out, or set "
            "it to auto."
        )

    def _hermes_calls(self, several: bool) -> list[str]:
        one = f"{self._mark('<tool_call>')} {_text(chr(10))} call {_text(chr(10))} {self._mark('</tool_call>')}"
        calls = f"one ({_text(chr(10))} one)*" if several else "one"
        return [f"calls: {calls}", f"one: {one}"]

    def _deepseek_calls(self, several: bool, names: Mapping[str, str], arguments: Mapping[str, str]) -> list[str]:
        """Returns the rule of calls, then that of each tool's; some templates put arguments into a Markdown fence."""
        fenced = "```json" in self._template
        kind = f"{_text('function')} {self._mark('<｜tool▁sep｜>')} " if fenced else ""
        before = _text("\n```json\n") if fenced else self._mark("<｜tool▁sep｜>")
        after = _text("\n```") if fenced else ""
        opening, closing = self._mark("<｜tool▁call▁begin｜>"), self._mark("<｜tool▁call▁end｜>")
        listed = f"call ({_text(chr(10))} call)*" if several else "call"
        calls = f"{self._mark('<｜tool▁calls▁begin｜>')} {listed} {self._mark('<｜tool▁calls▁end｜>')}"
        named = [
            f"{rule}: {opening} {kind}{_text(name)} {before} {arguments[name]} {after} {closing}"
            for name, rule in names.items()
        ]
        return [f"calls: {calls}", *named]

    def _mark(self, text: str) -> str:
        """Returns the symbol of a mark: the token's where it is a special one, else its text."""
        token_id = self._special_id(text)
        return _text(text) if token_id is None else f"<[{token_id}]>"


@cache
def _bytes() -> Any:
    """Returns a tokenizer whose tokens are bytes: a grammar that begins with none of them is followed by no other."""
    from llguidance import LLTokenizer

    return LLTokenizer("byte")


def _items(value: Any) -> float:
    """Returns the sum of `minItems` and `maxItems` in schemas, wherever they stand."""
    if isinstance(value, Mapping):
        bounds = (value.get("minItems"), value.get("maxItems"))
        own = sum(max(0, bound) for bound in bounds if isinstance(bound, int | float))
        return own + sum(map(_items, value.values()))
    return sum(map(_items, value)) if isinstance(value, list | tuple) else 0


def _objects(names: Mapping[str, str], arguments: Mapping[str, str], key: str) -> list[str]:
    """Returns the rules of calls that are objects with a name and, under `key`, arguments."""
    return [
        f"""{rule}: {_text(f'{{"name": {json.dumps(name)}, "{key}": ')} {arguments[name]} {_text("}")}"""
        for name, rule in names.items()
    ]


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _json(schema: Any, where: str) -> str:
    if not isinstance(schema, Mapping) and schema is not True:
        raise DataError(
            f"The form of the reply cannot be prescribed: {where} is no JSON schema that a text can follow."
        )
    options = {} if schema is True else dict(schema)
    return f"%json {json.dumps({**options, 'x-guidance': WRITTEN_AS_DUMPS})}"
