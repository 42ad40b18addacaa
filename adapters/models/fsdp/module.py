"""A trained module whose parameters, gradients and moments are divided over the processes of a group by FSDP2.

Invariants: those of `MasterOptimizer`. Its masters are the rows that FSDP keeps of each parameter in this process, so
that a step sends nothing but the norm. Gradients of all processes are summed, because losses are weighted for the whole
step before it is divided. Its state is whole and by parameter name, whatever the number of processes.
Does not own: how a module is divided (`division.py`).
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn

from rollgrad.adapters.models.fsdp.division import divide, rows_of
from rollgrad.adapters.models.torch.loading.weight_shards import whole_shape
from rollgrad.adapters.models.torch.optimizers.loss_scaling import Scaling
from rollgrad.adapters.models.torch.optimizers.muon import orthogonal
from rollgrad.adapters.models.torch.optimizers.optimizer import MasterOptimizer, OptimizerSettings, sleeping
from rollgrad.adapters.models.torch.optimizers.stored_state import StoredTensor, whole_tensor, write_state
from rollgrad.adapters.models.torch.optimizers.trained_module import Whole


class FSDPTrainedModule(MasterOptimizer):
    """A `TrainedModule` under FSDP2; the process group must have been started.

    Args:
        module: equal in every process (`divide`).
        settings: settings of the optimizer; its schedule counts optimizer steps.
        offload: whether parameters, gradients and moments rest in the CPU's memory, and are stepped there.

    Raises:
        ConfigurationError: FSDP2 cannot divide the module.
    """

    divided = True

    def __init__(self, module: nn.Module, settings: OptimizerSettings, *, offload: bool = False) -> None:
        self.first = distributed.get_rank() == 0
        scaling = Scaling(module, tells=self.first)  # by the format that parameters have before
        self._division = divide(module, offload=offload)
        masters = {parameter: rows_of(parameter) for parameter in module.parameters() if parameter.requires_grad}
        self._parameter_of = {master: parameter for parameter, master in masters.items()}
        super().__init__(module, settings, masters=masters, directions=self._orthogonal_rows, scaling=scaling)

    def __call__(self, *inputs: Any) -> Any:
        """Returns the module's forward pass."""
        return self._division(*inputs)

    def agree(self, well: bool) -> bool:
        """Implements `TrainedModule.agree`."""
        return bool(self._reduced([float(well)], distributed.ReduceOp.MIN)[0])

    def summed(self, values: Tensor) -> Tensor:
        """Implements `TrainedModule.summed`."""
        total = values.clone()
        distributed.all_reduce(total)
        return total

    def step(self) -> dict[str, float]:
        """Implements `TrainedModule.step`."""
        for parameter, master in zip(self._params, self._masters, strict=True):
            master.grad = None if parameter.grad is None else rows_of(parameter.grad)
        return super().step()

    def clear(self) -> None:
        """Implements `TrainedModule.clear`."""
        super().clear()
        self._division.rest()

    def bytes(self, parameter: nn.Parameter) -> int:
        """Implements `TrainedModule.bytes`."""
        return math.prod(whole_shape(parameter)) * parameter.element_size()

    def gathered(self, parameters: Sequence[nn.Parameter]) -> AbstractContextManager[Whole]:
        """Implements `TrainedModule.gathered`: each parameter is gathered when it is asked for."""
        return nullcontext(self._division.whole)

    def part(self, parameter: nn.Parameter) -> tuple[int, Tensor]:
        """Implements `TrainedModule.part`: rows."""
        rows = rows_of(parameter).to(self._division.formats[parameter])
        first, _ = self._division.place(parameter)
        return first * math.prod(whole_shape(parameter)[1:]), rows.reshape(-1)

    def averaged(self) -> AbstractContextManager[None]:
        """Implements `TrainedModule.averaged`: FSDP gathers the masters themselves, and knows where they lie."""
        assert self._average is not None
        return self._average.published(self._publish)

    def _whole_copy(self, parameter: nn.Parameter, tensor: Tensor) -> Tensor:
        """Returns a whole copy in the first process, nothing in the others."""
        if tensor.ndim == 0:  # the number of steps
            return super()._whole_copy(parameter, tensor)
        whole = self._division.gathered(parameter, tensor)
        return whole.to("cpu", copy=True) if self.first else whole.new_empty(0)

    def write_state(self, directory: Path) -> None:
        """Implements `TrainedModule.write_state`: each process writes its rows."""
        # An average without a copy would be gone when it is put back.
        self._state_of_rows(copy=self._average is not None)(directory)

    def state_copy(self) -> Callable[[Path], None]:
        """Implements `TrainedModule.state_copy`."""
        return self._state_of_rows(copy=True)

    def _state_of_rows(self, *, copy: bool) -> Callable[[Path], None]:
        """Returns a function that writes this process's rows."""
        state = self._state(lambda _, tensor: tensor.detach().to("cpu", copy=copy))
        rows = {
            name: (self._division.place(parameter)[0], whole_shape(parameter)[0])
            for name, parameter in zip(self._names, self._params, strict=True)
        }
        if not self.first:  # numbers of steps, of which one process's are enough
            for moments in state["moments"].values():
                for key in [key for key, value in moments.items() if not value.ndim]:
                    del moments[key]
        name = f"{distributed.get_rank():05}.safetensors"
        return lambda directory: write_state(state, directory / name, rows)

    def _own_part(self, parameter: nn.Parameter, whole: Tensor | StoredTensor) -> Tensor:
        if not whole.shape:
            return whole_tensor(whole)
        first, last = self._division.place(parameter)
        return whole.rows(first, last) if isinstance(whole, StoredTensor) else whole[first:last]

    def _sleepers(self) -> Iterator[Tensor]:
        """Yields the moments: the masters are the weights."""
        return sleeping(self._masters, self._stepping.state, self._masters)

    def _norm(self, gradients: Sequence[Tensor]) -> float:
        sizes = torch._foreach_norm(list(gradients)) if gradients else [torch.tensor(0.0)]
        [squared] = self._reduced([float(torch.stack(sizes).double().square().sum())], distributed.ReduceOp.SUM)
        return math.sqrt(squared)

    def _gradient_sizes(self) -> dict[str, float]:
        mine = [-1.0 if master.grad is None else _largest(master.grad) for master in self._masters]
        sizes = self._reduced(mine, distributed.ReduceOp.MAX)
        return {name: size for name, size in zip(self._names, sizes, strict=True) if size >= 0}

    def _publish(self) -> None:
        """Does nothing: FSDP gathers the masters themselves before each forward pass."""

    def _orthogonal_rows(self, _: Sequence[nn.Parameter], master: Tensor, momentum: Tensor) -> Tensor:
        """Returns this process's rows of Muon's direction, which needs the whole matrix."""
        parameter = self._parameter_of[master]
        whole = orthogonal(self._division.gathered(parameter, momentum))
        first, last = self._division.place(parameter)
        return whole[first:last].to(master.device)

    def _reduced(self, numbers: Sequence[float], operation: Any) -> list[float]:
        """Returns numbers reduced over all processes."""
        values = torch.tensor(numbers, dtype=torch.float64, device=self._division.device)
        distributed.all_reduce(values, op=operation)
        result: list[float] = values.tolist()
        return result


def _largest(gradient: Tensor) -> float:
    """Returns the largest absolute entry, 0 if this process has no rows of the parameter."""
    return float(gradient.abs().max()) if gradient.numel() else 0.0
