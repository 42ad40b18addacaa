"""A policy, critic and reference small enough to read: tables over the vocabulary, trained by plain SGD."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rollgrad.domain.algorithms.losses.distillation import with_rest
from rollgrad.domain.batches.metrics import Common, Total, joined
from rollgrad.domain.batches.packed import Batch, PackedBatch
from rollgrad.domain.errors import CheckpointError, NonFiniteUpdateError
from rollgrad.domain.ports.models import (
    LossOutput,
    PolicyModel,
    PolicyObjective,
    PredictingModel,
    Predictions,
    ReferenceModel,
    TokenScores,
    ValueModel,
    ValueObjective,
)

VOCABULARY = 320
"""Above every token id of the tests."""


class _Table:
    """One trainable number a token of the vocabulary."""

    def __init__(self, initial_V: Tensor, lr: float) -> None:
        self.table_V = initial_V.clone().requires_grad_()
        self._lr = lr
        self.steps = 0

    def step(self, micro_batches: Sequence[Batch], loss_of: Callable[[Batch], LossOutput]) -> dict[str, float]:
        self.table_V.grad = None
        parts: list[Mapping[str, Tensor | float]] = []
        for batch in micro_batches:
            output = loss_of(batch)
            if not torch.isfinite(output.loss):
                raise NonFiniteUpdateError(f"The loss is {float(output.loss)}; the optimizer step was not applied.")
            output.loss.backward()  # type: ignore[no-untyped-call]
            parts.append({"loss": Total(output.loss.detach()), **output.metrics})
        gradient = torch.zeros_like(self.table_V) if self.table_V.grad is None else self.table_V.grad
        if not torch.isfinite(gradient).all():
            raise NonFiniteUpdateError("The gradient is not finite; the optimizer step was not applied.")
        with torch.no_grad():
            self.table_V -= self._lr * gradient
        self.steps += 1
        return joined(parts) | {"grad_norm": Common(gradient.norm()), "lr": Common(self._lr)}

    def save(self, path: Path) -> None:
        try:
            path.mkdir(parents=True, exist_ok=True)
            (path / "table.json").write_text(json.dumps(self.table_V.tolist()))
        except OSError as error:
            raise CheckpointError(f"The model cannot be written to {path}: {error}") from error

    def state_dict(self) -> dict[str, Any]:
        return {"table": self.table_V.detach().clone(), "steps": self.steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        with torch.no_grad():
            self.table_V.copy_(state["table"])
        self.steps = int(state["steps"])


def _unigram(table_V: Tensor, batch: PackedBatch) -> TokenScores:
    log_softmax_V = table_V.log_softmax(0)
    entropy = -(log_softmax_V.exp() * log_softmax_V).sum()
    return TokenScores(
        logprobs_N=torch.where(batch.action_mask_N, log_softmax_V[batch.tokens_N], 0.0),
        entropy_N=torch.where(batch.action_mask_N, entropy, 0.0),
        collision_N=torch.where(batch.action_mask_N, -(2 * log_softmax_V).logsumexp(0), 0.0),
    )


class _OfTable:
    """Saves a model that is one table."""

    _table: _Table

    def save(self, path: Path) -> None:
        """Writes `path/table.json`.

        Raises:
            CheckpointError: it cannot be written.
        """
        self._table.save(path)

    def state_dict(self) -> dict[str, Any]:
        """Returns the table and the number of steps."""
        return self._table.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from a `state_dict`."""
        self._table.load_state_dict(state)


class FakePolicy(_OfTable, PolicyModel):
    """A unigram model: every token has one logit, whatever comes before it."""

    def __init__(self, logits_V: Tensor | None = None, *, lr: float = 1.0) -> None:
        self._table = _Table(torch.zeros(VOCABULARY) if logits_V is None else logits_V, lr)
        self.scored: list[PackedBatch] = []
        self.updates: list[list[PackedBatch]] = []

    def score(self, batch: PackedBatch) -> TokenScores:
        """Returns log-probs and entropies of the action tokens; keeps the batch in `scored`."""
        self.scored.append(batch)
        with torch.no_grad():
            return _unigram(self._table.table_V, batch)

    def update(self, micro_batches: Sequence[Batch], objective: PolicyObjective[Batch]) -> dict[str, float]:
        """Takes one step of SGD on the sum of the objective; keeps the batches in `updates`."""
        self.steps += 1
        self.updates.append(list(micro_batches))
        return self._table.step(micro_batches, lambda batch: objective(_unigram(self._table.table_V, batch), batch))

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yields the table of logits."""
        yield "logits", self._table.table_V.detach()


class FakeReference(ReferenceModel, PredictingModel):
    """A frozen unigram model."""

    def __init__(self, logits_V: Tensor | None = None) -> None:
        self._logits_V = torch.zeros(VOCABULARY) if logits_V is None else logits_V

    def score(self, batch: PackedBatch) -> TokenScores:
        """Returns log-probs and entropies of the action tokens."""
        return _unigram(self._logits_V, batch)

    def predict(self, batch: PackedBatch, top_k: int) -> Predictions:
        """Returns the same tokens for each action token."""
        best, count = self._logits_V.log_softmax(0).topk(min(top_k, VOCABULARY)), int(batch.action_mask_N.sum())
        return Predictions(
            ids_AK=best.indices.int().expand(count, -1), logprobs_AB=with_rest(best.values[None]).expand(count, -1)
        )


class FakeValue(_OfTable, ValueModel):
    """One value a token that precedes an action, 0 at first."""

    def __init__(self, *, lr: float = 1.0) -> None:
        self._table = _Table(torch.zeros(VOCABULARY), lr)
        self.updates: list[list[PackedBatch]] = []

    def _values(self, batch: PackedBatch) -> Tensor:
        before_N = torch.cat([batch.tokens_N[:1], batch.tokens_N[:-1]])
        return torch.where(batch.action_mask_N, self._table.table_V[before_N], 0.0)

    def values(self, batch: PackedBatch) -> Tensor:
        """Returns the value before each action token, 0 elsewhere."""
        with torch.no_grad():
            return self._values(batch)

    def update(self, micro_batches: Sequence[Batch], objective: ValueObjective[Batch]) -> dict[str, float]:
        """Takes one step of SGD on the sum of the objective; keeps the batches in `updates`."""
        self.updates.append(list(micro_batches))
        return self._table.step(micro_batches, lambda batch: objective(self._values(batch), batch))
