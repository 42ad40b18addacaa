"""A `ChatCodec` whose tokens are bytes: exact, reversible and without a model."""

from collections.abc import Sequence

from rollgrad.domain.ports.chat_codec import ChatCodec, Message, RenderedPrompt

BOS, EOS = 256, 257
"""The special tokens, above all bytes."""


class FakeChatCodec(ChatCodec):
    """Token ids 0..255 are UTF-8 bytes; 256 starts a sequence and 257 ends a reply."""

    def render(self, messages: Sequence[Message]) -> RenderedPrompt:
        text = "".join(f"[{message['role']}]{message['content']}\n" for message in messages) + "[assistant]"
        return RenderedPrompt(text=text, token_ids=self.encode(text))

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(text.encode())

    def encode_prompt(self, text: str) -> tuple[int, ...]:
        return (BOS, *self.encode(text))

    def decode(self, token_ids: Sequence[int]) -> str:
        return bytes(token for token in token_ids if token < BOS).decode(errors="replace")
