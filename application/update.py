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
    ) -> None:
        self._policy = policy
        self._critic = critic
        self._aggregation = aggregation
        self._max_length = max_length
        self._batch_size = batch_size
        self._epochs = epochs
        self._max_tokens = max_tokens
        self._generator = torch.Generator().manual_seed(seed)

    def run(
        self, batch: PackedBatch, objective: PolicyObjective, value_objective: ValueObjective | None = None
    ) -> dict[str, float]:
        """Trains on `batch`; returns metrics averaged over its optimizer steps, under `policy/` and `critic/`."""
        totals: dict[str, float] = {}
        steps = 0
        for step_batch in self._steps(batch):
            parts = split(step_batch, self._max_tokens)
            metrics = {f"policy/{k}": v for k, v in self._policy.update(parts, objective).items()}
            if self._critic is not None and value_objective is not None:
                metrics |= {f"critic/{k}": v for k, v in self._critic.update(parts, value_objective).items()}
            for name, value in metrics.items():
                totals[name] = totals.get(name, 0.0) + value
            steps += 1
        return {name: value / steps for name, value in totals.items()}

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
