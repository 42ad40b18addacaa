"""Weights through files, for engines on other machines that share a file system, and for inspection: the policy's first
process writes safetensors, which the engines' workers read.

The weights of a version are the shards in a directory named after it; those of the last transfer are kept.
"""

import shutil
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path

import torch
from attrs import frozen
from torch import Tensor

from rollgrad.adapters.checkpoints.lock import keep_locked
from rollgrad.adapters.system.permissions import share_weights
from rollgrad.adapters.weights.gpu_buckets import dtype_name
from rollgrad.adapters.weights.transfer import Life, Update, WeightStream, sent
from rollgrad.domain.errors import CheckpointError
from rollgrad.domain.ports.models import PolicyModel

SHARD_BYTES = 256 * 2**20
"""Bytes of a file, unless one tensor is larger. The trainer has this much of the model in memory twice."""


@frozen
class Disk:
    """Implements `Backend` by files.

    Args:
        directory: a path that means the same directory on all machines; it is created.
        shard_bytes: size of a file.
    """

    directory: Path
    shard_bytes: int = SHARD_BYTES

    def __call__(self, policy: PolicyModel, engines: Sequence[Life], version: int) -> WeightStream:
        """Returns the way of one transfer; the directory needs room for two models.

        Raises:
            CheckpointError: another run has taken the run's directory, in which it is.
        """
        keep_locked(self.directory.parent)
        own = self.directory / str(version)

        def updates() -> Generator[Update]:
            for [update] in sent(policy, write, str(own), self.shard_bytes):
                yield update
            yield Update({"last": True})

        def close(well: bool) -> None:
            for other in self.directory.iterdir() if well else ():
                if other.name.isdigit() and other != own:
                    shutil.rmtree(other, ignore_errors=True)

        return WeightStream(infos=[None] * len(engines), updates=updates(), close=close)


def write(weights: Iterator[tuple[str, Tensor]], directory: str, shard_bytes: int) -> Iterator[Update]:
    """Writes weights shard by shard.

    Raises:
        CheckpointError: the directory cannot be written.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    path = Path(directory)
    try:
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True)
        for number, shard in enumerate(shards(weights, shard_bytes)):
            file = path / f"{number:05}.safetensors"
            save_file(shard, file)
            share_weights(path)
            yield Update(
                {"shard": str(file)},
                bytes=sum(tensor.nbytes for tensor in shard.values()),
                dtypes=tuple({dtype_name(tensor.dtype) for tensor in shard.values()}),
            )
    except (OSError, SafetensorError) as error:  # safetensors reports a full disk by an error of its own
        raise CheckpointError(
            f"{path} does not take the weights for the engines ({error}): point --ckpt.output_dir to a directory with "
            "room for two models, or leave --vllm.sync_backend disk out."
        ) from error


def shards(weights: Iterator[tuple[str, Tensor]], shard_bytes: int) -> Iterator[dict[str, Tensor]]:
    """Yields copies on the CPU, as many at a time as fit into a shard."""
    shard: dict[str, Tensor] = {}
    size = 0
    for name, tensor in weights:
        if shard and size + tensor.nbytes > shard_bytes:
            yield shard
            shard, size = {}, 0
        shard[name] = tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        size += tensor.nbytes
    if shard:
        yield shard
