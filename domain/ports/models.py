"""Ports: the trained policy, the critic and the frozen reference, over packed batches."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from attrs import field, frozen
from torch import Tensor

from rollgrad.domain.batches.packed import Batch, PackedBatch
from rollgrad.domain.batches.passes import Passes


@frozen(kw_only=True, eq=False)
class TokenScores:
    """Per-token results of a forward pass, of softmax(logits / temperature) with the sampling temperature of the
    rollout.

    All are float32 where nothing else is said; those that may be None are there if the model was made to find them. A
    model that compares two tokens as what follows the action token computes all of them from these two alone.
    """

    logprobs_N: Tensor
    """Log-prob of each token; 0 outside actions."""
    entropy_N: Tensor
    """Entropy of the distribution that predicts the token (nats); 0 outside actions."""
    correct_N: Tensor | None = None
    """1 where the token is the most likely one, else 0."""
    mean_logprobs_N: Tensor | None = None
    """Mean of the log-probs over the vocabulary."""
    collision_N: Tensor | None = None
    """Collision entropy of the distribution that predicts the token, -log sum_v p_v^2 (nats)."""
    divergence_N: Tensor | None = None
    """Divergence from a teacher of the distribution that predicts the token; None without a teacher."""
    odds_N: Tensor | None = None
    """Logit of the first of two compared tokens less that of the second."""
    experts_NLK: Tensor | None = None
    """Experts of a mixture that each token of the batch went to, as a batch has them."""
    mean_score_N: Tensor | None = None
    """As in `CentredScores` (score centering), with a gradient; None, too, where the batch lacks what it is made of."""
    policy_mass_N: Tensor | None = None
    """As in `CentredScores`, without a gradient."""
    residual_N: Tensor | None = None
    """As in `CentredScores`, without a gradient."""


@frozen(kw_only=True, eq=False)
class LossOutput:
    """Result of an objective."""

    loss: Tensor
    """Scalar to differentiate, already weighted for the whole step."""
    metrics: Mapping[str, Tensor | float] = field(factory=dict)
    """Metrics of the micro-batch, each of which says how it is combined (`domain.batches.metrics`): a plain number or
    0-d tensor is a sum of loss weight x value, any other kind a `Metric`."""
    clipped_N: Tensor | None = None
    """Bool: tokens whose ratio was clipped, for whoever looks at single tokens; None of an objective without ratios."""


PolicyObjective = Callable[[TokenScores, Batch], LossOutput]
"""Function from the current policy's scores and a micro-batch to its share of the step's loss. It reads the
columns that it needs from its kind of batch, whose units are whole in every micro-batch."""

ValueObjective = Callable[[Tensor, Batch], LossOutput]
"""Function from the current scalar head's values_N and a micro-batch to its share of the step's loss."""


@frozen(kw_only=True, eq=False)
class Predictions:
    """A model's predictions of A tokens, of the K that it finds most likely: `ids_AK` int32, and `logprobs_AB`
    float32 (nats), where they are kept in files float16, of those K and, in the last place, of all others together."""

    ids_AK: Tensor
    logprobs_AB: Tensor


@runtime_checkable
class PredictingModel(Protocol):
    """A model that says which tokens it finds most likely in a token's place."""

    def predict(self, batch: PackedBatch, top_k: int) -> Predictions:
        """Returns the model's predictions of the action tokens, `top_k` tokens each, without gradient, on the CPU."""
        ...

    def predictions(self, passes: Passes[Any], top_k: int) -> Predictions:
        """Returns the model's predictions of all tokens of the batch that the passes divide; 0 outside actions."""
        batches = [*passes]
        found = [self.predict(batch, top_k) for batch in batches]
        return Predictions(
            ids_AK=passes.merged([own.placed(each.ids_AK) for own, each in zip(batches, found, strict=True)]),
            logprobs_AB=passes.merged([own.placed(each.logprobs_AB) for own, each in zip(batches, found, strict=True)]),
        )


@runtime_checkable
class PolicyModel(Protocol):
    """The model being trained.

    Promises: `update` is one optimizer step whose gradient is that of the summed losses of its micro-batches, in
    any split; a non-finite loss or gradient raises `NonFiniteUpdateError` before any parameter changes. Only a
    gradient that overflows float16 does not raise: that step is skipped. A step after which nothing can be computed
    with the weights raises `ExplodedWeightsError`.
    """

    steps: int = 0
    """Optimizer steps begun: weights that were sent are the policy's own as long as it stays."""

    def padded(self) -> bool:
        """Returns whether sequences are computed side by side, padded to the longest of a pass and without sharing what
        they begin with, rather than end to end."""
        return False

    def score(self, batch: PackedBatch) -> TokenScores:
        """Returns the log-probs and entropy of the action tokens, without gradient."""
        ...

    def logprobs(self, passes: Passes[Any]) -> Tensor:
        """Returns the log-probs of the action tokens of the batch that the passes divide, float32, 0 elsewhere."""
        return self.scores(passes).logprobs_N

    def scores(self, passes: Passes[Any]) -> TokenScores:
        """Returns the log-probs and entropy of the action tokens of the batch that the passes divide, and the experts
        that each of its tokens went to and the collision entropies, if the model keeps or finds them."""
        scores = [self.score(batch) for batch in passes]
        experts = [each.experts_NLK for each in scores if each.experts_NLK is not None]
        collisions = [each.collision_N for each in scores if each.collision_N is not None]
        return TokenScores(
            logprobs_N=passes.merged([each.logprobs_N for each in scores]),
            entropy_N=passes.merged([each.entropy_N for each in scores]),
            experts_NLK=passes.merged(experts) if experts else None,
            collision_N=passes.merged(collisions) if collisions else None,
        )

    def update(self, micro_batches: Sequence[Batch], objective: PolicyObjective[Batch]) -> dict[str, float]:
        """Takes one optimizer step; returns the combined metrics of its micro-batches, plus `loss` (a `Total`),
        `grad_norm` and `lr` (both `Common`).

        In float16 it also returns `loss_scale` (`Common`) and `skipped_steps` (a `Count`): 1 if the gradient overflowed
        (there is no `grad_norm` then), else 0.
        """
        ...

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yields every parameter once, by its Hugging Face name, in the compute dtype; tied tensors once."""
        ...

    def save(self, path: Path) -> None:
        """Writes a Hugging Face checkpoint (safetensors) with tokenizer to the directory `path`.

        Raises:
            CheckpointError: the directory cannot be written.
        """
        ...

    def state_dict(self) -> Mapping[str, Any]:
        """Returns everything that `load_state_dict` needs to continue as if never interrupted: copies, which the next
        update does not change, or a `PartInFiles`."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores `state_dict`."""
        ...


