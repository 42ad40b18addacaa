"""Digests by which conversations and states are found again, whatever their length."""

import json
from collections.abc import Sequence
from hashlib import blake2b
from itertools import accumulate

from rollgrad.application.episodes.turns import Prepared
from rollgrad.domain.episodes.messages import Message, same_message
from rollgrad.domain.ports.chat_codec import ToolSchema


def state_number(prepared: Prepared, name: str | None) -> int:
    """Returns the number of a state, from its name or from the messages after the latest reply. Without any messages,
    before the first reply of an episode in plain text, the tokens stand for them."""
    said: list[str] = []
    for message in reversed(prepared.messages):
        if message["role"] == "assistant":
            break
        said.append(same_message(message))
    what = json.dumps(["named", name] if name is not None else ["said", said or prepared.token_ids])
    return int.from_bytes(blake2b(what.encode(errors="surrogatepass"), digest_size=8).digest(), "big", signed=True)


def digests(messages: Sequence[Message], tools: Sequence[ToolSchema], role: str) -> list[bytes]:
    """Returns the digests of what a role with these tools was told in the first 0, 1, 2 ... messages."""
    begin = json.dumps([role, list(tools)], sort_keys=True, default=str)
    return list(accumulate(messages, followed, initial=_digest(begin.encode())))


def followed(conversation: bytes, message: Message) -> bytes:
    """Returns the digest of a conversation with one message more."""
    return _digest(conversation + same_message(message).encode(errors="surrogatepass"))


def _digest(said: bytes) -> bytes:
    return blake2b(said, digest_size=16).digest()
