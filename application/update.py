"""Update: epochs over a rollout's samples, minibatches (one optimizer step each), micro-batches within a budget."""

from collections.abc import Iterator

import torch
from attrs import evolve

from rollgrad.application.config import Aggregation
from rollgrad.application.microbatch import split
from rollgrad.domain.batch import PackedBatch
from rollgrad.domain.batching import minibatches
from rollgrad.domain.losses.aggregation import loss_weights
from rollgrad.domain.ports.models import PolicyModel, PolicyObjective, ValueModel, ValueObjective

NOT_MEANS = frozenset({"loss", "policy_loss", "grad_norm", "lr"})
"""Results of an update that do not grow with the share of tokens passed through the model."""


class UpdateService:
    """Takes optimizer steps on a batch.

    Args:
        policy: what is trained.
        critic: trained beside it, or None.
        aggregation: how token losses become one number; weights are fixed per optimizer step before it is split.
        max_length: constant length of `Aggregation.CONSTANT_LENGTH`, in tokens.
        batch_size: samples per optimizer step; None takes the whole rollout.
        epochs: passes over the samples.
        max_tokens: token budget of one micro-batch.
        seed: shuffles samples into minibatches.
        skip_idle: leave samples whose advantages are all 0 out of the policy's passes. Their gradient is exactly 0
            when the loss has no other term (KL, entropy), and the others' weights are fixed before: same gradient,
            less work. GRPO's groups without spread are such samples.
    """

    def __init__(
        self,
        policy: PolicyModel,
        critic: ValueModel | None,
        *,
        aggregation: Aggregation,
        max_length: int,
        batch_size: int | None,
        epochs: int,
        max_tokens: int,
        seed: int,
        skip_idle: bool = False,
    ) -> None:
        self._policy = policy
        self._critic = critic
        self._aggregation = aggregation
        self._max_length = max_length
        self._batch_size = batch_size
        self._epochs = epochs
        self._max_tokens = max_tokens
        self._generator = torch.Generator().manual_seed(seed)
        self._skip_idle = skip_idle

    def run(
        self, batch: PackedBatch, objective: PolicyObjective, value_objective: ValueObjective | None = None
    ) -> dict[str, float]:
        """Trains on `batch`; returns metrics averaged over its optimizer steps, under `policy/` and `critic/`."""
        totals: dict[str, float] = {}
        steps = 0
        for step_batch in self._steps(batch):
            metrics = self._update_policy(step_batch, objective)
            if self._critic is not None and value_objective is not None:
                parts = split(step_batch, self._max_tokens)
                metrics |= {f"critic/{k}": v for k, v in self._critic.update(parts, value_objective).items()}
            for name, value in metrics.items():
                totals[name] = totals.get(name, 0.0) + value
            steps += 1
        return {name: value / steps for name, value in totals.items()}

    def _update_policy(self, step_batch: PackedBatch, objective: PolicyObjective) -> dict[str, float]:
        """One optimizer step; means are over the tokens that were passed through the model."""
        trained = _with_gradient(step_batch) if self._skip_idle else step_batch
        result = self._policy.update(split(trained, self._max_tokens), objective)
        covered = _weight(trained) / _weight(step_batch)
        scaled = {name: value if name in NOT_MEANS else value / covered for name, value in result.items()}
        return {f"policy/{k}": v for k, v in scaled.items()} | {"policy/trained_share": len(trained) / len(step_batch)}

    def _steps(self, batch: PackedBatch) -> Iterator[PackedBatch]:
        """The samples of each optimizer step, with their loss weights."""
        for _ in range(self._epochs):
            for indices in minibatches(len(batch), self._batch_size, self._generator):
                # Order within a step does not change its gradient; neighbours of one prompt share its forward pass.
                part = batch.select(sorted(indices))
                yield evolve(
                    part,
                    loss_weights_N=self._weights(part, self._aggregation),
                    value_weights_N=None if self._critic is None else self._weights(part, Aggregation.TOKEN_MEAN),
                )

    def _weights(self, part: PackedBatch, mode: Aggregation) -> torch.Tensor:
        return loss_weights(
            mode,
            action_mask_N=part.action_mask_N,
            lengths_S=part.lengths_S,
            group_ids_S=part.group_ids_S,
            max_length=self._max_length,
        )


def _with_gradient(batch: PackedBatch) -> PackedBatch:
    """The sequences with an advantage other than 0; the first one if there is none, so that a step is still taken."""
    assert batch.advantages_N is not None
    busy_S = torch.zeros(len(batch), dtype=torch.bool)
    busy_S[batch.sequence_ids_N[(batch.advantages_N != 0) & batch.action_mask_N]] = True
    return batch.select(busy_S.nonzero()[:, 0] if bool(busy_S.any()) else [0])


def _weight(batch: PackedBatch) -> float:
    assert batch.loss_weights_N is not None
    return float(batch.loss_weights_N.sum())
