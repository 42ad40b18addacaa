"""Matrices of which each process of a group has a share of the rows, as DTensors of torch.

`shard_rows` makes them of a model on the meta device, before its files are read: transformers then reads this process's
rows alone, so that no process ever holds the whole model. Whatever divides the model for good (`deepspeed/module.py`)
puts one matrix at a time together.

Invariants: vectors, and matrices of which a process would have no rows, are whole in each process; parameters that were
one object still are.
Does not own: the process group, which has been started before.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, distributed, nn

from rollgrad.adapters.models.torch.experts.expert_parallel import divided_stacks, expert_groups

Shard = Callable[[Any, AbstractSet[str]], None]
"""Divides a model on the meta device, but for the parameters of these names."""


@contextmanager
def reading_by(wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Makes transformers read the files of each model that it loads inside the block by the function that `wrap`
    returns of its own, which is called with the model on the meta device."""
    from transformers import PreTrainedModel

    read = PreTrainedModel._load_pretrained_model
    PreTrainedModel._load_pretrained_model = staticmethod(wrap(read))
    try:
        yield
    finally:
        PreTrainedModel._load_pretrained_model = staticmethod(read)


def sharded_loading(shard: Shard | None) -> AbstractContextManager[None]:
    """Makes transformers call `shard` of each model that it loads inside the block, before it reads the files. Of a
    DTensor it then reads this process's share alone."""
    if shard is None:
        return nullcontext()

    def wrap(read: Callable[..., Any]) -> Callable[..., Any]:
        def shard_and_read(model: Any, state: Any, files: Any, settings: Any, *rest: Any) -> Any:
            shard(model, not_by_rows(model, settings.weight_mapping))
            return read(model, state, files, settings, *rest)

        return shard_and_read

    return reading_by(wrap)


def shard_rows(model: nn.Module, whole: AbstractSet[str]) -> None:
    """Replaces the matrices of a model on the meta device, but those named `whole`, by DTensors, whose rows the
    processes divide.

    Raises:
        ConfigurationError: processes are to divide its experts, and cannot (`expert_parallel.py`).
    """
    from torch.distributed import tensor as dtensor
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cuda" if torch.cuda.is_available() else "cpu", (distributed.get_world_size(),))
    meshes = expert_meshes(model)
    for parameter, places in parameter_places(model).items():
        over = meshes.get(parameter, mesh)
        if parameter.ndim > 1 and _all_have_rows(parameter, over) and whole.isdisjoint(name for *_, name in places):
            share = dtensor.distribute_tensor(parameter.detach(), over, [dtensor.Shard(0)] * over.ndim)
            replace_parameter(places, nn.Parameter(share, requires_grad=parameter.requires_grad))


def expert_meshes(model: nn.Module) -> dict[nn.Parameter, Any]:
    """Returns the mesh of each parameter whose experts processes divide: the rows go to each dimension in turn."""
    groups = expert_groups()
    return {p: groups.mesh for stack in divided_stacks(model) for p in stack.parameters()} if groups else {}


