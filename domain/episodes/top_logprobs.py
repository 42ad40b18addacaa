"""The most likely tokens at each place of a reply, as the policy that sampled it saw them: compact, for those that are
learned from are many. Suffixes: R places, K tokens a place.
"""

from collections.abc import Sequence
from typing import overload

import torch
from attrs import frozen
from torch import Tensor

NOBODY = float("-inf")
"""Log-prob where there is no token: fewer were possible at the place, or nobody said which."""


@frozen(eq=False)
class TopLogprobs(Sequence[list[tuple[int, float]]]):
    """`ids_RK` int32 and `logprobs_RK` float32, the likeliest first; `NOBODY` where a place has fewer. As a sequence it
    is that of each place's pairs (token id, log-prob)."""

    ids_RK: Tensor
    logprobs_RK: Tensor

    @classmethod
    def of(cls, places: Sequence[Sequence[tuple[int, float]]]) -> "TopLogprobs":
        """Returns the tokens of `places`, each of which may have any number."""
        if isinstance(places, cls):
            return places
        shape = len(places), max(map(len, places), default=0)
        ids_RK, logprobs_RK = torch.zeros(shape, dtype=torch.int32), torch.full(shape, NOBODY)
        for place, pairs in enumerate(places):
            if pairs:
                ids, logprobs = zip(*pairs, strict=True)
                ids_RK[place, : len(pairs)] = torch.tensor(ids, dtype=torch.int32)
                logprobs_RK[place, : len(pairs)] = torch.tensor(logprobs)
        return cls(ids_RK, logprobs_RK)

    @overload
    def __getitem__(self, place: int) -> list[tuple[int, float]]: ...
    @overload
    def __getitem__(self, place: slice) -> "TopLogprobs": ...
    def __getitem__(self, place: int | slice) -> "list[tuple[int, float]] | TopLogprobs":
        if isinstance(place, slice):
            return TopLogprobs(self.ids_RK[place], self.logprobs_RK[place])
        pairs = zip(self.ids_RK[place].tolist(), self.logprobs_RK[place].tolist(), strict=True)
        return [pair for pair in pairs if pair[1] > NOBODY]

    def __len__(self) -> int:
        return len(self.ids_RK)

    def widened(self, count: int) -> "TopLogprobs":
        """Returns the same with room for `count` tokens a place, which are no fewer than there are."""
        more = 0, count - self.ids_RK.shape[1]
        pad = torch.nn.functional.pad
        return self if not more[1] else TopLogprobs(pad(self.ids_RK, more), pad(self.logprobs_RK, more, value=NOBODY))

    def narrowed(self, count: int) -> "TopLogprobs":
        """Returns the same with the first `count` tokens of each place."""
        return TopLogprobs(self.ids_RK[:, :count], self.logprobs_RK[:, :count])


def end_to_end(parts: Sequence[Sequence[Sequence[tuple[int, float]]]]) -> TopLogprobs:
    """Returns the tokens of several replies, or of their parts, one after the other."""
    compact = [TopLogprobs.of(part) for part in parts] or [unsaid(0)]
    count = max(part.ids_RK.shape[1] for part in compact)
    wide = [part.widened(count) for part in compact]
    return TopLogprobs(torch.cat([w.ids_RK for w in wide]), torch.cat([w.logprobs_RK for w in wide]))


def unsaid(length: int) -> TopLogprobs:
    """Returns `length` places whose likeliest tokens are not known."""
    return TopLogprobs(torch.zeros(length, 0, dtype=torch.int32), torch.zeros(length, 0))
