"""Update: epochs over the units of a batch, minibatches (one optimizer step each), micro-batches within a budget."""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from attrs import evolve, frozen
from torch import Tensor

from rollgrad.application.learning.microbatch import split
from rollgrad.domain.algorithms.losses.aggregation import loss_weights
from rollgrad.domain.algorithms.losses.objectives import REFERENCE_KL
from rollgrad.domain.algorithms.settings import Aggregation
from rollgrad.domain.batches.metrics import Common, Count, Metric, Total, over_steps
from rollgrad.domain.batches.packed import RolloutBatch
from rollgrad.domain.batches.partition import minibatches
from rollgrad.domain.ports.checkpoint_store import CheckpointStore
from rollgrad.domain.ports.models import PolicyModel, PolicyObjective, ValueModel, ValueObjective

TURNS_SHOWN = 8
"""Number of first turns whose share of the gradient is logged."""

KINDS: dict[str, type[Metric]] = {
    **dict.fromkeys(("loss", "policy_loss", "positive_nll", "aux_loss"), Total),
    **dict.fromkeys(("grad_norm", "lr", "loss_scale"), Common),
    "skipped_steps": Count,
}
"""Kinds of the metrics of `PolicyModel.update` that are no means over tokens."""


@frozen(kw_only=True)
class UpdateReport:
    """An update: the `metrics` of its optimizer steps, combined as each says (`domain.batches.metrics`), under
    `policy/` and `critic/`; `reference_kl`, the KL term of the policy's loss in nats per token, None without one;
    `loss_weights_N`, the weight of each token of the batch in the loss of its optimizer step, in the last epoch."""

    metrics: dict[str, float]
    reference_kl: float | None = None
    loss_weights_N: Tensor | None = None


class UpdateService:
    """Takes optimizer steps on a batch.

    Metrics of a step are means over the tokens that were passed through the model, weighted as in the loss.

    Args:
        policy: the trained policy.
        critic: the trained critic, or None.
        aggregation: of token losses; weights are fixed for an optimizer step before it is split.
        max_length: constant length of `Aggregation.CONSTANT_LENGTH`, in tokens.
        batch_size: units (rollouts with all their branches) per optimizer step; None takes all.
        planned: units of an update as the learning-rate schedule counts them. If failures leave fewer, steps
            become smaller, not fewer, so that the schedule ends with the run; None: the units of the batch.
        epochs: passes over the units.
        max_tokens: token budget of one micro-batch.
        seed: shuffles samples into minibatches.
        skip_idle: leave samples whose advantages are all 0 out of the policy's passes. Their gradient is exactly 0
            when the loss has no other term (KL, entropy), and the others' weights are fixed before: same gradient,
            less work. GRPO's groups without spread are such samples.
        select: chooses tokens of a whole optimizer step that the loss treats differently, or None.
        pass_threshold: score from which a reply's likelihood is raised, for losses with such a term.
    """

    def __init__(
        self,
        policy: PolicyModel,
        critic: ValueModel | None,
        *,
        aggregation: Aggregation,
        max_length: int,
        batch_size: int | None,
        planned: int | None = None,
        epochs: int,
        max_tokens: int,
        seed: int,
        skip_idle: bool = False,
        select: Callable[[RolloutBatch], Tensor] | None = None,
        pass_threshold: float = 1.0,
    ) -> None:
        self._policy = policy
        self._critic = critic
        self._aggregation = aggregation
        self._max_length = max_length
        self._batch_size = batch_size
        self._planned = planned
        self._epochs = epochs
        self._max_tokens = max_tokens
        self._generator = torch.Generator().manual_seed(seed)
        self._skip_idle = skip_idle
        self._select = select
        self._pass_threshold = pass_threshold
        self.under_way = False
        """Whether a `run` has taken some of its optimizer steps, but not all; after an error it stays so."""

    def run(
        self,
        batch: RolloutBatch,
        objective: PolicyObjective[RolloutBatch],
        value_objective: ValueObjective[RolloutBatch] | None = None,
        *,
        train_policy: bool = True,
    ) -> UpdateReport:
        """Trains on `batch`; reports its optimizer steps.

        Without `train_policy` the critic alone learns. An error before the first optimizer step changes nothing.
        """
        shuffle = self._generator.get_state()
        try:
            return self._take_steps(batch, objective, value_objective, train_policy=train_policy)
        except BaseException:
            if not self.under_way:
                self._generator.set_state(shuffle)
            raise

    def _take_steps(
        self,
        batch: RolloutBatch,
        objective: PolicyObjective[RolloutBatch],
        value_objective: ValueObjective[RolloutBatch] | None,
        *,
        train_policy: bool,
    ) -> UpdateReport:
        steps: list[dict[str, float]] = []
        loss_weights_N = torch.zeros(batch.token_count)
        for sequences, step_batch in self._steps(batch):
            loss_weights_N[batch.token_index(sequences)] = step_batch.filled("loss_weights_N")
            metrics: dict[str, float] = {}
            if train_policy:
                metrics |= self._update_policy(step_batch, objective)
                self.under_way = True
            if self._critic is not None and value_objective is not None:
                parts = split(step_batch, self._max_tokens)
                metrics |= {f"critic/{k}": v for k, v in self._critic.update(parts, value_objective).items()}
                self.under_way = True
            steps.append(metrics)
        self.under_way = False
        combined = over_steps(steps)
        return UpdateReport(
            metrics=combined, reference_kl=combined.get(f"policy/{REFERENCE_KL}"), loss_weights_N=loss_weights_N
        )

    def save(self, checkpoints: CheckpointStore, name: str) -> None:
        """Writes the models under `name`."""
        checkpoints.save_model(self._policy, name, self._critic)

    def state_dict(self) -> dict[str, Any]:
        """Returns the models under training and the order of their samples."""
        critic = {} if self._critic is None else {"critic": self._critic.state_dict()}
        return {"policy": self._policy.state_dict(), "shuffle": self._generator.get_state(), **critic}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from `state`."""
        self._policy.load_state_dict(state["policy"])
        self._generator.set_state(state["shuffle"])
        if self._critic is not None:
            self._critic.load_state_dict(state["critic"])

    def _update_policy(self, step_batch: RolloutBatch, objective: PolicyObjective[RolloutBatch]) -> dict[str, float]:
        """Takes one optimizer step; means are over the tokens that were passed through the model."""
        trained = _with_gradient(step_batch) if self._skip_idle else step_batch
        result = self._policy.update(split(trained, self._max_tokens), objective)
        weight = _weight(trained)
        result = {name: _with_kind(name, value) for name, value in result.items()}
        scaled = {name: value if isinstance(value, Metric) else value / weight for name, value in result.items()}
        squared = scaled.pop("mismatch_weight_squared", 0.0)
        if squared > 0:
            scaled["mismatch_effective_sample_share"] = scaled.pop("mismatch_weight") ** 2 / squared
        metrics = {f"policy/{name}": value for name, value in scaled.items()}
        share = trained.rollouts / step_batch.rollouts
        return metrics | {"policy/trained_share": share} | gradient_share_by_turn(step_batch)

    def _steps(self, batch: RolloutBatch) -> Iterator[tuple[Tensor, RolloutBatch]]:
        """Yields the indices of the sequences of each optimizer step, and the step's batch with its loss weights."""
        units = batch.unit_count
        planned = max(units, self._planned or 0)
        parts = min(units, math.ceil(planned / (self._batch_size or planned)))
        for _ in range(self._epochs):
            for chosen in minibatches(units, parts, self._generator):
                # Order within a step does not change its gradient; neighbours of one prompt share its forward pass.
                sequences = batch.sequences_of(chosen)
                part = batch.select(sequences)
                yield (
                    sequences,
                    evolve(
                        part,
                        selected_N=None if self._select is None else self._select(part),
                        positive_weights_N=self._positive_weights(part),
                        loss_weights_N=self._weights(part, self._aggregation),
                        value_weights_N=None if self._critic is None else self._weights(part, Aggregation.TOKEN_MEAN),
                    ),
                )

    def _positive_weights(self, part: RolloutBatch) -> Tensor:
        """Returns weights of a token mean over the replies that passed."""
        passed_N = part.action_mask_N & (part.scores_S >= self._pass_threshold)[part.sequence_ids_N]
        return passed_N.float() / passed_N.sum().clamp(min=1)

    def _weights(self, part: RolloutBatch, mode: Aggregation) -> Tensor:
        return loss_weights(
            mode,
            action_mask_N=part.action_mask_N,
            lengths_S=part.lengths_S,
            group_ids_S=part.group_ids_S,
            rollout_ids_S=part.rollout_ids_S,
            max_length=self._max_length,
        )