def _all_have_rows(parameter: Tensor, mesh: Any) -> bool:
    """Returns whether each process has rows when a DTensor divides them over `mesh`: 4 rows are 2, 2 and none for 3.
    transformers does not stack the experts of a process that has none."""
    count = len(parameter)
    for size in mesh.shape:
        count -= -(-count // size) * (size - 1)  # those of the last process
    return count > 0


def own_place(count: int, mesh: Any) -> tuple[int, int]:
    """Returns the first of the rows that a DTensor divided over `mesh` has in this process, and the one after its last,
    out of `count`; there may be none."""
    first, last = 0, count
    for size, rank in zip(mesh.shape, mesh.get_coordinate(), strict=True):
        most = -(-(last - first) // size)
        first = min(first + rank * most, last)
        last = min(first + most, last)
    return first, last


def is_sharded(parameter: Tensor) -> bool:
    """Returns whether this process has only a share of the rows."""
    return hasattr(parameter, "full_tensor")  # which DTensors alone have; to import their class takes half a second


def together(parameter: Tensor) -> Tensor:
    """Returns a whole tensor, which all processes ask for; one that is whole already is its own memory."""
    own: Any = parameter.detach()
    whole: Tensor = own.full_tensor() if is_sharded(own) else own
    return whole


WHOLE_SHAPE = "_rollgrad_whole_shape"
"""Attribute of a parameter that FSDP2 divides, of which a process that divides experts knows its own alone."""


def whole_shape(parameter: Tensor) -> Sequence[int]:
    """Returns the shape of a whole parameter; DeepSpeed leaves no numbers in those that it has divided."""
    shape: Sequence[int] = getattr(parameter, "ds_shape", getattr(parameter, WHOLE_SHAPE, parameter.shape))
    return shape


@contextmanager
def whole_layers(model: nn.Module) -> Iterator[None]:
    """Lets a model with sharded weights compute inside the block, without gradients: all processes must run the same
    forward passes. Each layer is whole only while it computes."""
    layers = [layer for stack in layer_stacks(model) for layer in stack]
    inside = layer_parts(model)
    rest = [part for part in model.modules() if part not in inside]
    handles = []
    try:
        for unit, parts in [*((layer, list(layer.modules())) for layer in layers), *((part, [part]) for part in rest)]:
            own = [(part, name, p) for part in parts for name, p in part._parameters.items() if p is not None]
            sharded = [(part, name, p) for part, name, p in own if is_sharded(p)]
            if sharded:
                handles += _hooks(unit, sharded)
        yield
    finally:
        for handle in handles:
            handle.remove()


def make_whole(model: nn.Module, but: AbstractSet[nn.Module] = frozenset()) -> None:
    """Replaces the sharded weights of a model, or of a part that shares none with others, by whole ones; `but`: parts
    whose own weights stay as they are."""
    for parameter, places in parameter_places(model).items():
        if is_sharded(parameter) and not all(part in but for part, *_ in places):
            replace_parameter(places, nn.Parameter(together(parameter), requires_grad=parameter.requires_grad))


def layer_parts(model: nn.Module) -> set[nn.Module]:
    """Returns all parts of a model's layers."""
    return {part for stack in layer_stacks(model) for layer in stack for part in layer.modules()}


def _hooks(unit: nn.Module, sharded: list[tuple[nn.Module, str, nn.Parameter]]) -> list[Any]:
    """Returns handles of hooks that put parameters of `unit` together before its forward pass, and undo it after."""

    def gather(*_: Any) -> None:
        for part, name, parameter in sharded:
            part._parameters[name] = nn.Parameter(together(parameter), requires_grad=False)

    def forget(*_: Any) -> None:
        for part, name, parameter in sharded:
            part._parameters[name] = parameter

    return [unit.register_forward_pre_hook(gather), unit.register_forward_hook(forget, always_call=True)]


def layer_stacks(module: nn.Module) -> Iterator[nn.ModuleList]:
    """Yields the outermost lists of layers."""
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            yield child
        else:
            yield from layer_stacks(child)


Place = tuple[nn.Module, str, str]
"""A module that has a parameter, the parameter's name in it, and its name in the whole model."""


def parameter_places(model: nn.Module) -> dict[nn.Parameter, list[Place]]:
    """Returns the places of each parameter, which are several if weights are tied."""
    places: dict[nn.Parameter, list[Place]] = {}
    for path, part in model.named_modules():
        for name, parameter in part.named_parameters(recurse=False):
            places.setdefault(parameter, []).append((part, name, f"{path}.{name}".removeprefix(".")))
    return places


def replace_parameter(places: Iterable[Place], parameter: nn.Parameter) -> None:
    """Puts a parameter into `places`."""
    for part, name, _ in places:
        setattr(part, name, parameter)


def not_by_rows(model: nn.Module, conversions: Iterable[Any] | None) -> set[str]:
    """Returns the names of parameters whose rows transformers does not make from the same rows of the files. If these
    were divided, it would cut the rows first, and then compute, say, the query's matrix from a third of the rows of
    query, key and value."""
    from transformers.core_model_loading import WeightConverter

    ends = {
        re.split(r"\*|\\d\+|\)", pattern)[-1].strip("$^").replace("\\", "")
        for conversion in conversions or ()
        if isinstance(conversion, WeightConverter) and not all(map(_keeps_rows, conversion.operations))
        for pattern in conversion.target_patterns
    }
    return {name for name, _ in model.named_parameters(remove_duplicate=False) if any(end in name for end in ends)}


def _keeps_rows(operation: Any) -> bool:
    """Returns whether an operation of transformers computes a tensor's rows each from the same rows, or stacks a list
    of tensors, of which transformers then reads those of this process's rows."""
    from transformers.core_model_loading import MergeModulelist, Transpose

    if isinstance(operation, MergeModulelist):
        return bool(operation.dim == 0)
    if isinstance(operation, Transpose):
        return bool(min(operation.dim0, operation.dim1) > 0)
    return bool(getattr(operation, "dim", 0) > 0)
