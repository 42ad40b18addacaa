"""Bytes that each token of a vocabulary writes, by which models with other vocabularies are compared."""

import json
import re
from functools import cache
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
    return torch.tensor([len(text or b"") for text in token_texts(tokenizer)], dtype=torch.int16)


def token_texts(tokenizer: Any) -> list[bytes | None]:
    """Returns the bytes of UTF-8 that each token writes, [V]: None for special tokens, which are no text, and nothing
    for ids between others that are no tokens."""
    pieces = [""] * (max(tokenizer.get_vocab().values()) + 1)
    for piece, id_ in tokenizer.get_vocab().items():
        pieces[id_] = piece
    backend = getattr(tokenizer, "backend_tokenizer", None)
    of_bytes = backend is not None and _is_byte_level(json.loads(backend.to_str())["decoder"])
    texts: list[bytes | None] = [*map(_of_byte_characters if of_bytes else _of_piece, pieces)]
    for id_, token in tokenizer.added_tokens_decoder.items():
        if id_ < len(texts):
            texts[id_] = None if token.special else token.content.encode()
    return texts


def _is_byte_level(decoder: Any) -> bool:
    if not isinstance(decoder, dict):
        return False
    return decoder["type"] == "ByteLevel" or any(map(_is_byte_level, decoder.get("decoders", ())))


def _of_byte_characters(piece: str) -> bytes:
    bytes_ = _byte_characters()
    return b"".join(bytes((bytes_[one],)) if one in bytes_ else one.encode() for one in piece)


@cache
def _byte_characters() -> dict[str, int]:
    """Returns the byte that each character of a byte-level vocabulary stands for."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return {character: byte for byte, character in bytes_to_unicode().items()}


def _of_piece(piece: str) -> bytes:
    if BYTE.fullmatch(piece):
        return bytes((int(piece[3:5], 16),))
    return piece.replace(SPACE, " ").encode(errors="replace")
