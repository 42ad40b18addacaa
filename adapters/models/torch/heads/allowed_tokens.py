"""Tokens that a grammar allowed where a reply was sampled, of which alone the model's distribution is there.

Masks are made anew from the grammar and the sampled tokens, by whatever made them for the sampler. Does not own:
following grammars (`adapters/engines/embedded/grammars.py`).
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from rollgrad.adapters.models.torch.kernels.moving import to_device
from rollgrad.domain.batches.packed import PackedBatch
from rollgrad.domain.errors import ConfigurationError

Masks = Callable[[str, Sequence[int]], Tensor]
"""Function that returns, for a grammar and the tokens of a reply that follows it, the tokens that the grammar allowed
in the place of each: uint8 [T, B], a bit for each token of the vocabulary, the lowest of a byte first."""

MASKS = "_rollgrad_masks"
"""Attribute of a model with its `Masks`."""
BITS = 8


def follow_grammars(model: Any, masks: Masks | None) -> None:
    """Makes log-probs and entropies of replies that follow a grammar those of the tokens that it allows."""
    setattr(model, MASKS, masks)


@frozen(kw_only=True, eq=False)
class AllowedTokens:
    """The tokens that are possible in some of a batch's rows of logits. `rows_R` int64, ascending, has the indices of
    these rows; it is on the CPU, so that nothing waits for a GPU. `bits_RB` uint8, as `Masks` returns them, is on the
    device of the logits."""

    rows_R: Tensor
    bits_RB: Tensor

    def restrict(self, logits_AV: Tensor, start: int, first: int = 0) -> None:
        """Sets the logits of all other tokens to minus infinity. The first of `logits_AV` are those of row `start`, and
        in each row the first is that of the token `first` of the vocabulary."""
        bounds = torch.searchsorted(self.rows_R, torch.tensor([start, start + len(logits_AV)]))
        inside = slice(*bounds.tolist())
        rows, vocabulary = to_device(self.rows_R[inside] - start, logits_AV.device), logits_AV.shape[1]
        place_8 = torch.arange(BITS, dtype=torch.uint8, device=rows.device)
        allowed = ((self.bits_RB[inside, :, None] >> place_8) & 1).flatten(1)[:, first : first + vocabulary] > 0
        # The head may have rows beyond the tokenizer's tokens, which are never possible.
        allowed = torch.nn.functional.pad(allowed, (0, vocabulary - allowed.shape[1]))
        logits_AV[rows] = logits_AV[rows].masked_fill(~allowed, float("-inf"))


def allowed_tokens(model: Any, batch: PackedBatch, places_B: Tensor, device: torch.device) -> AllowedTokens | None:
    """Returns the tokens that were possible in the place of each action token of `batch` that was sampled under a
    grammar, for logits on a device; None if there is none. Rows are counted among `places_B`, ascending, those of the
    action tokens that this process computes (a group of processes divides them).

    Raises:
        ConfigurationError: the model was made without the means to follow grammars.
        DataError: tokens are none that their grammar allows.
    """
    if not any(batch.prescribed_S):
        return None
    masks: Masks | None = getattr(model, MASKS, None)
    if masks is None:
        raise ConfigurationError(
            "Some replies were sampled in a prescribed form, which this model cannot follow when it computes their "
            "log-probs: let replies be free where they are sampled."
        )
    rows_N = torch.full((batch.token_count,), -1)
    rows_N[places_B] = torch.arange(len(places_B))
    rows, bits = [], []
    for start, segments in zip(batch.starts_S.tolist(), batch.prescribed_S, strict=True):
        for segment in segments:
            assert segment.grammar is not None
            part = slice(start + segment.start, start + segment.stop)
            here_T = rows_N[part] >= 0
            rows.append(rows_N[part][here_T])
            bits.append(masks(segment.grammar, batch.tokens_N[part].tolist())[here_T])
    return AllowedTokens(rows_R=torch.cat(rows), bits_RB=to_device(torch.cat(bits), device))
