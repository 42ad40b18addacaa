"""Weights within a GPU's memory, for engines on the trainer's own GPUs: vLLM's own backend `ipc`.

Every process of the policy that shares its GPU with an engine, or with a part of one, packs all weights into buckets of
that GPU's memory. The engine's worker there maps a bucket by a handle and takes its part of each weight. Each GPU has
one bucket, which is written again when all engines have copied it.
"""

import base64
import pickle
from collections.abc import Generator, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from rollgrad.adapters.weights.gpu_buckets import Contents, Packer
from rollgrad.adapters.weights.transfer import Life, Update, WeightStream, sent
from rollgrad.domain.ports.models import PolicyModel

Handles = dict[str, tuple[Any, ...]]
"""Arguments by GPU id, from which `torch.multiprocessing` rebuilds a tensor in that GPU's memory."""

DEVICE, COUNTER = 6, slice(11, 13)
"""Places in them of the GPU, and of the name and the place of what counts who has still to give the memory back."""

_handles: list[tuple[Any, ...]] = []
"""Handles of this process's buckets in the last transfer."""


def cuda_ipc(policy: PolicyModel, engines: Sequence[Life], version: int, *, workers: int = 1) -> WeightStream:
    """Implements `Backend`; the `workers` processes of engine k share their GPUs with as many of the policy's, those
    from `k * workers` on."""
    ranks = [rank for number, _ in engines for rank in range(number * workers, (number + 1) * workers)]

    def updates() -> Generator[Update]:
        for messages in sent(policy, exported, ranks=ranks):
            yield packed_update(messages)

    return WeightStream(infos=[{"packed": True}] * len(engines), updates=updates(), ahead=False)


def packed_update(messages: Sequence[tuple[Contents, Handles]]) -> Update:
    """Returns the update for engines of a bucket in several GPUs. Handles are not plain values but pickled, which vLLM
    accepts if VLLM_ALLOW_INSECURE_SERIALIZATION is set."""
    contents = messages[0][0]
    handles = {gpu: handle for _, own in messages for gpu, handle in own.items()}
    pickled = base64.b64encode(pickle.dumps(handles)).decode()
    return contents.update(tensor_sizes=contents.tensor_sizes, ipc_handles_pickled=pickled)


def exported(weights: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[Contents, Handles]]:
    """Yields the contents of each bucket, and the handle of this GPU's bucket."""
    from torch.multiprocessing.reductions import reduce_tensor

    _free_last()
    device = torch.device("cuda", torch.cuda.current_device())
    gpu = str(torch.cuda.get_device_properties(device).uuid)
    packer = Packer(device)
    shared, handle = None, ()
    for contents, _ in packer.buckets(weights):
        if shared is not packer.memory:  # vLLM keeps the mapping of a handle until another handle comes
            shared = packer.memory
            _, handle = reduce_tensor(shared)  # type: ignore[no-untyped-call]
            _handles.append(handle)
        torch.cuda.current_stream(device).synchronize()
        yield contents, {gpu: handle}


def _free_last() -> None:
    """Frees the last transfer's buckets, which engines no longer map: they have given them back, or have died. For one
    that died torch would wait for ever, unless it is counted in its place; the others are collected before, since a
    count that is 0 would go on below it, where torch takes it for a large one."""
    torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]
    while _handles:
        handle = _handles.pop()
        torch.UntypedStorage._release_ipc_counter(  # type: ignore[no-untyped-call]
            *handle[COUNTER], device=handle[DEVICE]
        )
    torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]
