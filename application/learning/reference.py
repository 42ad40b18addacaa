"""Log-probs of preference pairs under a frozen reference: computed once, before training, and kept.

Invariant: a key stands for one reference and one list of pairs, so that what is kept under it never differs from what
would be computed. A pass that was interrupted goes on where it stopped.
"""

from collections.abc import Callable, Sequence

import structlog
import torch
from attrs import evolve
from torch import Tensor

from rollgrad.application.learning.microbatch import split
from rollgrad.domain.batches.examples import pack_preferences
from rollgrad.domain.batches.packed import PackedBatch
from rollgrad.domain.episodes.examples import Preference
from rollgrad.domain.errors import ConfigurationError
from rollgrad.domain.ports.example_source import ExampleSource
from rollgrad.domain.ports.models import PolicyModel, ReferenceModel, TokenScores
from rollgrad.domain.ports.score_store import ScoreStore

log = structlog.get_logger(__name__)

CHUNK = 128
"""Pairs that are scored, and kept, together."""
CHECKED = 8
"""Pairs by which a policy is compared with its reference."""


class ReferencedPairs(ExampleSource[Preference]):
    """`pairs`, each with its `scores`: log-probs of its trained tokens under a reference."""

    def __init__(self, pairs: ExampleSource[Preference], scores: Sequence[Tensor]) -> None:
        self._pairs = pairs
        self._scores = scores

    def __len__(self) -> int:
        return len(self._pairs)

    def __getitem__(self, index: int) -> Preference:
        return evolve(self._pairs[index], ref_logprobs_A=self._scores[index])


def with_reference(
    pairs: ExampleSource[Preference],
    make_reference: Callable[[], ReferenceModel],
    store: ScoreStore,
    *,
    key: str,
    max_tokens: int,
    shares: int = 1,
    name: str = "the pairs",
) -> ReferencedPairs:
    """Returns the pairs with their log-probs under a reference.

    Args:
        pairs: all of them are scored, in their order.
        make_reference: loads the reference; not called if all log-probs are kept.
        store: where they are kept.
        key: of the reference and the pairs.
        max_tokens: token budget of one forward pass.
        shares: number of equal shares of it, as in `split`.
        name: says in the log which pairs they are.
    """
    scores = store.load(key)[: len(pairs)]
    if len(scores) < len(pairs):
        log.info(f"computing the reference's log-probs of {name}", pairs=len(pairs), kept=len(scores))
        reference = make_reference()
        for first in range(len(scores), len(pairs), CHUNK):
            chunk = [pairs[index] for index in range(first, min(first + CHUNK, len(pairs)))]
            found = _scores(reference.score, chunk, max_tokens, shares)
            store.append(key, first, found)
            scores.extend(found)
    return ReferencedPairs(pairs, scores)


def check_start(
    policy: PolicyModel, pairs: ExampleSource[Preference], *, max_tokens: int, tolerance: float, shares: int = 1
) -> None:
    """Checks that a policy that has not been trained gives what its reference gives, so that the loss of DPO begins at
    log 2.

    Args:
        policy: scores some pairs.
        pairs: with the reference's log-probs.
        max_tokens: token budget of one forward pass.
        shares: number of equal shares of it, as in `split`.
        tolerance: mean difference of a token's log-prob that rounding may make, in nats.

    Raises:
        ConfigurationError: they differ by more.
    """
    chosen = [pairs[index] for index in range(min(CHECKED, len(pairs)))]
    expected = [pair.ref_logprobs_A for pair in chosen if pair.ref_logprobs_A is not None]
    gap = float((torch.cat(_scores(policy.score, chosen, max_tokens, shares)) - torch.cat(expected)).abs().mean())
    if not gap <= tolerance:
        raise ConfigurationError(
            f"The policy is not yet trained, but its log-probs differ from the reference's by {gap:.3g} a token "
            f"(rounding makes up to {tolerance:g}), so that the loss would not begin at log 2. Usual causes: the "
            "reference has another chat template or tokenizer, another number format or kernel (--actor.dtype), or "
            "dropout is on. If the model's files were changed in place, remove the kept log-probs (the directory "
            "reference below --data.cache_dir, or below rollgrad in ~/.cache)."
        )


def _scores(
    score: Callable[[PackedBatch], TokenScores], pairs: Sequence[Preference], max_tokens: int, shares: int
) -> list[Tensor]:
    """Returns the log-probs of each pair's trained tokens, on the CPU."""
    batch = pack_preferences([evolve(pair, weight=1.0, ref_logprobs_A=None) for pair in pairs])
    parts = split(batch, max_tokens, shares)
    columns = [score(part).logprobs_N[part.action_mask_N].float().cpu() for part in parts]
    sizes = [pair.chosen.trained_length + pair.rejected.trained_length for pair in pairs]
    scores: tuple[Tensor, ...] = torch.cat(columns).split_with_sizes(sizes)
    return list(scores)
