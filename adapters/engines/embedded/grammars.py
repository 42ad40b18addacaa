"""Masks of the tokens that a grammar allows, by llguidance."""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch

from rollgrad.adapters.models.torch.kernels.moving import to_device
from rollgrad.domain.errors import DataError


class Grammars:
    """Follows grammars over the tokens of `tokenizer`, a fast tokenizer of transformers.

    Args:
        tokenizer: tokenizer of the model.
        eos_token_ids: tokens that end a reply, which are allowed where the text is complete.
    """

    def __init__(self, tokenizer: Any, eos_token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._eos = sorted(eos_token_ids)

    @cached_property
    def _tokens(self) -> Any:
        """llguidance's tokenizer, which takes a second to make for a large vocabulary."""
        if getattr(self._tokenizer, "backend_tokenizer", None) is None:
            raise DataError(
                f"The tokenizer of {self._tokenizer.name_or_path!r} is none that a form of replies can be prescribed "
                "with: use a fast tokenizer (one with a tokenizer.json)."
            )
        from llguidance.hf import from_tokenizer

        return from_tokenizer(self._tokenizer, eos_token=self._eos)

    def begin(self, grammar: str, begun: Sequence[int] = ()) -> "Matcher":
        """Returns a matcher for a reply that has begun with these tokens.

        Raises:
            DataError: it is no grammar, or the reply has left it.
        """
        from llguidance import LLMatcher

        found = LLMatcher(self._tokens, grammar, log_level=0)
        if found.is_error() or not found.consume_tokens(list(begun)):
            raise DataError(f"The grammar of the reply cannot be followed: {_first_line(found.get_error())}")
        return Matcher(found)

    def masks(self, grammar: str, token_ids: Sequence[int]) -> torch.Tensor:
        """Returns which tokens the grammar allowed in the place of each token of a reply: uint8 [T, B], a bit for each
        token of the vocabulary, the lowest of a byte first.

        Raises:
            DataError: it is no grammar, or the reply does not follow it.
        """
        matcher = self.begin(grammar)
        rows = []
        for token in token_ids:
            rows.append(matcher.bits())
            matcher.advance(token)
        matcher.check()
        return torch.frombuffer(bytearray(b"".join(rows)), dtype=torch.uint8).view(len(token_ids), -1)


class Matcher:
    """The place of one reply in its grammar."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def restrict(self, logits_V: torch.Tensor) -> None:
        """Sets the logits of tokens that may not come next to minus infinity.

        Raises:
            DataError: see `check`.
        """
        mask = bytearray(self._matcher.compute_logit_bias())
        self.check()
        allowed = to_device(torch.frombuffer(mask, dtype=torch.uint8)[: len(logits_V)], logits_V.device) > 0
        logits_V[: len(allowed)].masked_fill_(~allowed, float("-inf"))
        logits_V[len(allowed) :] = float("-inf")  # rows of the head beyond the tokenizer's tokens

    def bits(self) -> bytes:
        """Returns a bit for each token, the lowest of a byte first: whether it may come next.

        Raises:
            DataError: see `check`.
        """
        bits: bytes = self._matcher.compute_bitmask()
        self.check()
        return bits

    def advance(self, token: int) -> None:
        """Takes the token that was sampled."""
        self._matcher.consume_token(token)

    def check(self) -> None:
        """Returns normally if the reply follows the grammar so far.

        Raises:
            DataError: it does not; or the grammar has no end, or has become too complex to follow.
        """
        if self._matcher.is_error():
            raise DataError(f"The grammar of the reply cannot be followed: {_first_line(self._matcher.get_error())}")


def _first_line(error: str) -> str:
    """Returns what llguidance says is wrong, without the state of its parser."""
    return error.strip().partition("\n")[0]
