"""`TextEncoder`: text to tokens and back, by a tokenizer alone; the places of tokens in a text.

Invariant: text that is guarded (`special_text`) never becomes a special token. Does not own: what chat templates write.
"""

import json
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from rollgrad.adapters.chat.special_text import Guarded
from rollgrad.domain.errors import ConfigurationError


class TextEncoder:
    """Encodes and decodes with `tokenizer`, a transformers tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str) -> tuple[int, ...]:
        """Returns the token ids of plain text, with no template and no special tokens added; those written in it are
        real."""
        return tuple(self._tokenizer(well_formed(text), add_special_tokens=False)["input_ids"])

    def encode_prompt(self, text: str) -> tuple[int, ...]:
        """Returns the token ids of a text that starts a sequence, with the special tokens this tokenizer adds by
        default (BOS)."""
        return tuple(self._tokenizer(well_formed(text))["input_ids"])

    def decode(self, token_ids: Sequence[int], *, special_tokens: bool = False) -> str:
        """Returns the text of token ids, without special tokens unless asked for, spaces untouched."""
        text: str = self._tokenizer.decode(
            list(token_ids), skip_special_tokens=not special_tokens, clean_up_tokenization_spaces=False
        )
        return text

    def locate(self, guarded: Guarded, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Returns the tokens of `text`, which the template wrote of `guarded`, and the characters of each from the
        first to the one after the last. The ids are those of `render`; all tokens of a placeholder have the whole of
        it.

        Raises:
            ConfigurationError: the tokenizer is written in Python, and cannot say where its tokens lie.
        """
        token_ids: list[int] = []
        borders: list[tuple[int, int]] = []
        place = 0
        for piece, literal, length in guarded.pieces(text):
            if literal:
                found = self._encode_piece(piece, literal=True)
                token_ids += found
                borders += [(place, place + length)] * len(found)
            else:
                encoded = self._with_offsets(piece, add_special_tokens=False)
                token_ids += encoded["input_ids"]
                borders += _tiled(encoded["offset_mapping"], place)
            place += length
        return token_ids, borders

    def encode_ended(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Returns the tokens of a whole text, and their characters as `locate` does: it begins as the tokenizer begins
        one, once, and ends with the end-of-sequence token, once.

        Raises:
            ConfigurationError: as `locate`.
        """
        encoded = self._with_offsets(text, add_special_tokens=True)
        token_ids, borders = list(encoded["input_ids"]), _tiled(encoded["offset_mapping"], 0)
        bos, eos = self._tokenizer.bos_token_id, self._tokenizer.eos_token_id
        if bos is not None and token_ids[:2] == [bos, bos]:  # the text spells it out
            token_ids, borders = token_ids[1:], borders[1:]
        if eos is not None and token_ids[-1:] != [eos]:
            token_ids, borders = [*token_ids, eos], [*borders, (len(text), len(text))]
        elif eos is not None:
            borders[-1] = (len(text), len(text))
        return token_ids, borders

    def _with_offsets(self, text: str, *, add_special_tokens: bool) -> Any:
        if getattr(self._tokenizer, "backend_tokenizer", None) is None:
            raise ConfigurationError(
                f"The tokenizer of {self._tokenizer.name_or_path!r} does not say where its tokens lie in a text, so "
                "that replies cannot be told from prompts: use a fast tokenizer (one with a tokenizer.json)."
            )
        return self._tokenizer(
            well_formed(text), add_special_tokens=add_special_tokens, return_offsets_mapping=True, verbose=False
        )

    @property
    def bos_token_id(self) -> int | None:
        """The token that begins a sequence, if there is one."""
        return self._tokenizer.bos_token_id  # type: ignore[no-any-return]

    def text_lengths(self, texts: Sequence[str]) -> list[int]:
        """Returns the number of tokens that `encode_prompt` makes of each text, in one call of the tokenizer."""
        return self._count(texts, add_special_tokens=True)

    def _encode_guarded(self, guarded: Guarded, text: str) -> tuple[int, ...]:
        pieces = guarded.split(text)
        if not any(literal for _, literal in pieces):
            return self.encode(text)
        return tuple(token for piece, literal in pieces for token in self._encode_piece(piece, literal=literal))

    def _encode_piece(self, piece: str, *, literal: bool) -> tuple[int, ...]:
        if not literal:
            return self.encode(piece)
        if self._literal is None:
            return tuple(self._tokenizer(piece, add_special_tokens=False, split_special_tokens=True)["input_ids"])
        return tuple(self._literal.encode(piece, add_special_tokens=False).ids)

    @cached_property
    def _literal(self) -> Any:
        """A copy of the tokenizer that finds no added tokens in a text; None for a tokenizer written in Python.

        The setting `split_special_tokens` would not do: it is shared by all threads, and keeps added tokens that are
        not special.
        """
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is None:
            return None
        from tokenizers import Tokenizer

        written = json.loads(backend.to_str())
        for token in written["added_tokens"]:
            token["special"] = True
        literal = Tokenizer.from_str(json.dumps(written))
        literal.no_truncation()
        literal.no_padding()
        literal.encode_special_tokens = True
        return literal

    def _count(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[int]:
        if not texts:
            return []
        written = [well_formed(text) for text in texts]
        # Not verbose: the tokenizer would warn of long texts, which the caller counts on purpose.
        batch = self._tokenizer(written, add_special_tokens=add_special_tokens, verbose=False)["input_ids"]
        return [len(token_ids) for token_ids in batch]


def _tiled(offsets: Sequence[tuple[int, int]], place: int) -> list[tuple[int, int]]:
    """Offsets from `place` on that leave no character between two tokens: byte-level tokenizers do not count the spaces
    with which a token begins."""
    borders: list[tuple[int, int]] = []
    behind = 0
    for start, stop in offsets:
        borders.append((place + min(start, behind), place + stop))
        behind = stop
    return borders


def well_formed(text: str) -> str:
    """Returns `text` without halves of surrogate pairs, which JSON can write and no tokenizer accepts."""
    return text.encode(errors="replace").decode()
