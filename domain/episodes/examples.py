"""Examples that offline trainers learn from, as tokens: demonstrations, preferences, labelled replies, labelled steps.

Invariants, checked on construction: a weight for each token, finite and at least 0; the first token of a sequence is
never trained, since nothing predicts it; something is trained.
Does not own: how rows of datasets become tokens (`adapters/data`), nor losses (`domain/algorithms/losses`).
"""

import hashlib
import math
from collections.abc import Sequence

import torch
from attrs import field, frozen
from torch import Tensor

from rollgrad.domain.episodes.images import PlacedImages, check_places
from rollgrad.domain.errors import DataError


@frozen(kw_only=True, eq=False)
class WeightedTokens:
    """One sequence of T tokens: `token_ids_T` int64, and `weights_T` float32, the weight of each token in the loss (0:
    context only). The first `prompt_length` tokens are the prompt, which sequences that begin alike share in a forward
    pass; nothing in it is trained. `images` are those that some tokens stand for, none of which is trained.

    Raises:
        DataError: an invariant of this module does not hold.
    """

    token_ids_T: Tensor
    weights_T: Tensor
    prompt_length: int
    images: PlacedImages = ()

    def __attrs_post_init__(self) -> None:
        length, weights_T = len(self.token_ids_T), self.weights_T
        if len(weights_T) != length:
            raise DataError(f"An example has {length} tokens and {len(weights_T)} weights: each needs one.")
        if not 1 <= self.prompt_length <= length:
            raise DataError(f"A prompt of {self.prompt_length} tokens is not within an example of {length}.")
        if not bool((torch.isfinite(weights_T) & (weights_T >= 0)).all()):
            raise DataError("The weight of a token in the loss must be a finite number of at least 0.")
        if bool(weights_T[: self.prompt_length].any()):
            raise DataError("A token of the prompt has a weight in the loss: only what follows can be trained.")
        check_places(self.images, length)
        if any(bool(weights_T[placed.start : placed.stop].any()) for placed in self.images):
            raise DataError("A token that stands for an image has a weight in the loss: images are never trained.")
        if not bool(weights_T.any()):
            raise DataError("No token of the example has a weight in the loss: there is nothing to learn from.")

    @property
    def trained_length(self) -> int:
        """Number of tokens with a weight above 0."""
        return int((self.weights_T > 0).sum())

    @property
    def first_trained(self) -> int:
        """Index of the first token with a weight above 0."""
        return int((self.weights_T > 0).nonzero()[0])

    @property
    def prompt_key(self) -> bytes:
        """Key of what precedes the first trained token, images apart: equal where that is."""
        return prompt_key(self.token_ids_T[: self.first_trained])

    def __len__(self) -> int:
        return len(self.token_ids_T)


def prompt_key(token_ids_T: Tensor) -> bytes:
    """Returns a key of a prompt's tokens, int64, which equal ones have in common."""
    return hashlib.sha256(token_ids_T.numpy().tobytes()).digest()[:16]


@frozen(kw_only=True, eq=False)
class Demonstration:
    """A conversation or text to imitate.

    What a teacher predicts is None until it is known.
    """

    branches: tuple[WeightedTokens, ...]
    """A chat template that rewrites the history makes several branches: each trained token then stands in the context
    that it has at inference."""
    row: int
    """Place in the data."""
    weight: float = 1.0
    """Factor of its loss."""
    teacher_ids_AK: Tensor | None = None
    """Int32: tokens that a teacher predicts at the A trained tokens of all branches, as in `Predictions`."""
    teacher_logprobs_AB: Tensor | None = None
    """Float16: their log-probs, as in `Predictions`."""
    span_logprobs_A: Tensor | None = None
    """Float32, from a teacher with another vocabulary: the log-prob of each span of text that ends at the same place
    for both, at its last token; infinity there if the teacher says nothing of the span, and NaN at its other tokens."""

    def __len__(self) -> int:
        return sum(map(len, self.branches))


@frozen(kw_only=True, eq=False)
class Preference:
    """A pair of replies to one prompt, of which `chosen` is better.

    Raises:
        DataError: both have the same trained tokens, so that nothing tells them apart.
    """

    chosen: WeightedTokens
    rejected: WeightedTokens
    row: int
    """Place in the data."""
    margin: float = 0.0
    """How much better the chosen reply is, where the data say so (reward models)."""
    weight: float = 1.0
    """Factor of the pair's loss."""
    ref_logprobs_A: Tensor | None = None
    """Float32: log-probs of the trained tokens under a reference, those of the chosen reply first; None until they are
    known."""

    def __attrs_post_init__(self) -> None:
        if torch.equal(self.chosen.token_ids_T, self.rejected.token_ids_T):
            raise DataError("The chosen and the rejected reply are equal token for token: drop the pair.")

    @property
    def replies(self) -> tuple[WeightedTokens, ...]:
        """The chosen and the rejected reply."""
        return self.chosen, self.rejected

    def __len__(self) -> int:
        return len(self.chosen) + len(self.rejected)


@frozen(kw_only=True, eq=False)
class Label:
    """A reply that somebody found good or bad, as KTO learns from."""

    reply: WeightedTokens
    desirable: bool
    """Whether it was found good."""
    row: int
    """Place of its row in the data."""
    weight: float = 1.0
    """Factor of its loss."""
    place: int = 0
    """Place among all replies: a pair's row has two."""
    ref_logprobs_A: Tensor | None = None
    """Float32: log-probs of the trained tokens under a reference; None until they are known."""

    @property
    def replies(self) -> tuple[WeightedTokens, ...]:
        """The reply alone."""
        return (self.reply,)

    def __len__(self) -> int:
        return len(self.reply)


def _is_probability(labels: Sequence[float]) -> bool:
    return all(math.isfinite(label) and 0 <= label <= 1 for label in labels)


@frozen(kw_only=True, eq=False)
class StepLabels:
    """A solution whose steps are labelled, as process reward models learn from.

    Raises:
        DataError: ends and labels differ in number, or are not as described.
    """

    token_ids_T: Tensor
    """Int64."""
    ends: tuple[int, ...] = field(converter=tuple)
    """Index of each step's last token, ascending."""
    labels: tuple[float, ...] = field(converter=tuple)
    """Probability that each step is right (1 or 0 for hard labels)."""
    row: int
    """Place in the data."""
    weight: float = 1.0
    """Factor of the loss."""
    images: PlacedImages = ()
    """Images that some tokens stand for."""

    def __attrs_post_init__(self) -> None:
        if len(self.ends) != len(self.labels) or not self.ends:
            raise DataError(
                f"A solution has {len(self.ends)} steps and {len(self.labels)} labels: it needs at least one "
                "step, and a label for each."
            )
        if list(self.ends) != sorted(set(self.ends)) or self.ends[0] < 0 or self.ends[-1] >= len(self.token_ids_T):
            raise DataError(f"The steps' ends {self.ends} do not ascend within {len(self.token_ids_T)} tokens.")
        if not _is_probability(self.labels):
            raise DataError(f"The steps' labels are {self.labels}: each must be from 0 to 1.")

    def __len__(self) -> int:
        return len(self.token_ids_T)
