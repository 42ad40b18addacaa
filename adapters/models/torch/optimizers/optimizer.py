"""AdamW, optionally with Muon, or an optimizer of a user's own, on float32 master weights of a model that computes in
another format.

Invariants: gradients of all micro-batches of a step are summed in float32; a step with a non-finite gradient changes
no weight, nor moment nor schedule; after `step` the compute weights equal the rounded masters.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from attrs import frozen
from torch import Tensor, nn

from rollgrad.adapters.models.torch.loading.weight_shards import whole_shape
from rollgrad.adapters.models.torch.optimizers.ema import MovingAverage
from rollgrad.adapters.models.torch.optimizers.loss_scaling import Scaling
from rollgrad.adapters.models.torch.optimizers.muon import (
    Directions,
    MuonSettings,
    MuonWithAdam,
    hidden_matrices,
    whole_directions,
)
from rollgrad.adapters.models.torch.optimizers.optimizer_state import check_state, moment_keys
from rollgrad.adapters.models.torch.optimizers.own_optimizer import OwnOptimizer, as_kept, as_tensor, tensors_of
from rollgrad.adapters.models.torch.optimizers.sleeping import SleepingTensors
from rollgrad.adapters.models.torch.optimizers.stored_state import StoredTensor, whole_tensor
from rollgrad.adapters.models.torch.optimizers.trained_module import TrainedModule, Whole, as_it_is
from rollgrad.adapters.models.torch.optimizers.untrained_parameters import GradientProof
from rollgrad.domain.batches.metrics import Common
from rollgrad.domain.control.learning_rate import lr_factor


@frozen(kw_only=True)
class OptimizerSettings:
    """Settings of an optimizer: AdamW's where nothing else is set."""

    lr: float
    """Learning rate; the peak of the schedule."""
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    scheduler: str = "constant"
    warmup_ratio: float = 0.0
    min_lr_ratio: float = 0.1
    decay_ratio: float = 0.1
    max_norm: float = 1.0
    """Norm that gradients are clipped at; 0 for never."""
    total_steps: int = 1
    """Optimizer steps of the schedule."""
    muon: MuonSettings | None = None
    """Steps hidden matrices by Muon; None does not."""
    ema_beta: float | None = None
    """Keeps a moving average of the weights with this factor; None keeps none."""
    ema_every: int = 1
    """Steps after which the moving average moves."""
    ema_saved: bool = True
    """Whether the moving average is written beside the model."""
    factors: tuple[float, ...] | None = None
    """Learning rates of all steps as shares of the peak, in the place of the schedule."""
    own: OwnOptimizer | None = None
    """Optimizer in the place of AdamW."""

    def factor(self, step: int) -> float:
        """Returns the learning rate of the `step`-th optimizer step, from 0, as a share of the peak."""
        if self.factors is not None:
            return self.factors[min(step, len(self.factors) - 1)]
        return lr_factor(
            self.scheduler,
            step,
            total_steps=self.total_steps,
            warmup_ratio=self.warmup_ratio,
            min_ratio=self.min_lr_ratio,
            decay_ratio=self.decay_ratio,
        )


def stepping(
    module: nn.Module,
    masters: Mapping[nn.Parameter, Tensor],
    settings: OptimizerSettings,
    adam: Callable[[list[dict[str, Any]]], torch.optim.Optimizer],
    directions: Directions = whole_directions,
) -> torch.optim.Optimizer:
    """Returns the optimizer of `masters`, the tensors that stand for the trainable parameters of `module`. Weight decay
    applies to matrices, not to biases and norm weights.

    `adam` makes an AdamW from parameter groups; `directions` is Muon's (`MuonWithAdam`).
    """
    matrices = hidden_matrices(module) if settings.muon else []
    chosen = set(matrices)
    rest = [(parameter, master) for parameter, master in masters.items() if parameter not in chosen]
    kinds = (
        ([master for parameter, master in rest if len(whole_shape(parameter)) > 1], settings.weight_decay),
        ([master for parameter, master in rest if len(whole_shape(parameter)) <= 1], 0.0),
    )
    groups = [
        {"params": members, "weight_decay": decay, "lr": settings.lr, "peak": settings.lr}
        for members, decay in kinds
        if members
    ]
    if settings.muon is None:
        return adam(groups)
    lr = settings.muon.lr
    return MuonWithAdam(
        {"params": [masters[p] for p in matrices], "weight_decay": settings.weight_decay, "lr": lr, "peak": lr},
        matrices,
        adam(groups) if groups else None,
        momentum=settings.muon.momentum,
        directions=directions,
    )


def set_rates(optimizer: Any, settings: OptimizerSettings, step: int) -> float:
    """Sets the learning rates of the `step`-th optimizer step, from 0; returns AdamW's."""
    factor = settings.factor(step)
    for group in optimizer.param_groups:
        group["lr"] = group["peak"] * factor
    return settings.lr * factor


