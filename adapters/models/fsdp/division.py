"""Divides a module over the processes of a group by torch's `fully_shard` (FSDP2; Zhao et al. 2023, "PyTorch FSDP:
Experiences on Scaling Fully Sharded Data Parallel", arXiv:2304.11277).

Each layer is whole only while it computes; what is outside of the layers (embeddings, last norm, head) is whole during
each forward and backward pass. Parameters are divided by rows; those of experts that groups of processes divide
(`expert_parallel.py`) over the processes that hold the same ones.
Invariants: one parameter is divided after the other, so that a process holds no more than it has loaded; tied weights
stay tied; the sum of the processes' gradients is taken, not their mean.
Does not own: the optimizer, nor how a model is loaded.
"""

import os
import warnings
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
from attrs import frozen
from torch import Tensor, distributed, nn

from rollgrad.adapters.models.torch.experts.expert_parallel import divided_stacks, exchange_tokens, expert_groups
from rollgrad.adapters.models.torch.loading.weight_shards import (
    WHOLE_SHAPE,
    Place,
    expert_meshes,
    is_sharded,
    layer_stacks,
    own_place,
    parameter_places,
    replace_parameter,
    whole_shape,
)
from rollgrad.adapters.models.torch.optimizers.untrained_parameters import may_lack_gradient
from rollgrad.domain.errors import ConfigurationError


