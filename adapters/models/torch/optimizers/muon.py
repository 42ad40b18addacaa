"""Muon: the momentum of a matrix is orthogonalised before it becomes a step (Jordan et al. 2024, "Muon: An optimizer
for hidden layers in neural networks"; a step changes all directions of the matrix equally, by about lr).

Embeddings, the vocabulary's head, vectors and stacks of matrices are AdamW's, as the authors advise. The iteration and
the scale by shape are `torch.optim.Muon`'s. Does not own: AdamW, nor where parts of a matrix lie.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from attrs import frozen
from torch import Tensor, nn

from rollgrad.adapters.models.torch.heads.scorers import Scorer
from rollgrad.adapters.models.torch.loading.weight_shards import whole_shape

MOMENTUM = "momentum_buffer"
"""Key of Muon's state of a matrix."""


@frozen(kw_only=True)
class MuonSettings:
    """Peak learning rate and the decay of the (Nesterov) momentum."""

    lr: float
    momentum: float = 0.95


def hidden_matrices(module: nn.Module) -> list[nn.Parameter]:
    """Returns the trainable matrices of `module` that lie between embeddings and head; a stack of biases, one of each
    expert, is none."""
    outer = {part.weight for part in module.modules() if isinstance(part, nn.Embedding)}
    outer |= {part.head.weight for part in module.modules() if isinstance(part, Scorer)}
    named = (p for name, p in module.named_parameters() if not name.endswith("bias"))
    inner = (p for p in named if p.requires_grad and p not in outer)
    return [p for p in inner if len(whole_shape(p)) == 2 and min(whole_shape(p)) > 1]


def orthogonal(matrix: Tensor) -> Tensor:
    """Returns `matrix` with all singular values brought near 1, times sqrt(max(1, rows / columns)); float32."""
    step = nn.Parameter(torch.zeros_like(matrix, dtype=torch.float32))
    step.grad = matrix.float()
    muon = torch.optim.Muon([step], lr=1.0, weight_decay=0.0, momentum=0.0, nesterov=False)
    muon.step()  # type: ignore[no-untyped-call]
    return -step.detach()


Directions = Callable[[Sequence[nn.Parameter], Tensor, Tensor], Tensor]
"""Function from the parameters of a group, one of the tensors that are stepped for them, and its momentum to the
direction of a step."""


def whole_directions(_: Sequence[nn.Parameter], master: Tensor, momentum: Tensor) -> Tensor:
    """Returns the direction of a step if each stepped tensor is a whole matrix."""
    return orthogonal(momentum)


class MuonWithAdam(torch.optim.Optimizer):
    """Steps matrices by Muon and the rest by `adam`.

    Args:
        group: the parameter group of the matrices, with `lr` and `weight_decay`.
        matrices: the model's parameters that the group stands for.
        adam: an optimizer of the rest; None if there is no rest.
        momentum: its decay.
        directions: makes steps of momentum; by default tensors are whole matrices.
    """

    def __init__(
        self,
        group: dict[str, Any],
        matrices: Sequence[nn.Parameter],
        adam: torch.optim.Optimizer | None,
        *,
        momentum: float,
        directions: Directions = whole_directions,
    ) -> None:
        self._momentum = momentum
        self._directions = directions
        self._adam = adam
        super().__init__([{**group, "matrices": matrices}, *(adam.param_groups if adam else ())], {})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Takes one step of the current groups, which DeepSpeed may replace between steps."""
        for group in self.param_groups:
            if "matrices" in group:
                for master in group["params"]:
                    if master.grad is not None:
                        self._step_matrices(group, master)
        if self._adam is not None:
            self._adam.state = self.state
            self._adam.param_groups = [group for group in self.param_groups if "matrices" not in group]
            if self._adam.param_groups:
                self._adam.step()

    def _step_matrices(self, group: dict[str, Any], master: Tensor) -> None:
        state = self.state[master]
        if MOMENTUM not in state:
            state[MOMENTUM] = torch.zeros_like(master)
        state[MOMENTUM].lerp_(master.grad, 1 - self._momentum)
        ahead = master.grad.lerp(state[MOMENTUM], self._momentum)  # type: ignore[union-attr]
        direction = self._directions(group["matrices"], master, ahead)
        master.mul_(1 - group["lr"] * group["weight_decay"]).add_(direction, alpha=-group["lr"])
