"""Models of values over packed batches.

Does not own: losses (the objective is an argument), nor batching.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rollgrad.adapters.models.torch.adapter_dropout import AdapterDropout
from rollgrad.adapters.models.torch.forward import PackedValue, scatter
from rollgrad.adapters.models.torch.layers.padded import is_padded
from rollgrad.adapters.models.torch.loading.lora import plain_weights
from rollgrad.adapters.models.torch.loading.saving import save_in_files, writing
from rollgrad.adapters.models.torch.models import (
    Optimize,
    copied_weights,
    file_parts,
    weight_values,
)
from rollgrad.adapters.models.torch.optimizers.gradients import optimizer_step
from rollgrad.adapters.models.torch.optimizers.optimizer import MasterOptimizer, OptimizerSettings
from rollgrad.adapters.models.torch.optimizers.state_copy import CopiesState
from rollgrad.adapters.models.torch.optimizers.stored_state import opened
from rollgrad.adapters.models.torch.recomputation import Recomputation
from rollgrad.application.settings.sections.actor import Checkpointing
from rollgrad.domain.batches.packed import Batch, PackedBatch
from rollgrad.domain.ports.models import ValueModel, ValueObjective


class TorchValue(CopiesState, ValueModel):
    """A language model whose vocabulary head is replaced by one scalar a token.

    `head`: `weight` [1, H] and, if there is one, `bias` [1] to start from (a reward model's, say); empty starts from
    values of 0. `gradient_checkpointing`: which activations the backward pass computes again; `offload_activations`:
    keep what it computes them from in the machine's memory.
    """

    packed: type[PackedValue] = PackedValue
    """Module that computes the values."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        settings: OptimizerSettings,
        *,
        head: Mapping[str, Tensor] | None = None,
        gradient_checkpointing: Checkpointing = Checkpointing.OFF,
        offload_activations: bool = False,
        optimize: Optimize = MasterOptimizer,
    ) -> None:
        self._tokenizer = tokenizer
        self._dropout = AdapterDropout(model)
        self._recomputation = Recomputation(model, self._dropout, gradient_checkpointing, offloads=offload_activations)
        self._module = self.packed(model, dict(head or {}))
        self._dropout.of(self._module, self._module.group)
        self._trained = optimize(self._module, settings)

    def padded(self) -> bool:
        """Implements `ValueModel.padded`."""
        return is_padded(self._module.model)

    def _values(self, batch: PackedBatch) -> Tensor:
        return scatter(self._trained(batch), batch)

    @torch.no_grad()
    def values(self, batch: PackedBatch) -> Tensor:
        """Implements `ValueModel.values`."""
        return self._values(batch)

    def update(self, micro_batches: Sequence[Batch], objective: ValueObjective[Batch]) -> dict[str, float]:
        """Implements `ValueModel.update`."""
        with self._recomputation.during(self._module), self._dropout.during(self._trained.steps):
            return optimizer_step(micro_batches, self._values, objective, self._trained)

    def save(self, path: Path) -> None:
        """Writes the backbone as a Hugging Face model and the head as `value_head.safetensors`."""
        from safetensors.torch import save_file

        head, body = self._parts()  # the head by all processes, whatever fails below
        of_body = ({name.removeprefix("model."): t for name, t in part.items()} for part in body)
        save_in_files(self._module.model, self._tokenizer, path, of_body, writes=self._trained.first)
        if self._trained.first:
            with writing(path):
                save_file(head, path / "value_head.safetensors")

    def _parts(self) -> tuple[dict[str, Tensor], Iterator[dict[str, Tensor]]]:
        """Returns copies of the head's weights, and the parts of the others that a file has each, in the first
        process."""
        weights = plain_weights(self._module)
        head = [weight for weight in weights if weight.name.startswith("value_head.")]
        body = [weight for weight in weights if weight not in head]
        copied = copied_weights(weight_values(head, self._trained), keep=self._trained.first)
        return copied, file_parts(body, self._trained)

    def state_dict(self) -> dict[str, Any]:
        """Implements `ValueModel.state_dict`."""
        return self._trained.state_dict()

    def sleep(self) -> None:
        """Leaves the GPU's memory of the optimizer to others, until the next update."""
        self._trained.sleep()

    def write_state(self, directory: Path) -> None:
        """Writes the state, or this process's part of it, to files in `directory`."""
        self._trained.write_state(directory)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Implements `ValueModel.load_state_dict`."""
        self._trained.load_state_dict(opened(state))
