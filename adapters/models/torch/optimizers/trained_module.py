"""Interface of a module under an optimizer, in one process or divided over several.

Does not own: what a model computes, nor which samples a process gets.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from rollgrad.adapters.models.torch.optimizers.stored_state import write_state
from rollgrad.domain.errors import ExplodedWeightsError

LARGEST_NORM = 1e7
"""Norm of a tensor of weights above which it is the trace of a step that was too large: 1e9 weights of 100 have 3e6. A
layer multiplies up to five (norm, gate, up, norm, down), and a product of five leaves float32 from 5e7 on."""

Whole = Callable[[nn.Parameter], Tensor]
"""Function that returns a whole parameter, in the number format in which it computes."""


def as_it_is(parameter: nn.Parameter) -> Tensor:
    """Returns a parameter that is whole."""
    return parameter


class TrainedModule(Protocol):
    """A module under an optimizer. If it is `divided`, every process makes the same calls in the same order, and the
    gradient is the sum of theirs."""

    divided: bool
    """Whether parameters, gradients or moments are divided over several processes."""
    first: bool
    """Whether this process writes for all of them."""
    steps: int
    """Optimizer steps taken, those before a run was continued included."""

    def __call__(self, *inputs: Any) -> Any:
        """Returns the module's forward pass."""
        ...

    def agree(self, well: bool) -> bool:
        """Returns whether `well` is true in all processes."""
        ...

    def summed(self, values: Tensor) -> Tensor:
        """Returns the sum of `values` over all processes."""
        ...

    def backward(self, loss: Tensor) -> None:
        """Adds the gradient of `loss` to that of the step, scaled in float16; wakes what sleeps."""
        ...

    def sleep(self) -> None:
        """Moves what optimizer steps alone need (masters, moments, buffers of gradients) to the CPU's memory, until the
        next backward pass. Everything else can be done meanwhile."""
        ...

    def step(self) -> dict[str, float]:
        """Clips and steps; returns `grad_norm` and `lr`, in float16 also `loss_scale` and `skipped_steps`.

        In float16 a gradient that is not finite halves the scale, and changes nothing else: `skipped_steps` is then 1,
        and there is no `grad_norm`.

        Raises:
            NonFiniteUpdateError: the gradient is not finite, and no scale is left to lower; nothing has changed.
            UntrainedParameterError: a parameter has no gradient; nothing has changed.
            ExplodedWeightsError: nothing can be computed with the weights that the step has made.
        """
        ...

    def check_weights(self, masters: Iterable[Tensor]) -> None:
        """Checks the weights after a step, in all processes.

        Args:
            masters: the float32 weights, or this process's parts of them.

        Raises:
            ExplodedWeightsError: the norm of one, in any process, is above `LARGEST_NORM`, infinite or NaN.
        """
        own = [master.detach() for master in masters if master.numel()]
        largest = float(torch.stack(torch._foreach_norm(own)).max()) if own else 0.0
        if not self.agree(largest <= LARGEST_NORM):
            raise ExplodedWeightsError(
                f"Optimizer step {self.steps} has made weights NaN, infinite or so large (a norm above "
                f"{LARGEST_NORM:g}) that nothing can be computed with them: lower the learning rate "
                "(--actor.adam.lr, --actor.muon.lr or --critic.adam.lr), with which --ckpt.resume continues from the "
                "last training state, if one was saved."
            )

    def clear(self) -> None:
        """Drops accumulated gradients."""
        ...

    def bytes(self, parameter: nn.Parameter) -> int:
        """Returns the size in bytes of a whole parameter."""
        ...

    def gathered(self, parameters: Sequence[nn.Parameter]) -> AbstractContextManager[Whole]:
        """Gathers the parameters inside the block, where the function that it gives returns each of them whole; all
        processes ask for the same ones in the same order."""
        ...

    def part(self, parameter: nn.Parameter) -> tuple[int, Tensor] | None:
        """Returns the run of a flattened parameter that this process has, in the number format in which it computes,
        and the index of its first element; the parts of all processes are the parameter. None if what a process has is
        no run, or the parameter is that of one process."""
        return None

    def averaged(self) -> AbstractContextManager[None]:
        """Makes the module compute with the moving averages of its weights inside the block."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Returns `steps` taken, `masters` (float32 weights), `moments` (the optimizer's state) and, if they are kept,
        `averages`, by parameter name; in float16 also `loss_scale`. It does not depend on how the module is divided.
        In a divided module the first process has it; that of others may be empty."""
        ...

    def write_state(self, directory: Path) -> None:
        """Writes the state to files in a directory (`stored_state.py`); processes that have parts of it write these.

        Raises:
            CheckpointError: it cannot be written.
        """
        self.state_copy()(directory)

    def state_copy(self) -> Callable[[Path], None]:
        """Copies the state to the CPU's memory; returns a function that writes the copy as `write_state` does, and may
        be called in another thread while the module is trained."""
        state = self.state_dict()

        def write(directory: Path) -> None:
            if self.first:
                write_state(state, directory / "whole.safetensors")

        return write

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from a `state_dict` of any division, whose tensors may be `StoredTensor`s.

        Raises:
            CheckpointError: it is of another optimizer, or has averages and this module keeps none, or the reverse.
        """
        ...
