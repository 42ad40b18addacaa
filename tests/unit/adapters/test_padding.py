"""Padding tokens that end no text."""

from typing import Any

import pytest

from rollgrad.adapters.chat.padding import set_padding_apart
from tests.tiny_models import make_tiny_tokenizer


def tokenizer_with(*special: str, pad: str = "<|im_end|>") -> Any:
    tokenizer = make_tiny_tokenizer(spare=False)
    tokenizer.add_special_tokens({"additional_special_tokens": list(special)})
    tokenizer.pad_token = pad
    return tokenizer


@pytest.mark.parametrize(
    ("special", "pad", "chosen"),
    [
        (["<|end|>", "<|own|>"], "<|own|>", "<|own|>"),
        (["<file_sep>", "<|reserved_7|>"], "<|im_end|>", "<|reserved_7|>"),
        (["<file_sep>"], "<|im_end|>", "<file_sep>"),
        (["<|endoftext|>"], "<|endoftext|>", "<|pad|>"),
    ],
    ids=["its own", "a reserved one", "any the template does not write", "a new one"],
)
def test_a_text_never_ends_with_the_padding_token(special: list[str], pad: str, chosen: str) -> None:
    tokenizer = tokenizer_with(*special, pad=pad)
    ends = tokenizer.convert_tokens_to_ids(["<|im_end|>", *(name for name in special if "end" in name)])
    size = len(tokenizer)
    set_padding_apart(tokenizer, ends)
    assert tokenizer.pad_token == chosen
    assert tokenizer.pad_token_id not in ends
    assert len(tokenizer) == size + (chosen == "<|pad|>")


def test_a_token_that_the_template_writes_does_not_pad() -> None:
    tokenizer = tokenizer_with("<|reserved_turn|>", pad="<|reserved_turn|>")
    tokenizer.chat_template = tokenizer.chat_template.replace("<|im_end|>", "<|reserved_turn|>")
    set_padding_apart(tokenizer, [])
    assert tokenizer.pad_token == "<|pad|>"
