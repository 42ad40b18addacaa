"""Log-probs of preference pairs and labelled replies under a frozen reference: computed before training and kept, as
`scores` describes, or in each step for examples that are streamed."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from attrs import evolve, frozen
from torch import Tensor

from rollgrad.application.learning.microbatch import split
from rollgrad.application.learning.scores import ScoredExamples, kept_scores
from rollgrad.domain.batches.examples import pack_sequences
from rollgrad.domain.episodes.examples import Label, Preference, WeightedTokens
from rollgrad.domain.errors import ConfigurationError
from rollgrad.domain.ports.example_source import ExampleSource
from rollgrad.domain.ports.models import PolicyModel, ReferenceModel
from rollgrad.domain.ports.score_store import ScoreStore

Judged = TypeVar("Judged", Preference, Label)


def with_reference(
    examples: ExampleSource[Judged],
    make_reference: Callable[[], ReferenceModel],
    store: ScoreStore,
    *,
    key: str,
    max_tokens: int,
    shares: int = 1,
    name: str = "the examples",
) -> ScoredExamples[Judged]:
    """Returns the examples with their log-probs under a reference.

    Args:
        examples: all of them are scored, in their order.
        make_reference: loads the reference; not called if all log-probs are kept.
        store: where they are kept.
        key: key of the reference and the examples.
        max_tokens: token budget of one forward pass.
        shares: number of equal shares of it, as in `split`.
        name: says in the log which examples they are.
    """

    def score(reference: ReferenceModel, chunk: list[Judged]) -> list[Tensor]:
        return trained_logprobs(reference, [example.replies for example in chunk], max_tokens, shares)

    name = f"the reference's log-probs of {name}"
    scores = kept_scores(examples, make_reference, score, store, key=key, name=name)
    return ScoredExamples(examples, scores, lambda example, found: evolve(example, ref_logprobs_A=found))


@frozen(kw_only=True)
class LiveReference:
    """A reference that stays in memory while a model is trained.

    Attributes:
        model: gives it; loads it when it is asked for the first time.
        max_tokens: token budget of one forward pass.
        shares: number of equal shares of it, as in `split`.
    """

    model: Callable[[], ReferenceModel | PolicyModel]
    max_tokens: int
    shares: int = 1

    def logprobs(self, examples: Sequence[Sequence[WeightedTokens]]) -> list[Tensor]:
        """Returns the log-probs of the trained tokens of each example, as `trained_logprobs` does."""
        return trained_logprobs(self.model(), examples, self.max_tokens, self.shares)

    def of(self, examples: Sequence[Judged]) -> list[Judged]:
        """Returns the examples with their log-probs; those that have theirs are not scored."""
        missing = [example.replies for example in examples if example.ref_logprobs_A is None]
        found = iter(self.logprobs(missing) if missing else [])
        return [
            evolve(example, ref_logprobs_A=next(found)) if example.ref_logprobs_A is None else example
            for example in examples
        ]


def check_start(
    policy: PolicyModel,
    examples: Sequence[Judged],
    *,
    max_tokens: int,
    tolerance: float,
    shares: int = 1,
    otherwise: str = "the loss would not begin at log 2",
) -> None:
    """Checks that an untrained policy has the log-probs of its reference, so that the loss of DPO begins at log 2.

    Args:
        policy: scores the examples.
        examples: a few, with the reference's log-probs.
        max_tokens: token budget of one forward pass.
        shares: number of equal shares of it, as in `split`.
        tolerance: mean difference of a token's log-prob that rounding may make, in nats.
        otherwise: what would be wrong if they differed, for the error.

    Raises:
        ConfigurationError: they differ by more.
    """
    expected = torch.cat([example.ref_logprobs_A for example in examples if example.ref_logprobs_A is not None])
    found = torch.cat(trained_logprobs(policy, [example.replies for example in examples], max_tokens, shares))
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
    model: PolicyModel | ReferenceModel,
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
    passes = split(batch, max_tokens, shares, padded=model.padded())
    logprobs_N = passes.merged([model.score(part).logprobs_N.float().cpu() for part in passes])
    sizes = [sum(reply.trained_length for reply in replies) for replies in examples]
    scores: tuple[Tensor, ...] = logprobs_N[batch.action_mask_N].split_with_sizes(sizes)
    return list(scores)
