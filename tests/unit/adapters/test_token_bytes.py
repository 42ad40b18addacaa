"""The bytes of a text's tokens are those of the text."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from rollgrad.adapters.chat.token_bytes import token_bytes

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


def total(tokenizer: Any, text: str) -> int:
    return int(token_bytes(tokenizer)[tokenizer(text, add_special_tokens=False)["input_ids"]].sum())


@given(text=TEXTS)
@settings(max_examples=25, deadline=None)
def test_of_a_vocabulary_of_bytes(tiny_tokenizer: Any, text: str) -> None:
    assert total(tiny_tokenizer, text) == len(text.encode())


@pytest.fixture(scope="module")
def pieces() -> Any:
    """A tokenizer like SentencePiece's: spaces are a mark, and a character that is no token is its bytes."""
    tokens = ["\u2581", "a", "\u2581a", "\u00e9", *(f"<0x{byte:02X}>" for byte in range(256))]
    vocabulary = {token: id_ for id_, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[("\u2581", "a")], byte_fallback=True))
    backend.normalizer = normalizers.Replace(" ", "\u2581")
    backend.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.add_tokens([AddedToken("\u00fcber", normalized=False)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")


@pytest.mark.parametrize("text", ["a a", " a\u00e9", "\u65e5 a", "x\u00fcber a"])
def test_of_pieces_and_bytes(pieces: Any, text: str) -> None:
    assert total(pieces, text) == len(text.encode())


def test_ids_between_tokens_write_nothing() -> None:
    vocabulary = Tokenizer(models.WordLevel({"a": 0, "bcd": 5}, unk_token="a"))
    assert token_bytes(PreTrainedTokenizerFast(tokenizer_object=vocabulary)).tolist() == [1, 0, 0, 0, 0, 3]


def test_special_tokens_write_nothing(pieces: Any, tiny_tokenizer: Any) -> None:
    for tokenizer in (pieces, tiny_tokenizer):
        assert token_bytes(tokenizer)[tokenizer.eos_token_id] == 0