def _with_gradient(batch: RolloutBatch) -> RolloutBatch:
    """Returns the sequences with an advantage other than 0; the first one if there is none, so that a step is still
    taken."""
    assert batch.advantages_N is not None
    busy_S = torch.zeros(len(batch), dtype=torch.bool)
    busy_S[batch.sequence_ids_N[(batch.advantages_N != 0) & batch.action_mask_N]] = True
    return batch.select(busy_S.nonzero()[:, 0] if bool(busy_S.any()) else [0])


def _with_kind(name: str, value: float) -> float:
    """Returns a metric of the port's own names with its kind, if a policy from outside reports it as a plain number."""
    return value if isinstance(value, Metric) or name not in KINDS else KINDS[name](value)


def _weight(batch: RolloutBatch) -> float:
    assert batch.loss_weights_N is not None
    return float(batch.loss_weights_N.sum())


def gradient_share_by_turn(batch: RolloutBatch) -> dict[str, float]:
    """Returns the share of each of the first turns in the sum of |weight x advantage|, which is the gradient's size at
    a ratio of 1; empty for batches of one turn."""
    assert batch.advantages_N is not None
    assert batch.loss_weights_N is not None
    turns_A = batch.turn_ids_N[batch.action_mask_N]
    size_A = (batch.advantages_N * batch.loss_weights_N)[batch.action_mask_N].abs().double()
    if len(turns_A) == 0 or int(turns_A.max()) == 0 or float(size_A.sum()) == 0:
        return {}
    size_U = torch.zeros(int(turns_A.max()) + 1, dtype=torch.float64).index_add_(0, turns_A, size_A)
    return {f"policy/gradient_share_turn_{k}": float(x / size_U.sum()) for k, x in enumerate(size_U[:TURNS_SHOWN])}
