"""The experts of a mixture that tokens were sent to, as an engine or a model recorded them.

Small integers: uint8, or int16 of a model with 255 experts and more. The largest number of the type stands for a token
of which nobody has recorded any. Suffixes: L layers of the model, K experts a token.
"""

from collections.abc import Sequence

import torch
from attrs import frozen
from torch import Tensor


@frozen(kw_only=True, eq=False)
class RoutedTokens:
    """R tokens in a row, of which the first has the index `start`: `experts_RLK` are the numbers of their experts, in
    any order, 0 in layers without experts."""

    start: int
    experts_RLK: Tensor


def experts_type(experts: int) -> torch.dtype:
    """Returns the number format in which the numbers of `experts` experts are kept."""
    return torch.uint8 if experts < torch.iinfo(torch.uint8).max else torch.int16


def unrecorded(experts: Tensor) -> int:
    """Returns the number that stands for none, in the type of `experts`."""
    return torch.iinfo(experts.dtype).max


def recorded(routed: Sequence[RoutedTokens], before: int = 0) -> int:
    """Returns how many tokens from the first on have their experts recorded, of which `before` had them already."""
    for part in routed:
        if part.start <= before:
            before = max(before, part.start + len(part.experts_RLK))
    return before


def experts_of(routed: Sequence[RoutedTokens], tokens: int) -> Tensor | None:
    """Returns the experts of each of the first `tokens` tokens, [T, L, K]: those that were recorded first; None where
    nothing was recorded."""
    if not routed:
        return None
    like = routed[0].experts_RLK
    experts_TLK = like.new_full((tokens, *like.shape[1:]), unrecorded(like))
    for part in reversed(routed):
        stop = min(tokens, part.start + len(part.experts_RLK))
        experts_TLK[part.start : stop] = part.experts_RLK[: stop - part.start]
    return experts_TLK


def laid_end_to_end(experts: Sequence[Tensor | None], lengths: Sequence[int]) -> Tensor | None:
    """Returns the experts of sequences of these lengths, [N, L, K]; None where no sequence has any."""
    like = next((each for each in experts if each is not None), None)
    if like is None:
        return None
    none_1LK = like.new_full((1, *like.shape[1:]), unrecorded(like))
    return torch.cat(
        [
            none_1LK.expand(length, -1, -1) if each is None else each
            for each, length in zip(experts, lengths, strict=True)
        ]
    )
