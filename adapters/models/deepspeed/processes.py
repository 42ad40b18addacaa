"""The group of processes in which DeepSpeed divides models, and the library itself."""

import os
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import distributed_c10d

from rollgrad.domain.errors import MissingExtraError

NO_DEEPSPEED = "Training in several processes needs DeepSpeed: pip install rollgrad[deepspeed,ray]."
"""The error where it is not installed."""


def start_process_group(*, rank: int, size: int, host: str, port: int, local_rank: int, timeout: float) -> None:
    """Joins the processes of a group, which wait for each other `timeout` seconds at most, now and later. They meet at
    an existing `torch.distributed.TCPStore`, like torchrun's.

    Raises:
        MissingExtraError: DeepSpeed is not installed.
    """
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(local_rank),
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    deepspeed = deepspeed_library()
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = (
        False  # compiling this inference kernel would take a minute
    )
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    longest = timedelta(seconds=timeout)
    # ZeRO and AutoTP exchange in groups of their own, which DeepSpeed makes without a timeout. Torch's is ten minutes
    # for NCCL, after which it ends processes that wait for one that writes a large state.
    vars(distributed_c10d).update(default_pg_timeout=longest, default_pg_nccl_timeout=longest)
    deepspeed.init_distributed(
        backend, auto_mpi_discovery=False, verbose=False, timeout=longest, rank=rank, world_size=size
    )
    # ZeRO would exchange in a copy of this group, whose buffers of NCCL take as much of a GPU again.
    deepspeed.utils.groups._WORLD_GROUP = torch.distributed.group.WORLD


def deepspeed_library() -> Any:
    """Returns the module `deepspeed`, which reports errors alone.

    Raises:
        MissingExtraError: it is not installed.
    """
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")
    try:
        import deepspeed
    except ImportError as error:
        raise MissingExtraError(NO_DEEPSPEED) from error
    from deepspeed.utils import logger

    logger.setLevel("ERROR")
    return deepspeed
