"""References and teachers over packed batches: models that are not trained, and the policy in the place of one."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from rollgrad.adapters.models.torch.forward import PackedLM, live_logits, predicted
from rollgrad.adapters.models.torch.heads.chunked_logprobs import chunk_bytes
from rollgrad.adapters.models.torch.heads.distillation import Teacher
from rollgrad.adapters.models.torch.layers.padded import is_padded
from rollgrad.adapters.models.torch.layers.sequence_parallel import sequence_group
from rollgrad.adapters.models.torch.loading.lora import without_adapters
from rollgrad.adapters.models.torch.models import TorchPolicy, token_scores
from rollgrad.domain.batches.packed import PackedBatch
from rollgrad.domain.ports.models import PredictingModel, Predictions, ReferenceModel, TeacherModel, TokenScores


class TorchReference(ReferenceModel, PredictingModel):
    """A frozen causal language model. `divide` divides it over several processes, and returns its forward pass. Of its
    vocabulary the first `size` tokens are predicted, by default all."""

    def __init__(
        self,
        model: Any,
        *,
        temperature: float = 1.0,
        divide: Callable[[nn.Module], Callable[..., Any]] | None = None,
        size: int | None = None,
    ) -> None:
        module = PackedLM(model.requires_grad_(False), temperature=temperature)
        self._size = size
        self._forward = divide(module) if divide else module
        self._padded = is_padded(model)

    def padded(self) -> bool:
        """Implements `ReferenceModel.padded`."""
        return self._padded

    @torch.no_grad()
    def score(self, batch: PackedBatch) -> TokenScores:
        """Implements `ReferenceModel.score`."""
        return token_scores(self._forward(batch), batch)

    def predict(self, batch: PackedBatch, top_k: int) -> Predictions:
        """Implements `PredictingModel.predict`."""
        return predicted(self._forward, batch, top_k, self._size)


class TorchTeacher(TeacherModel):
    """A teacher whose most likely tokens are to be kept; of its vocabulary the first `size` tokens count."""

    def __init__(self, teacher: Teacher, size: int) -> None:
        self._teacher = teacher
        self._size = size
        self._group = sequence_group(teacher.model)

    def predict(self, batch: PackedBatch) -> Predictions:
        """Implements `TeacherModel.predict`."""
        logits = live_logits(self._teacher, batch, self._group, self._size)
        device = next(self._teacher.model.parameters()).device
        count, rows = int(batch.action_mask_N.sum()), max(1, chunk_bytes(device) // (4 * self._size))
        parts = (slice(start, start + rows) for start in range(0, count, rows))
        found = [logits(part).target(self._teacher.settings) for part in parts]
        return Predictions(
            ids_AK=torch.cat([each.ids_AK for each in found if each.ids_AK is not None]).int().cpu(),
            logprobs_AB=torch.cat([each.logprobs_AB for each in found]).half().cpu(),
        )


class AdapterlessReference(ReferenceModel, PredictingModel):
    """The policy without its adapters, on the policy's own weights, with which nothing else may compute meanwhile."""

    def __init__(self, policy: TorchPolicy) -> None:
        self._policy = policy

    def padded(self) -> bool:
        """Implements `ReferenceModel.padded`."""
        return self._policy.padded()

    def score(self, batch: PackedBatch) -> TokenScores:
        """Implements `ReferenceModel.score`."""
        with without_adapters(self._policy.module):
            return self._policy.score(batch)

    def predict(self, batch: PackedBatch, top_k: int) -> Predictions:
        """Implements `PredictingModel.predict`."""
        with without_adapters(self._policy.module):
            return self._policy.predict(batch, top_k)
