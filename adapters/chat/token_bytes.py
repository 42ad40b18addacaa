"""Bytes of text that each token of a vocabulary writes, by which models with other vocabularies are compared."""

import json
import re
from typing import Any

import torch
from torch import Tensor

BYTE = re.compile(r"<0x[0-9A-F]{2}>")
"""Token of one byte, in vocabularies of SentencePiece."""
SPACE = "\u2581"
"""Space in tokens of SentencePiece."""


def token_bytes(tokenizer: Any) -> Tensor:
    """Returns how many bytes of UTF-8 each token writes, int16 [V]; special tokens, which are no text, write none, nor
    do ids between others that are no tokens."""
    texts = [""] * (max(tokenizer.get_vocab().values()) + 1)
    for text, id_ in tokenizer.get_vocab().items():
        texts[id_] = text
    added = {id_: token for id_, token in tokenizer.added_tokens_decoder.items() if id_ < len(texts)}
    backend = getattr(tokenizer, "backend_tokenizer", None)
    of_bytes = backend is not None and _is_byte_level(json.loads(backend.to_str())["decoder"])
    sizes = [len(text) if of_bytes else _size(text) for text in texts]  # a character stands for a byte, or is one
    for id_, token in added.items():
        sizes[id_] = 0 if token.special else len(token.content.encode())
    return torch.tensor(sizes, dtype=torch.int16)


def _is_byte_level(decoder: Any) -> bool:
    if not isinstance(decoder, dict):
        return False
    return decoder["type"] == "ByteLevel" or any(map(_is_byte_level, decoder.get("decoders", ())))


def _size(text: str) -> int:
    return 1 if BYTE.fullmatch(text) else len(text.replace(SPACE, " ").encode(errors="replace"))