def start_process_group(*, rank: int, size: int, host: str, port: int, local_rank: int, timeout: float) -> None:
    """Joins the processes of a group, which wait for each other `timeout` seconds at most, now and later. They meet at
    an existing `torch.distributed.TCPStore`, like torchrun's."""
    os.environ |= {"MASTER_ADDR": host, "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    if torch.cuda.is_available():
        torch.cuda.set_device(local_rank)
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    # It warns of changes in place to what a model returns, of which there are none.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
    distributed.init_process_group(backend, rank=rank, world_size=size, timeout=timedelta(seconds=timeout))


@frozen(kw_only=True, eq=False)
class DividedModule:
    """A module after `divide`: `formats` has the number format in which each parameter computes, `meshes` the processes
    over which its rows are divided, `device` where they compute."""

    module: nn.Module
    formats: Mapping[nn.Parameter, torch.dtype]
    meshes: Mapping[nn.Parameter, Any]
    device: torch.device

    def __call__(self, *inputs: Any) -> Any:
        """Returns the module's forward pass."""
        output = self.module(*inputs)
        if not torch.is_grad_enabled():
            self.rest()
        return output

    def rest(self) -> None:
        """Frees what was left whole for a backward pass that does not come."""
        self.module.reshard()  # type: ignore[operator]

    def whole(self, parameter: nn.Parameter) -> Tensor:
        """Returns a whole parameter in the format in which it computes; every process must ask for it."""
        return self.gathered(parameter, rows_of(parameter).to(self.formats[parameter]))

    def gathered(self, parameter: nn.Parameter, rows: Tensor) -> Tensor:
        """Returns a whole tensor in the shape of `parameter` from each process's `rows`."""
        whole: Tensor = _of_rows(rows.to(self.device), self.meshes[parameter], whole_shape(parameter)).full_tensor()
        return whole

    def place(self, parameter: nn.Parameter) -> tuple[int, int]:
        """Returns the first of this process's rows of a parameter and the one after its last, among those of the
        whole."""
        return own_place(whole_shape(parameter)[0], self.meshes[parameter])


def rows_of(parameter: Any) -> Tensor:
    """Returns this process's rows of a divided parameter, in FSDP's own memory."""
    with torch.no_grad():
        rows: Tensor = parameter.to_local()
    return rows


def divide(module: nn.Module, *, offload: bool = False) -> DividedModule:
    """Divides `module` in place over all processes of torch's default group; experts that groups of them divide
    (`join_expert_groups`) over those that hold the same ones.

    Args:
        module: equal in every process, whole or with matrices of which each process has its rows, as DTensors.
        offload: whether parameters and gradients rest in the CPU's memory.

    Trained parameters become float32, and compute in the format that they had; frozen ones keep it.

    Raises:
        ConfigurationError: FSDP2 cannot divide a parameter, or the groups cannot divide the experts.
    """
    from torch.distributed.device_mesh import init_device_mesh  # imports that take half a second

    first = next(module.parameters())
    device, dtype = first.device, first.dtype
    mesh = init_device_mesh(device.type, (distributed.get_world_size(),))
    in_other_formats = [
        part for part in module.modules() if any(p.dtype != dtype for p in part.parameters(recurse=False))
    ]
    _refuse_undividable(module, in_other_formats)
    groups = expert_groups()
    stacks = dict.fromkeys(divided_stacks(module), groups.alike) if groups is not None else {}
    shares = _taken_out(module, mesh, torch.device("cpu") if offload else device)
    for stack in stacks:
        exchange_tokens(stack)
    layers = [layer for stack in layer_stacks(module) for layer in stack]
    units = dict.fromkeys([*in_other_formats, *stacks, *layers, module])  # inner ones first
    for unit in units:
        computes = None if unit in in_other_formats else dtype
        divided = _fully_sharded(unit, stacks.get(unit, mesh), computes, offload=offload, pinned=device.type == "cuda")
        may_be_unused = unit in stacks or any(may_lack_gradient(name) for name, _ in unit.named_parameters())
        if may_be_unused and unit is not module:
            _send_unused_gradients(divided, type(unit).__name__)
    parameters = [_put_back(share) for share in shares]
    for unit in units:
        # After this FSDP takes the parameters that are there now.
        unit._apply(lambda tensor: tensor, recurse=False)
    for parameter, share in zip(parameters, shares, strict=True):
        setattr(parameter, WHOLE_SHAPE, share.shape)  # `_apply` would have dropped it
    return DividedModule(
        module=module,
        formats={parameter: share.compute for parameter, share in zip(parameters, shares, strict=True)},
        meshes={parameter: share.mesh for parameter, share in zip(parameters, shares, strict=True)},
        device=device,
    )


def _refuse_undividable(module: nn.Module, in_other_formats: Sequence[nn.Module]) -> None:
    """Refuses parameters without rows, and parts whose own parameters have several formats.

    Args:
        module: the whole model.
        in_other_formats: its parts with parameters in another format than the model's first one.
    """
    if numbers := [name for name, parameter in module.named_parameters() if not parameter.ndim]:
        raise ConfigurationError(
            f"cluster.strategy is fsdp2, but {numbers[0]} of the model is a single number, which has no rows to "
            "divide: set --cluster.strategy deepspeed."
        )
    for part in in_other_formats:
        if len(formats := {str(parameter.dtype).removeprefix("torch.") for parameter in part.parameters()}) > 1:
            raise ConfigurationError(
                f"cluster.strategy is fsdp2, but a {type(part).__name__} of the model has parameters in "
                f"{' and '.join(sorted(formats))}, which one unit cannot compute: set --actor.dtype float32, or "
                "--cluster.strategy deepspeed."
            )


def _fully_sharded(unit: nn.Module, mesh: Any, computes: torch.dtype | None, *, offload: bool, pinned: bool) -> Any:
    """Returns a part of the model that FSDP divides over the processes of `mesh`, and that computes in a format (None:
    in that of its parameters)."""
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    precision = MixedPrecisionPolicy(
        param_dtype=computes,
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,  # the model casts where it does in one process
    )
    policy: OffloadPolicy = CPUOffloadPolicy(pin_memory=pinned) if offload else OffloadPolicy()
    try:
        divided = fully_shard(unit, mesh=mesh, mp_policy=precision, offload_policy=policy)
    except ValueError as error:
        raise ConfigurationError(
            f"cluster.strategy is fsdp2, which cannot divide the model ({error}): set --cluster.strategy deepspeed."
        ) from error
    divided.set_gradient_divide_factor(1.0)
    divided.set_force_sum_reduction_for_comms(True)  # gloo has no other
    return divided


def _send_unused_gradients(divided: Any, kind: str) -> None:
    """Has a divided part of the model (of the class `kind`) send gradients also where a process has used nothing of it:
    tokens may reach an expert in some of the processes only, and all must send the same gradients."""
    if not hasattr(divided, "set_reduce_scatter_unused_params"):
        raise ConfigurationError(
            f"cluster.strategy is fsdp2, and the model has a {kind} of which a process may use nothing in a step, for "
            f"which torch {torch.__version__} has no rule: install torch 2.13 or newer, or set --cluster.strategy "
            "deepspeed."
        )
    divided.set_reduce_scatter_unused_params(True, recurse=False)


@frozen(kw_only=True, eq=False)
class _Share:
    """This process's share of a parameter."""

    rows: Tensor
    places: list[Place]
    """Attributes of modules that are this parameter: several where it is tied."""
    compute: torch.dtype
    """Format in which it computes."""
    trained: bool
    mesh: Any
    """Processes that divide it."""
    shape: torch.Size
    """Shape of the whole parameter."""


def _taken_out(module: nn.Module, mesh: Any, device: torch.device) -> list[_Share]:
    """Puts parameters without memory in the places of a module's parameters; returns this process's rows of those."""
    owners, meshes = parameter_places(module), expert_meshes(module)
    shares = []
    while owners:
        parameter = next(iter(owners))
        places, over = owners.pop(parameter), meshes.pop(parameter, mesh)
        compute, trained, shape = parameter.dtype, parameter.requires_grad, parameter.shape
        kept = torch.float32 if trained else compute
        rows = _own_rows(parameter, over, kept, device)
        expert_shares = over.size(0) if over.ndim > 1 else 1  # FSDP divides this process's experts alone
        empty = torch.empty(shape[0] // expert_shares, *shape[1:], dtype=kept, device="meta")
        replace_parameter(places, nn.Parameter(empty, requires_grad=trained))
        shares.append(_Share(rows=rows, places=places, compute=compute, trained=trained, mesh=over, shape=shape))
        del parameter  # its memory is free before the next one is divided
    return shares


def _own_rows(parameter: nn.Parameter, mesh: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns this process's rows of a parameter, whole or divided, in memory that holds nothing else."""
    whole = not is_sharded(parameter)
    rows = parameter.detach()[slice(*own_place(len(parameter), mesh))] if whole else rows_of(parameter)
    shares_memory = rows.untyped_storage().nbytes() > rows.nbytes  # with other rows, or with the rest of a file
    return rows.to(device, dtype, copy=shares_memory).contiguous()


def _put_back(share: _Share) -> nn.Parameter:
    """Puts this process's rows of a parameter into its places, where FSDP has an empty one; returns the new
    parameter."""
    from torch.distributed.tensor import DTensor

    part, name, _ = share.places[0]
    # `from_local` would move the rows of all parameters to the GPU, which those that rest elsewhere may not fit.
    own: Any = DTensor(share.rows, getattr(part, name)._spec, requires_grad=False)  # type: ignore[no-untyped-call]
    parameter = nn.Parameter(own, requires_grad=share.trained)
    replace_parameter(share.places, parameter)
    return parameter


def _of_rows(rows: Tensor, mesh: Any, shape: Sequence[int]) -> Any:
    """Returns a DTensor of a `shape`, of which each process has its `rows`."""
    from torch.distributed.tensor import DTensor, Shard

    stride = torch.empty(shape, device="meta").stride()
    placements = [Shard(0)] * mesh.ndim
    return DTensor.from_local(rows, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)
