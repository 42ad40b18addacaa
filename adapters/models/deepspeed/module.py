"""A trained module divided over the processes of a group by DeepSpeed's ZeRO.

Invariants: the gradient is the sum of the processes' gradients, not their mean, because losses are weighted for the
whole step before it is divided. A gradient that is not finite anywhere changes no weight anywhere. Its state is that of
`MasterOptimizer`, whole and by parameter name, whatever the stage and the number of processes, so that a run can
continue on other ones. For example, 4 processes that each have the sum of 8 tokens' gradients, weighted 1/32, give
DeepSpeed 4 x that loss; its mean over the processes is then the sum, the gradient of the mean over 32 tokens.
Does not own: the process group (`processes.py`), nor which samples a process gets.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from rollgrad.adapters.models.deepspeed import tensor_parallel
from rollgrad.adapters.models.deepspeed.partition import fetch_heads, fetch_mixtures, own_run, partition
from rollgrad.adapters.models.deepspeed.processes import deepspeed_library
from rollgrad.adapters.models.deepspeed.settings import DeepSpeedSettings, engine_config, make_adam, with_masters
from rollgrad.adapters.models.torch.loading.weight_shards import whole_shape
from rollgrad.adapters.models.torch.optimizers.ema import MovingAverage
from rollgrad.adapters.models.torch.optimizers.loss_scaling import Scaling
from rollgrad.adapters.models.torch.optimizers.muon import MOMENTUM, orthogonal, whole_directions
from rollgrad.adapters.models.torch.optimizers.optimizer import OptimizerSettings, set_rates, sleeping, stepping
from rollgrad.adapters.models.torch.optimizers.optimizer_state import MOMENTS, check_state, moment_keys
from rollgrad.adapters.models.torch.optimizers.sleeping import SleepingTensors
from rollgrad.adapters.models.torch.optimizers.stored_state import StoredTensor, whole_tensor, write_parts
from rollgrad.adapters.models.torch.optimizers.trained_module import TrainedModule, Whole, as_it_is
from rollgrad.adapters.models.torch.optimizers.untrained_parameters import GradientProof
from rollgrad.application.settings.sections.ds import PARAMETERS
from rollgrad.domain.batches.metrics import Common


class DeepSpeedModule(TrainedModule):
    """A `TrainedModule` under DeepSpeed; the process group must have been started.

    Args:
        module: the same in every process.
        settings: settings of the optimizer; its schedule counts optimizer steps.
        division: the parts that are divided, and their memory.

    Raises:
        ConfigurationError: DeepSpeed does not compute the module's number format on this machine.
    """

    divided = True

    def __init__(self, module: nn.Module, settings: OptimizerSettings, *, division: DeepSpeedSettings) -> None:
        dtype = next(parameter.dtype for parameter in module.parameters() if parameter.requires_grad)
        division = with_masters(division, dtype)
        self._settings, self._stage = settings, division.zero_stage
        self.first = deepspeed_library().comm.get_rank() == 0
        clips = self._stage > 0 or dtype != torch.float32  # otherwise DeepSpeed steps torch's own optimizer
        # No list of the parameters outlives this call: it would keep shares in memory that `partition` replaces.
        config = engine_config(settings, division, [p for p in module.parameters() if p.requires_grad], clips=clips)

        # Layers are divided before DeepSpeed takes the module; sizes are those of whole parameters, by name.
        if division.tensor_parallel_size == 1:
            partition(module, config)
        else:
            tensor_parallel.make_rest_whole(module)
        sizes = {name: math.prod(whole_shape(p)) * p.element_size() for name, p in module.named_parameters()}
        if self._stage == PARAMETERS:
            fetch_mixtures(module)
            fetch_heads(module)
        self._engine = tensor_parallel.initialize(
            module,
            config,
            size=division.tensor_parallel_size,
            optimizer=lambda _: self._make_stepping(module, division, clips=not clips),
        )
        self._optimizer, self._size = self._engine.optimizer, self._engine.dp_world_size

        # Tensor parallelism may have replaced parameters: only now the module has those that are trained.
        self._named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        self._sizes = {p: sizes[name] for name, p in module.named_parameters()}
        self._device = self._named[0][1].device
        self._norm: float | None = None
        self._largest: dict[str, Tensor] = {}
        for name, parameter in self._named:
            parameter.register_hook(partial(self._note_gradient, name))  # type: ignore[no-untyped-call]
        self._proof = GradientProof([name for name, _ in self._named], tells=self.first)
        self._scaling = Scaling(module, tells=self.first)

        self.steps = 0
        self._keys = moment_keys(module, muon=settings.muon is not None)
        self._make_moments()
        masters = [master for master, _ in self._masters()]
        beta, every = settings.ema_beta, settings.ema_every
        self._average = None if beta is None else MovingAverage(masters, beta, every)
        self._sleeping = SleepingTensors(self._sleepers, self._device, self._relink)

    def _make_stepping(self, module: nn.Module, division: DeepSpeedSettings, *, clips: bool) -> torch.optim.Optimizer:
        """Makes the optimizer of the parameters that tensor parallelism has left in the module."""
        adam = partial(make_adam, settings=self._settings, division=division)
        trained = {parameter: parameter for parameter in module.parameters() if parameter.requires_grad}
        self._stepping = stepping(module, trained, self._settings, adam, self._directions)
        if clips:
            self._stepping.register_step_pre_hook(self._clip)
        return self._stepping

    def __call__(self, *inputs: Any) -> Any:
        """Returns the module's forward pass."""
        return self._engine(*inputs)

    def agree(self, well: bool) -> bool:
        """Implements `TrainedModule.agree`."""
        flag = torch.tensor([float(well)], device=self._device)
        torch.distributed.all_reduce(flag, op=torch.distributed.ReduceOp.MIN)
        return bool(flag)

    def summed(self, values: Tensor) -> Tensor:
        """Implements `TrainedModule.summed`."""
        total = values.clone()
        torch.distributed.all_reduce(total)
        return total

    def sleep(self) -> None:
        """Implements `TrainedModule.sleep`; at stage 0 in float32 the parameters themselves are stepped, and stay.
        Nothing may be offloaded for good."""
        from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum as States

        if self._stage == PARAMETERS and not self._sleeping.asleep:
            buffers = (States.lp_grads, States.contiguous_grad_buffer)
            self._engine.offload_states(include=buffers, pin_memory=self._device.type == "cuda")
        self._sleeping.sleep()

    def _sleepers(self) -> Iterator[Tensor]:
        weights = [getattr(parameter, "ds_tensor", parameter) for parameter in self._engine.parameters()]
        return sleeping((master for master, _ in self._masters()), self._stepping.state, weights)

    def _relink(self) -> None:
        """Makes the parts of masters and moments that ZeRO below stage 3 has noted of each parameter anew."""
        if hasattr(self._optimizer, "_lazy_init_hp_params_optimizer_state"):
            self._optimizer._link_all_hp_params()
            self._optimizer._hp_optimizer_states_linked = False
            self._optimizer._lazy_init_hp_params_optimizer_state()

    def backward(self, loss: Tensor) -> None:
        """Implements `TrainedModule.backward`."""
        if self._sleeping.asleep:
            self._sleeping.wake()
            if self._stage == PARAMETERS:
                self._engine.reload_states()
        if self._scaling.active:
            # DeepSpeed multiplies each process's loss by this scale, and divides the reduced gradient by it.
            self._optimizer.override_loss_scale(self._scaling.factor / self._size)
        self._engine.backward(loss * self._size, scale_wrt_gas=False)  # DeepSpeed takes the mean over processes

    def step(self) -> dict[str, float]:
        """Implements `TrainedModule.step`."""
        largest = float(torch.stack(list(self._largest.values())).max()) if self._largest else 0.0
        lr = set_rates(self._optimizer, self._settings, self.steps)
        if not self.agree(math.isfinite(largest)):
            self.clear()
            return {"lr": Common(lr)} | self._scaling.skipped(self.steps, largest)
        if self._proof.under_way:
            self._proof.look(self._gradient_sizes())
        self._engine.step()
        if self._average is not None:
            self._average.follow(self.steps + 1)
        self._largest.clear()
        self.steps += 1
        self.check_weights(self._own_weights())
        norm = self._engine.get_global_grad_norm() if self._norm is None else self._norm
        return {"grad_norm": Common(norm), "lr": Common(lr)} | self._scaling.applied()

    def clear(self) -> None:
        """Implements `TrainedModule.clear`."""
        self._largest.clear()
        self._engine.zero_grad()
        self._optimizer.zero_grad()
        if self._stage in (1, 2):  # what earlier micro-batches left lies in buffers: stage 3 forgets them by itself
            self._optimizer.micro_step_id = -1
            for kept in (self._optimizer.averaged_gradients, getattr(self._optimizer, "all_grad_tensors", {})):
                for group in kept:
                    kept[group] = None

    def bytes(self, parameter: nn.Parameter) -> int:
        """Implements `TrainedModule.bytes`."""
        return self._sizes[parameter]

    @contextmanager
    def gathered(self, parameters: Sequence[nn.Parameter]) -> Iterator[Whole]:
        """Implements `TrainedModule.gathered`."""
        zero = deepspeed_library().zero.GatheredParameters(list(parameters), enabled=self._stage == PARAMETERS)
        with zero, tensor_parallel.gathered(parameters):
            yield as_it_is

    def part(self, parameter: nn.Parameter) -> tuple[int, Tensor] | None:
        """Implements `TrainedModule.part`."""
        return None if tensor_parallel.is_divided(parameter) else own_run(parameter)

    def averaged(self) -> AbstractContextManager[None]:
        """Implements `TrainedModule.averaged`."""
        assert self._average is not None
        return self._average.published(self._publish)

    def state_dict(self) -> dict[str, Any]:
        """Implements `TrainedModule.state_dict`: whole in the first process, empty in the others."""
        state: dict[str, Any] = {**self._numbers(), "masters": {}, "moments": {}}
        for part in self._state_parts():
            for section, tensors in part.items():
                state.setdefault(section, {}).update(tensors)
        return state

    def write_state(self, directory: Path) -> None:
        """Implements `TrainedModule.write_state`: the first process writes all, and has one file at a time in
        memory."""
        write_parts(self._numbers(), self._state_parts(), directory)

    def state_copy(self) -> Callable[[Path], None]:
        """Implements `TrainedModule.state_copy`: the first process has a copy of all."""
        numbers, parts = self._numbers(), list(self._state_parts())
        return lambda directory: write_parts(numbers, parts, directory)

    def _numbers(self) -> dict[str, Any]:
        """Returns the numbers of the state."""
        return {"steps": self.steps, **self._scaling.state_dict()}

    def _state_parts(self) -> Iterator[dict[str, dict[str, Any]]]:
        """Yields copies on the CPU of what the state has of one parameter, by section, in the first process, and
        nothing in the others; all must go through it."""
        for name, parameter in self._named:
            master = self._whole(parameter)
            moments = {key: self._whole(parameter, key) for key in self._keys[name]}
            if self.first:
                copies = {key: moment.to("cpu", copy=True) for key, moment in moments.items()}
                step = {} if MOMENTUM in moments else {"step": torch.tensor(float(self.steps))}
                yield {"masters": {name: master.to("cpu", copy=True)}, "moments": {name: copies | step}}
        if self._average is not None:
            with self._average.in_place():
                for name, parameter in self._named:
                    average = self._whole(parameter)
                    if self.first:
                        yield {"averages": {name: average.to("cpu", copy=True)}}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Implements `TrainedModule.load_state_dict`."""
        check_state(state, self._keys, averages=self._average is not None)
        self.steps = int(state["steps"])
        self._scaling.load_state_dict(state)
        for moments in self._stepping.state.values():
            if "step" in moments:
                moments["step"].fill_(self.steps)
        for name, parameter in self._named:
            self._set_whole(parameter, state["masters"][name])
            for key in self._keys[name] if name in state["moments"] else ():
                self._set_whole(parameter, state["moments"][name][key], key)
        if self._average is not None:
            with self._average.in_place():
                for name, parameter in self._named:
                    self._set_whole(parameter, state["averages"][name])
        self._publish()

    @torch.no_grad()
    def _publish(self) -> None:
        """Copies the masters to the weights that the module computes with."""
        for _, parameter in self._named:
            master = tensor_parallel.share(parameter, self._whole(parameter))
            with self._written([parameter]):
                parameter.copy_(master)

    def _note_gradient(self, name: str, gradient: Tensor) -> None:
        """Records the largest absolute entry of a gradient, which is not finite if any entry is not."""
        size = torch.linalg.vector_norm(gradient.detach().flatten(), math.inf).float()
        self._largest[name] = torch.maximum(size, self._largest[name]) if name in self._largest else size

    def _gradient_sizes(self) -> dict[str, float]:
        """Returns the largest absolute entry, over all processes, of each parameter's gradient, if it got one in
        any."""
        nothing = torch.tensor(-1.0, device=self._device)
        sizes = torch.stack([self._largest.get(name, nothing) for name, _ in self._named])
        torch.distributed.all_reduce(sizes, op=torch.distributed.ReduceOp.MAX)
        return {name: size for (name, _), size in zip(self._named, sizes.tolist(), strict=True) if size >= 0}

    def _clip(self, *_: Any) -> None:
        """Clips gradients, as a hook before a step of torch's own optimizer."""
        parameters = [parameter for _, parameter in self._named]
        self._norm = tensor_parallel.gradient_norm(parameters)
        nn.utils.clip_grads_with_norm_(parameters, self._settings.max_norm or math.inf, torch.tensor(self._norm))

    def _written(self, parameters: Sequence[nn.Parameter]) -> AbstractContextManager[None]:
        """Gathers the parameters inside the block; values that the first process writes are sent to all."""
        if self._stage < PARAMETERS:
            return nullcontext()
        written: AbstractContextManager[None] = deepspeed_library().zero.GatheredParameters(
            list(parameters), modifier_rank=0
        )
        return written

    def _masters(self) -> Iterator[tuple[Tensor, dict[str, Any]]]:
        """Yields the float32 tensors that are stepped on in this process, and their parameter groups."""
        groups = self._stepping.param_groups
        if self._stage == PARAMETERS:
            owner = self._optimizer.sub_group_to_group_id
            for index, flat in enumerate(self._optimizer.fp32_partitioned_groups_flat):
                yield flat, groups[owner[index]]
        else:
            for group in groups:
                for master in group["params"]:
                    yield master, group

    def _own_weights(self) -> Iterator[Tensor]:
        """Yields the float32 weights in this process."""
        if self._stage != PARAMETERS:
            yield from (master for master, _ in self._masters())
            return
        groups = zip(self._optimizer.fp16_groups, self._optimizer.fp32_partitioned_groups_flat, strict=True)
        for parameters, flat in groups:
            parts = flat.split([parameter.ds_tensor.ds_numel for parameter in parameters])
            for parameter, part in zip(parameters, parts, strict=True):
                # Parts are of one size: the last ones end with memory that nobody has written.
                own = parameter.ds_numel - parameter.ds_zero_partition_rank * part.numel()
                yield part[: max(0, own)]

    def _make_moments(self) -> None:
        """Makes the optimizer's moments. Otherwise its first step does, and DeepSpeed links only those of the first
        group.
        """
        for master, group in self._masters():
            if "matrices" in group:
                self._stepping.state[master] = {MOMENTUM: torch.zeros_like(master)}
            else:
                moments = {key: torch.zeros_like(master) for key in MOMENTS}
                step = torch.zeros((), device=master.device)  # where a fused AdamW wants it
                self._stepping.state[master] = {"step": step, **moments}
        if hasattr(self._optimizer, "_lazy_init_hp_params_optimizer_state"):
            self._optimizer._lazy_init_hp_params_optimizer_state()

    def _directions(self, parameters: Sequence[nn.Parameter], master: Tensor, momentum: Tensor) -> Tensor:
        """Returns Muon's directions, which need whole matrices. These are gathered one after the other in the memory of
        the weights, which DeepSpeed can gather."""
        if self._optimizer is self._stepping:
            return whole_directions(parameters, master, momentum)
        weights = master.clone()
        master.copy_(momentum)
        for parameter in parameters:
            self._set_whole(parameter, orthogonal(self._whole(parameter)))
        directions = master.clone()
        master.copy_(weights)
        return directions

    def _whole(self, parameter: nn.Parameter, key: str | None = None) -> Tensor:
        """Returns a parameter's float32 weight, or one of its moments."""
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        if self._optimizer is self._stepping:
            value = parameter.detach() if key is None else self._stepping.state[parameter][key]
        elif key is None:
            value = safe_get_full_fp32_param(parameter)
        else:
            value = safe_get_full_optimizer_state(parameter, key)
        return tensor_parallel.whole(parameter, value.to(self._device))

    def _set_whole(self, parameter: nn.Parameter, value: Tensor | StoredTensor, key: str | None = None) -> None:
        from deepspeed.utils import safe_set_full_fp32_param, safe_set_full_optimizer_state

        value = tensor_parallel.share(parameter, whole_tensor(value).to(self._device))
        if self._optimizer is self._stepping:
            (parameter if key is None else self._stepping.state[parameter][key]).copy_(value)
            return
        if self._stage == PARAMETERS:
            self._set_part(parameter, value, key)
        elif key is None:
            safe_set_full_fp32_param(parameter, value)
        else:
            safe_set_full_optimizer_state(parameter, value, key)

    def _set_part(self, parameter: nn.Parameter, value: Tensor, key: str | None) -> None:
        """Sets this process's part of a parameter; the last part is padded with zeros."""
        from deepspeed.utils import (
            safe_get_local_fp32_param,
            safe_get_local_optimizer_state,
            safe_set_local_fp32_param,
            safe_set_local_optimizer_state,
        )

        part = safe_get_local_fp32_param(parameter) if key is None else safe_get_local_optimizer_state(parameter, key)
        size = part.numel()
        whole = functional.pad(value.flatten(), (0, size * self._size - value.numel()))
        rank = torch.distributed.get_rank(self._engine.data_parallel_group)
        mine = whole[rank * size : (rank + 1) * size]
        if key is None:
            safe_set_local_fp32_param(parameter, mine)
        else:
            safe_set_local_optimizer_state(parameter, mine, key)
