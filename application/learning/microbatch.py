"""Division of a batch into forward passes within a token budget; before each of them an update may break off."""

from typing import overload

from rollgrad.application.interruption import heed_stop
from rollgrad.domain.batches.packed import Batch
from rollgrad.domain.batches.partition import divided, micro_batches, padded_passes, pieces
from rollgrad.domain.batches.passes import Passes
from rollgrad.domain.batches.prefixes import shared_prefixes


class BreakablePasses(Passes[Batch]):
    """The passes of an update, which heeds before each of them that the run is to stop."""

    @overload
    def __getitem__(self, number: int) -> Batch: ...
    @overload
    def __getitem__(self, number: slice) -> list[Batch]: ...
    def __getitem__(self, number: int | slice) -> Batch | list[Batch]:
        heed_stop()
        return super().__getitem__(number)


def split(batch: Batch, max_tokens: int, shares: int = 1, *, padded: bool = False) -> Passes[Batch]:
    """Returns parts of `batch`, each a forward pass of at most `max_tokens` distinct tokens: a longer unit goes alone,
    or cut where no loss compares its sequences. A part has `shares` shares, one for each process or group of processes.
    Each share is within its part of `max_tokens`, or as long as the longest unit. The whole batch is divided among them
    first, and then each share into passes. With one share sequences stay in order.

    For a model that computes sequences `padded`, the tokens of a pass are its rows times the longest, and sequences of
    similar lengths go together. Before each pass, and before all of them, an update heeds that the run is to stop."""
    heed_stop()  # a group of processes gets all passes in one call
    budget = max_tokens // shares
    if padded:
        return BreakablePasses(batch, padded_passes(batch, budget, shares))
    together = pieces(batch, budget, shared_prefixes(batch))
    own = divided(together, shares) if shares > 1 else [together]
    found = [micro_batches(share, budget) for share in own]
    count = max(map(len, found))
    found = [f if len(f) == count else micro_batches(p, budget, count) for f, p in zip(found, own, strict=True)]
    runs = [[[s for piece in run for s in piece.sequences] for run in share] for share in found]
    return BreakablePasses(
        batch, [[share[number] if number < len(share) else [] for share in runs] for number in range(count)]
    )
