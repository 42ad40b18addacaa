"""Runs of weights, as one process of a group has them, to be sent without putting a weight together.

Invariants: the runs of all processes are all weights, each element once.
Does not own: how a module divides its parameters (`TrainedModule.part`).
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain

from torch import Tensor

from rollgrad.adapters.models.torch.loading.lora import NamedWeight
from rollgrad.adapters.models.torch.loading.quantised import is_quantised
from rollgrad.adapters.models.torch.loading.weight_shards import whole_shape
from rollgrad.adapters.models.torch.optimizers.trained_module import TrainedModule
from rollgrad.adapters.weights.shared_buckets import Run


def weight_parts(
    weights: Sequence[NamedWeight], buffers: Mapping[str, Tensor], trained: TrainedModule
) -> Iterator[Run] | None:
    """Returns an iterator of this process's run of each weight, which may be empty, and of each buffer, which the first
    process has. Returns None if a weight cannot be sent in parts: it has an adapter to be merged, is in 4 bits, or the
    parts that its processes have are no runs."""
    if any(
        weight.layer is not None or is_quantised(weight.parameter) or trained.part(weight.parameter) is None
        for weight in weights
    ):
        return None
    return chain(_runs(weights, trained), _runs_of_buffers(buffers, trained))


def _runs(weights: Sequence[NamedWeight], trained: TrainedModule) -> Iterator[Run]:
    for weight in weights:
        part = trained.part(weight.parameter)
        assert part is not None
        yield Run(weight.name, tuple(whole_shape(weight.parameter)), *part)


def _runs_of_buffers(buffers: Mapping[str, Tensor], trained: TrainedModule) -> Iterator[Run]:
    for name, buffer in buffers.items():
        begin = 0 if trained.first else buffer.numel()
        yield Run(name, tuple(buffer.shape), begin, buffer.detach().reshape(-1)[begin:])
