"""Texts as a reward model reads them: their tokens after the one that begins a sequence, as far as they fit.

Nothing is added after a text: a truncated reply ends where it was truncated, a finished one with its end-of-turn token.
Does not own: scores (`reward_model.py`).
"""

from collections.abc import Sequence
from typing import Any

from attrs import frozen

from rollgrad.domain.episodes.images import PlacedImages


@frozen
class EncodedText:
    """Token ids of a text, whether its beginning was left out because it is too long for the model, and its images."""

    tokens: tuple[int, ...]
    truncated: bool
    images: PlacedImages = ()


def encode(text: str, tokenizer: Any, max_length: int) -> EncodedText:
    """Returns the tokens, at most `max_length`, that a reward model with this tokenizer reads of a text."""
    tokens = list(tokenizer(ended(text, tokenizer), add_special_tokens=False, verbose=False)["input_ids"])
    return begun(tokens, (), tokenizer, max_length)


def ended(text: str, tokenizer: Any) -> str:
    """Returns a text without what stands after its last special token, if that is line breaks: templates write one
    after the end of a turn, which a model never samples."""
    stripped = text.rstrip("\n")
    return stripped if stripped.endswith(special_tokens(tokenizer)) else text


def begun(tokens: Sequence[int], images: PlacedImages, tokenizer: Any, max_length: int) -> EncodedText:
    """Returns the tokens of a text after the beginning-of-sequence token that its tokenizer puts there, at most
    `max_length`."""
    bos = tokenizer.bos_token_id
    if needs_bos(tokens, tokenizer):
        tokens, images = (bos, *tokens), tuple(placed.moved(1) for placed in images)
    return shortened(tokens, bos, max_length, images)


def needs_bos(tokens: Sequence[int], tokenizer: Any) -> bool:
    """Returns whether the tokenizer puts a beginning-of-sequence token before texts, and these tokens have none."""
    bos = tokenizer.bos_token_id
    return bos is not None and list(tokens[:1]) != [bos] and bool(tokenizer("a")["input_ids"][:1] == [bos])


def special_tokens(tokenizer: Any) -> tuple[str, ...]:
    """Returns the texts of a tokenizer's special tokens."""
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    return tuple({*tokenizer.all_special_tokens, *(token.content for token in added if token.special)} - {""})


def shortened(tokens: Sequence[int], bos: int | None, max_length: int, images: PlacedImages = ()) -> EncodedText:
    """Returns the last `max_length` tokens, but for the beginning-of-sequence token, which stays, and for the tokens of
    an image that would be cut, which go."""
    if len(tokens) <= max_length:
        return EncodedText(tuple(tokens), truncated=False, images=images)
    start = tokens[:1] if tokens[0] == bos else ()
    first = len(tokens) + len(start) - max_length
    first = max([first, *(placed.stop for placed in images if placed.start < first)])
    kept = tuple(placed.moved(len(start) - first) for placed in images if placed.start >= first)
    return EncodedText((*start, *tokens[first:]), truncated=True, images=kept)


def same_vocabulary(policy: Any, own: Any) -> bool:
    """Returns whether every token id of the tokenizer `policy` stands for the same token in `own`, which may
    have more."""
    known = own.get_vocab()
    return all(known.get(token) == index for token, index in policy.get_vocab().items())
