"""Chooses a padding token that ends no text.

transformers reads the score of a sequence classifier at the last token that is not the padding token. Where that is
also the token that ends a turn, the score of another token would be read than was trained.
"""

from collections.abc import Collection
from typing import Any

ADDED = "<|pad|>"
"""Padding token of tokenizers that have none to spare."""
SPARE = ("pad", "reserved", "unused")
"""Words in the names of tokens that models keep for such uses."""


def set_padding_apart(tokenizer: Any, ends: Collection[int]) -> None:
    """Gives `tokenizer` a padding token that ends no text: its own, else a special token of its vocabulary that the
    chat template does not write, else a new one, `<|pad|>`.

    Args:
        tokenizer: a transformers tokenizer, which is changed.
        ends: ids of tokens that end a text, beside the tokenizer's own.
    """
    template = str(tokenizer.chat_template or "")
    ending = {tokenizer.eos_token, *tokenizer.convert_ids_to_tokens(list(ends))}
    if tokenizer.pad_token is not None and tokenizer.pad_token not in ending and tokenizer.pad_token not in template:
        return
    special = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    taken = {*ending, tokenizer.bos_token, tokenizer.unk_token}
    free = [token for token in special if token not in taken and token not in template]
    kept = [token for token in free if any(word in token.lower() for word in SPARE)]
    tokenizer.add_special_tokens({"pad_token": (kept or free or [ADDED])[0]})