def sleeping(masters: Iterable[Tensor], state: Mapping[Any, Any], awake: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yields masters and what an optimizer's `state` has of each, but for masters in the memory of the tensors
    `awake`."""
    memory = {tensor.untyped_storage()._cdata for tensor in awake}
    for master in masters:
        if master.untyped_storage()._cdata not in memory:
            yield master
        yield from tensors_of(state.get(master, {}).values())


class MasterOptimizer(TrainedModule):
    """A `TrainedModule` on one device: owns the master weights of `module`'s trainable parameters.

    Args:
        module: the module.
        settings: settings of the optimizer.
        masters: float32 tensors that are stepped for the parameters; by default whole copies, or the parameters
            themselves where they are float32.
        directions: Muon's (`MuonWithAdam`).
        scaling: loss scaling; by default it follows from the number format of the parameters.
    """

    divided = False
    first = True

    def __init__(
        self,
        module: nn.Module,
        settings: OptimizerSettings,
        *,
        masters: Mapping[nn.Parameter, Tensor] | None = None,
        directions: Directions = whole_directions,
        scaling: Scaling | None = None,
    ) -> None:
        self._module = module
        self._settings = settings
        self._names, self._params = zip(
            *((name, p) for name, p in module.named_parameters() if p.requires_grad), strict=True
        )
        if masters is None:
            masters = {p: p if p.dtype == torch.float32 else _own_master(p) for p in self._params}
        self._masters = [masters[parameter] for parameter in self._params]
        self._keys = moment_keys(module, muon=settings.muon is not None, own=settings.own is not None)
        adam = partial(torch.optim.AdamW, betas=settings.betas, eps=settings.eps, fused=True)
        self._stepping = stepping(module, masters, settings, settings.own or adam, directions)
        self._average = (
            None if settings.ema_beta is None else MovingAverage(self._masters, settings.ema_beta, settings.ema_every)
        )
        self._proof = GradientProof(self._names, tells=self.first)
        self._scaling = scaling or Scaling(module)
        self._sleeping = SleepingTensors(self._sleepers, self._masters[0].device)
        self.steps = 0
        self._seen = False  # whether the state of a user's own optimizer is known to be whole

    def __call__(self, *inputs: Any) -> Any:
        """Returns the module's forward pass."""
        return self._module(*inputs)

    def agree(self, well: bool) -> bool:
        """Implements `TrainedModule.agree`."""
        return well

    def summed(self, values: Tensor) -> Tensor:
        """Implements `TrainedModule.summed`."""
        return values

    def sleep(self) -> None:
        """Implements `TrainedModule.sleep`; masters that are the parameters themselves stay."""
        self._sleeping.sleep()

    def _sleepers(self) -> Iterator[Tensor]:
        return sleeping(self._masters, self._stepping.state, self._params)

    def backward(self, loss: Tensor) -> None:
        """Implements `TrainedModule.backward`."""
        self._sleeping.wake()
        (loss * self._scaling.factor).backward()  # type: ignore[no-untyped-call]

    def step(self) -> dict[str, float]:
        """Implements `TrainedModule.step`: clips, steps, copies masters to compute weights, clears gradients.

        Raises:
            NonFiniteUpdateError: the gradient norm is NaN or infinite, and no scale is left to lower; weights are
                untouched, gradients cleared.
            UntrainedParameterError: a parameter has no gradient in the first step; weights are untouched.
            ExplodedWeightsError: nothing can be computed with the weights that the step has made.
        """
        gradients = [m.grad for m in self._masters if m.grad is not None]
        scale = self._scaling.factor
        norm = self._norm(gradients) / scale
        lr = set_rates(self._stepping, self._settings, self.steps)
        if not math.isfinite(norm):
            self.clear()
            return {"lr": Common(lr)} | self._scaling.skipped(self.steps, norm)
        if self._proof.under_way:
            self._proof.look(self._gradient_sizes())
        limit = self._settings.max_norm
        shrink = (limit / norm if limit and norm > limit else 1.0) / scale
        if shrink != 1.0:
            torch._foreach_mul_(gradients, shrink)
        self._update()
        if self._average is not None:
            self._average.follow(self.steps + 1)
        self.clear()
        self._publish()
        self.steps += 1
        self.check_weights(self._masters)
        return {"grad_norm": Common(norm), "lr": Common(lr)} | self._scaling.applied()

    def _update(self) -> None:
        """Changes the masters by their gradients; looks at the state of a user's own optimizer after its first step.

        Raises:
            ForeignError: a user's own optimizer failed.
            ConfigurationError: it keeps what no training state has.
        """
        own = self._settings.own
        if own is None:
            self._stepping.step()
            return
        before = None if self._seen else own.numbers(self._stepping)
        with own.guarded(f"failed in optimizer step {self.steps + 1}"):
            self._stepping.step()
        if before is not None:
            own.check(self._stepping, before, divided=self.divided)
            self._seen = True

    def use(self, settings: OptimizerSettings) -> None:
        """Steps with other rates, decays and clipping from now on; the moments stay.

        Args:
            settings: new settings of the same optimizer, AdamW alone.
        """
        self._settings = settings
        for group in self._stepping.param_groups:
            matrices = all(master.ndim > 1 for master in group["params"])
            group.update(lr=settings.lr, peak=settings.lr, betas=settings.betas, eps=settings.eps)
            group["weight_decay"] = settings.weight_decay if matrices else 0.0

    def clear(self) -> None:
        """Drops accumulated gradients."""
        for param, master in zip(self._params, self._masters, strict=True):
            param.grad = master.grad = None

    def bytes(self, parameter: nn.Parameter) -> int:
        """Implements `TrainedModule.bytes`."""
        return parameter.nbytes

    def gathered(self, parameters: Sequence[nn.Parameter]) -> AbstractContextManager[Whole]:
        """Implements `TrainedModule.gathered`."""
        return nullcontext(as_it_is)

    def averaged(self) -> AbstractContextManager[None]:
        """Implements `TrainedModule.averaged`."""
        assert self._average is not None
        return self._average.lent(self._params, self._publish)

    def state_dict(self) -> dict[str, Any]:
        """Implements `TrainedModule.state_dict`: in the CPU's memory, as a GPU has no room for two of them."""
        return self._state(self._whole_copy)

    def _state(self, copy: Callable[[nn.Parameter, Tensor], Tensor]) -> dict[str, Any]:
        """Returns the state of copies, which `copy` makes of a parameter's master and of what the optimizer keeps of
        it."""
        named = list(zip(self._names, self._params, self._masters, strict=True))
        state = {
            "steps": self.steps,
            "masters": {name: copy(parameter, master) for name, parameter, master in named},
            "moments": {
                name: {key: copy(parameter, as_tensor(value)) for key, value in self._stepping.state[master].items()}
                for name, parameter, master in named
                if master in self._stepping.state
            },
            **self._scaling.state_dict(),
        }
        if self._average is not None:
            with self._average.in_place():
                state["averages"] = {name: copy(parameter, master) for name, parameter, master in named}
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Implements `TrainedModule.load_state_dict`; restores the compute weights too."""
        check_state(state, self._keys, averages=self._average is not None)
        self.steps = int(state["steps"])
        self._scaling.load_state_dict(state)
        self._stepping.state.clear()
        named = list(zip(self._names, self._params, self._masters, strict=True))
        with torch.no_grad():
            for name, parameter, master in named:
                master.copy_(self._own_part(parameter, state["masters"][name]))
                if name in state["moments"]:
                    parts = {key: self._own_part(parameter, value) for key, value in state["moments"][name].items()}
                    placed = {key: part.to(self._sleeping.place(part), copy=True) for key, part in parts.items()}
                    is_own = self._settings.own is not None
                    self._stepping.state[master] = {
                        key: as_kept(part) if is_own else part for key, part in placed.items()
                    }
            if self._average is not None:
                with self._average.in_place():
                    for name, parameter, master in named:
                        master.copy_(self._own_part(parameter, state["averages"][name]))
        self._publish()

    def masters(self) -> dict[str, Tensor]:
        """Returns the master weights by parameter name."""
        return dict(zip(self._names, (m.detach() for m in self._masters), strict=True))

    def _whole_copy(self, parameter: nn.Parameter, tensor: Tensor) -> Tensor:
        """Returns a whole copy in the CPU's memory."""
        return tensor.detach().to("cpu", copy=True)

    def _own_part(self, parameter: nn.Parameter, whole: Tensor | StoredTensor) -> Tensor:
        """Returns what this process keeps of a tensor that a state has of a parameter."""
        return whole_tensor(whole)

    def _norm(self, gradients: Sequence[Tensor]) -> float:
        """Returns the norm of all gradients together."""
        return float(torch.nn.utils.get_total_norm(gradients)) if gradients else 0.0

    def _gradient_sizes(self) -> dict[str, float]:
        """Returns the largest absolute entry of each scaled gradient."""
        names, gradients = [], []
        for name, master in zip(self._names, self._masters, strict=True):
            if master.grad is not None:
                names.append(name)
                gradients.append(master.grad)
        sizes = torch.stack(torch._foreach_norm(gradients, math.inf)).tolist() if gradients else ()
        return dict(zip(names, sizes, strict=True))

    @torch.no_grad()
    def _publish(self) -> None:
        pairs = [(p, m) for p, m in zip(self._params, self._masters, strict=True) if p is not m]
        if pairs:
            params, masters = zip(*pairs, strict=True)
            torch._foreach_copy_(params, masters)


def _own_master(parameter: nn.Parameter) -> Tensor:
    """Returns a float32 copy of a parameter, to which its gradients go from now on."""
    master = parameter.detach().float().requires_grad_()
    parameter.register_post_accumulate_grad_hook(_move_gradient_to(master))  # type: ignore[no-untyped-call]
    return master


def _move_gradient_to(master: Tensor) -> Any:
    """Returns a hook that adds a compute-format gradient to the master's float32 one and frees it."""

    def hook(param: Tensor) -> None:
        if param.grad is not None:
            if master.grad is None:
                master.grad = param.grad.float()
            else:
                master.grad += param.grad
            param.grad = None

    return hook