@runtime_checkable
class AveragedPolicy(PolicyModel, PredictingModel, Protocol):
    """A policy that keeps a moving average of its weights."""

    def averaged(self) -> AbstractContextManager[None]:
        """Returns the context inside which the policy computes with the averages."""
        ...


@frozen(kw_only=True)
class AdamRates:
    """Constants of one step of AdamW, whose weight decay is decoupled; `max_norm` is the norm of the gradient above
    which it is scaled down, 0 for never."""

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    max_norm: float


@runtime_checkable
class StepwisePolicy(PolicyModel, Protocol):
    """A policy whose gradients and optimizer steps a client asks for one by one.

    Promises: the gradient of a step is that of the summed losses of all that was accumulated since the last one.
    """

    def accumulate(self, passes: Passes[Batch], objective: PolicyObjective[Batch]) -> tuple[Tensor, dict[str, float]]:
        """Adds the gradient of the passes' summed losses to that of the next step; returns logprobs_N of the whole
        batch, and the combined metrics with `loss`, their sum.

        Raises:
            NonFiniteUpdateError: a loss is not finite; all that was accumulated is dropped.
        """
        ...

    def evaluate(self, passes: Passes[Batch], objective: PolicyObjective[Batch]) -> tuple[Tensor, float]:
        """Returns logprobs_N of the whole batch, and the summed losses, without gradient."""
        ...

    def step(self, rates: AdamRates) -> dict[str, float]:
        """Takes an optimizer step with what was accumulated; returns `grad_norm` and `lr`.

        Raises:
            NonFiniteUpdateError: the gradient is not finite; nothing has changed, and it is dropped.
            ExplodedWeightsError: nothing can be computed with the weights that the step has made.
        """
        ...

    def clear(self) -> None:
        """Drops what was accumulated."""
        ...


@runtime_checkable
class ValueModel(Protocol):
    """The critic of PPO: a value for every token position. Same promises as `PolicyModel`."""

    def padded(self) -> bool:
        """Returns what `PolicyModel.padded` does."""
        return False

    def values(self, batch: PackedBatch) -> Tensor:
        """Returns values_N float32, the expected return before each action token is sampled; 0 outside actions."""
        ...

    def all_values(self, passes: Passes[Any]) -> Tensor:
        """Returns `values` of the batch that the passes divide."""
        return passes.merged([self.values(batch) for batch in passes])

    def update(self, micro_batches: Sequence[Batch], objective: ValueObjective[Batch]) -> dict[str, float]:
        """Takes one optimizer step; returns the same as `PolicyModel.update`."""
        ...

    def save(self, path: Path) -> None:
        """Writes the critic as a Hugging Face checkpoint with its value head."""
        ...

    def state_dict(self) -> Mapping[str, Any]:
        """Returns everything that `load_state_dict` needs."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores `state_dict`."""
        ...


@runtime_checkable
class TrainedReward(ValueModel, Protocol):
    """A reward model being trained: one score for each action token, which stands for the text up to it, that token
    included."""

    def values(self, batch: PackedBatch) -> Tensor:
        """Returns scores_N float32, 0 outside actions."""
        ...

    def set_moments(self, moments: tuple[float, float] | None) -> None:
        """Sets the mean and the standard deviation of held-out scores, which `save` writes; None if nobody knows."""
        ...

    def save(self, path: Path) -> None:
        """Writes a sequence classifier with one label and its tokenizer to the directory `path`, with the mean and the
        standard deviation, if they are set, as `mean` and `std` in config.json."""
        ...


@runtime_checkable
class TeacherModel(Protocol):
    """A frozen model that others are to predict like."""

    def predict(self, batch: PackedBatch) -> Predictions:
        """Returns the model's predictions of the action tokens, on the CPU."""
        ...


@runtime_checkable
class ReferenceModel(Protocol):
    """A frozen policy, from which the KL divergence of the trained one is measured."""

    def padded(self) -> bool:
        """Returns what `PolicyModel.padded` does."""
        return False

    def score(self, batch: PackedBatch) -> TokenScores:
        """Returns the log-probs and entropy of the action tokens under the frozen weights."""
        ...

    def logprobs(self, passes: Passes[Any]) -> Tensor:
        """Returns the log-probs of the action tokens of the batch that the passes divide, float32, 0 elsewhere."""
        return passes.merged([self.score(batch).logprobs_N for batch in passes])
