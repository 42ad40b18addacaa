"""Division of a batch into forward passes within a token budget."""

from rollgrad.domain.batches.packed import Batch
from rollgrad.domain.batches.partition import divided, micro_batches, padded_passes, pieces
from rollgrad.domain.batches.passes import Passes
from rollgrad.domain.batches.prefixes import shared_prefixes


def split(batch: Batch, max_tokens: int, shares: int = 1, *, padded: bool = False) -> Passes[Batch]:
    """Returns parts of `batch`, each a forward pass of at most `max_tokens` distinct tokens: a longer unit goes alone,
    or cut where no loss compares its sequences. Each of the `shares` of a part, one for each process or group of them,
    is within its share of `max_tokens`, or as long as the longest unit; the whole batch is divided among them once, and
    each share into passes then. With one share sequences stay in order.

    For a model that computes sequences `padded`, the tokens of a pass are its rows times the longest, and sequences of
    similar lengths go together."""
    budget = max_tokens // shares
    if padded:
        return Passes(batch, padded_passes(batch, budget, shares))
    together = pieces(batch, budget, shared_prefixes(batch))
    own = divided(together, shares) if shares > 1 else [together]
    found = [micro_batches(share, budget) for share in own]
    count = max(map(len, found))
    found = [f if len(f) == count else micro_batches(p, budget, count) for f, p in zip(found, own, strict=True)]
    runs = [[[s for piece in run for s in piece.sequences] for run in share] for share in found]
    return Passes(batch, [[share[number] if number < len(share) else [] for share in runs] for number in range(count)])
