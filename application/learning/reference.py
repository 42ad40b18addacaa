"""Log-probs of preference pairs and labelled replies under a frozen reference: computed once, before training, and
kept.

Invariant: a key stands for one reference and one list of examples, so that what is kept under it never differs from
what would be computed. A pass that was interrupted goes on where it stopped.
"""

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import structlog
import torch
from attrs import evolve
from torch import Tensor

from rollgrad.application.learning.microbatch import split
from rollgrad.domain.batches.examples import pack_sequences
from rollgrad.domain.batches.packed import PackedBatch
from rollgrad.domain.episodes.examples import Label, Preference, WeightedTokens
from rollgrad.domain.errors import ConfigurationError
from rollgrad.domain.ports.example_source import ExampleSource
from rollgrad.domain.ports.models import PolicyModel, ReferenceModel, TokenScores
from rollgrad.domain.ports.score_store import ScoreStore

log = structlog.get_logger(__name__)

CHUNK = 128
"""Examples that are scored, and kept, together."""
CHECKED = 8
"""Examples by which a policy is compared with its reference."""

Judged = TypeVar("Judged", Preference, Label)


class Referenced(ExampleSource[Judged], Generic[Judged]):
    """`examples`, each with its `scores`: log-probs of its trained tokens under a reference."""

    def __init__(self, examples: ExampleSource[Judged], scores: Sequence[Tensor]) -> None:
        self._examples: ExampleSource[Judged] = examples
        self._scores = scores

    def __len__(self) -> int:
        return len(self._examples)

    def __getitem__(self, index: int) -> Judged:
        example: Judged = evolve(self._examples[index], ref_logprobs_A=self._scores[index])
        return example


def with_reference(
    examples: ExampleSource[Judged],
    make_reference: Callable[[], ReferenceModel],
    store: ScoreStore,
    *,
    key: str,
    max_tokens: int,
    shares: int = 1,
    name: str = "the examples",
) -> Referenced[Judged]:
    """Returns the examples with their log-probs under a reference.

    Args:
        examples: all of them are scored, in their order.
        make_reference: loads the reference; not called if all log-probs are kept.
        store: where they are kept.
        key: of the reference and the examples.
        max_tokens: token budget of one forward pass.
        shares: number of equal shares of it, as in `split`.
        name: says in the log which examples they are.
    """
    scores = store.load(key)[: len(examples)]
    if len(scores) < len(examples):
        log.info(f"computing the reference's log-probs of {name}", examples=len(examples), kept=len(scores))
        reference = make_reference()
        for first in range(len(scores), len(examples), CHUNK):
            chunk = [examples[index].replies for index in range(first, min(first + CHUNK, len(examples)))]
            found = trained_logprobs(reference.score, chunk, max_tokens, shares)
            scores.extend(store.append(key, first, found))
    return Referenced(examples, scores)


def check_start(
    policy: PolicyModel,
    examples: ExampleSource[Judged],
    *,
    max_tokens: int,
    tolerance: float,
    shares: int = 1,
    otherwise: str = "the loss would not begin at log 2",
) -> None:
    """Checks that a policy that has not been trained gives what its reference gives, so that the loss of DPO begins at
    log 2.

    Args:
        policy: scores some examples.
        examples: with the reference's log-probs.
        max_tokens: token budget of one forward pass.
        shares: number of equal shares of it, as in `split`.
        tolerance: mean difference of a token's log-prob that rounding may make, in nats.
        otherwise: what would be wrong if they differed, for the error.

    Raises:
        ConfigurationError: they differ by more.
    """
    some = [examples[index] for index in range(min(CHECKED, len(examples)))]
    expected = torch.cat([example.ref_logprobs_A for example in some if example.ref_logprobs_A is not None])
    found = torch.cat(trained_logprobs(policy.score, [example.replies for example in some], max_tokens, shares))
    gap = float((found - expected).abs().mean())
    if not gap <= tolerance:
        raise ConfigurationError(
            f"The policy is not yet trained, but its log-probs differ from the reference's by {gap:.3g} a token "
            f"(rounding makes up to {tolerance:g}), so that {otherwise}. Usual causes: the "
            "reference has another chat template or tokenizer, another number format or kernel (--actor.dtype), or "
            "dropout is on. If the model's files were changed in place, remove the kept log-probs (the directory "
            "reference below --data.cache_dir, or below rollgrad in ~/.cache)."
        )


def trained_logprobs(
    score: Callable[[PackedBatch], TokenScores],
    examples: Sequence[Sequence[WeightedTokens]],
    max_tokens: int,
    shares: int = 1,
) -> list[Tensor]:
    """Returns the log-probs of the trained tokens of each example, which is one or several replies to a prompt: float32
    on the CPU."""
    batch = pack_sequences(
        [reply for replies in examples for reply in replies],
        group_ids=[place for place, replies in enumerate(examples) for _ in replies],
        sample_ids=[number for replies in examples for number in range(len(replies))],
    )
    parts = split(batch, max_tokens, shares)
    columns = [score(part).logprobs_N[part.action_mask_N].float().cpu() for part in parts]
    sizes = [sum(reply.trained_length for reply in replies) for replies in examples]
    scores: tuple[Tensor, ...] = torch.cat(columns).split_with_sizes(sizes)
    return list(scores)
