"""A `ChatCodec` whose tokens are bytes: exact, reversible and without a model."""

import json
from collections.abc import Sequence

from rollgrad.domain.episodes.messages import Message, ParsedReply, ReplyForm, ToolCall, assistant_message
from rollgrad.domain.ports.chat_codec import ChatCodec, RenderedPrompt, ReplyStream, ToolSchema

BOS, EOS = 256, 257
"""The special tokens, above all bytes."""


class FakeChatCodec(ChatCodec):
    """Token ids 0..255 are UTF-8 bytes; 256 starts a sequence and 257 ends a reply.

    A reply `@name {"argument": 1}` is a call. With `forgetful`, thinking (`reasoning_content`, written `(thought)`) is
    left out of the history, as many templates do.
    """

    def __init__(self, *, forgetful: bool = False) -> None:
        self._forgetful = forgetful

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSchema] = ()) -> RenderedPrompt:
        """Returns tools as `<name>`, then a line `[role]text` for each message, then `[assistant]`."""
        told = "".join(f"<{tool['function']['name']}>" for tool in tools)
        text = told + "".join(f"[{message['role']}]{self._text(message)}\n" for message in messages) + "[assistant]"
        return RenderedPrompt(text=text, token_ids=self.encode(text))

    def extend(
        self,
        messages: Sequence[Message],
        new_messages: Sequence[Message],
        tools: Sequence[ToolSchema] = (),
        *,
        reply_token_ids: Sequence[int],
    ) -> tuple[int, ...] | None:
        """Returns the tokens between a reply and the next one; None if `forgetful` and there was a thought."""
        if self._forgetful and any(message.get("reasoning_content") for message in messages):
            return None
        text = "".join(f"[{message['role']}]{self._text(message)}\n" for message in new_messages)
        return self.encode(f"\n{text}[assistant]")

    @property
    def end_of_turn(self) -> str:
        """Text of the token that ends a reply."""
        return "<eos>"

    def parse(
        self, text: str, prompt: str, tools: Sequence[ToolSchema] = (), form: ReplyForm | None = None
    ) -> ParsedReply:
        """Returns the reply's thought, and its call or else its content."""
        text = text.replace("<eos>", "")
        thought, _, content = text.rpartition(")") if text.startswith("(") else ("", "", text)
        calls: tuple[ToolCall, ...] = ()
        if content.startswith("@"):
            name, _, arguments = content[1:].partition(" ")
            try:
                calls = (ToolCall(id=f"c{len(prompt)}", name=name, arguments=json.loads(arguments or "{}")),)
            except ValueError:
                calls = (ToolCall(id=f"c{len(prompt)}", name=name, arguments=None, error="The arguments are no JSON."),)
        message = assistant_message("" if calls else content, reasoning=thought[1:], tool_calls=calls)
        return ParsedReply(message=message, tool_calls=calls)

    def grammar(self, form: ReplyForm, prompt: str, tools: Sequence[ToolSchema] = ()) -> str:
        """Returns a grammar of JSON texts, or of calls with any JSON object as arguments."""
        schema = json.dumps({} if form.schema in (None, True) else form.schema)
        calls = [f'"@{name} " %json {{"type": "object"}}' for name in form.calls]
        return f"start: {' | '.join([*calls, *([] if form.schema is None else [f'%json {schema}'])])}\n"

    def stream(self, prompt: str, tools: Sequence[ToolSchema] = ()) -> ReplyStream:
        """Returns a stream that gives everything at the end."""
        return _WholeReply(self, prompt, tools)

    def encode(self, text: str) -> tuple[int, ...]:
        """Returns the text's bytes."""
        return tuple(text.encode())

    def encode_prompt(self, text: str) -> tuple[int, ...]:
        """Returns the text's bytes behind `BOS`."""
        return (BOS, *self.encode(text))

    def decode(self, token_ids: Sequence[int], *, special_tokens: bool = False) -> str:
        """Returns the text of the bytes; special tokens are `<bos>` and `<eos>`, or left out."""
        if not special_tokens:
            return bytes(token for token in token_ids if token < BOS).decode(errors="replace")
        names = {BOS: b"<bos>", EOS: b"<eos>"}
        return b"".join(names.get(token) or bytes([token]) for token in token_ids).decode(errors="replace")

    def _text(self, message: Message) -> str:
        thought = message.get("reasoning_content")
        calls = "".join(
            f"@{call['function']['name']} {json.dumps(call['function']['arguments'])}"
            for call in message.get("tool_calls") or ()
        )
        return (f"({thought})" if thought and not self._forgetful else "") + str(message.get("content") or "") + calls


class _WholeReply(ReplyStream):
    """Gives everything at the end."""

    def __init__(self, codec: FakeChatCodec, prompt: str, tools: Sequence[ToolSchema]) -> None:
        self._codec, self._prompt, self._tools = codec, prompt, tools
        self._tokens: list[int] = []

    def feed(self, token_id: int) -> Sequence[tuple[str, str]]:
        self._tokens.append(token_id)
        return []

    def finish(self) -> Sequence[tuple[str, str]]:
        message = self._codec.parse(self._codec.decode(self._tokens), self._prompt, self._tools).message
        return [(name, message[name]) for name in ("reasoning_content", "content") if message.get(name)]
