"""A process that holds a part of one model, and how it is started and ended.

Does not own: the calls that all processes of a model make together (`worker_group.py`).
"""

import gc
import importlib
import math
import os
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from rollgrad.adapters.ray.placement import Slot
from rollgrad.adapters.ray.session import machine, ray_module, require_raylet, show_gpus

PASSES = frozenset(
    {
        *("score", "scores", "logprobs", "values", "predict", "update", "sleep"),
        *("skip_weights", "gather_weights", "gather_adapter"),
    }
)
"""Methods of models after which much memory is free: those that go through all layers, those that end a transfer, after
which engines take memory for keys and values, and sleep."""

JUDGING = "judge"
"""Method of reward models, which is called for a few replies at a time while others are sampled."""


class RankWorker:
    """Worker in each process of a group of `size`, with `threads` threads of torch. `own_gpu`: whether it shares its
    GPU with no other process."""

    def __init__(self, rank: int, size: int, threads: int, *, own_gpu: bool) -> None:
        gc.disable()  # imports leave no garbage, and would take a quarter longer with collection
        show_gpus()
        import torch

        torch.set_num_threads(threads)
        self._rank, self._size, self._own_gpu = rank, size, own_gpu
        self._model: Any = None
        self._store: Any = None
        """Store made by `listen`; it ends with this process."""

    def prepare(self, modules: Sequence[str]) -> None:
        """Imports modules that models need."""
        for module in modules:
            with suppress(ImportError):  # who needs one that is missing says what for
                importlib.import_module(module)
        gc.freeze()  # else looking for garbage in modules would hold a step up, and with it all other processes

    def address(self) -> tuple[str, int]:
        """Returns the host and a free port of this process."""
        from ray.util import get_node_ip_address

        with socket.socket() as listener:
            listener.bind(("", 0))
            return str(get_node_ip_address()), int(listener.getsockname()[1])

    def listen(self) -> tuple[str, int]:
        """Starts a store at which the group's processes meet; returns its host and port. The port is taken from now on,
        so that nothing else gets it while libraries load."""
        from ray.util import get_node_ip_address
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        host = str(get_node_ip_address())
        self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
        return host, int(self._store.port)

    def machine(self) -> str:
        """Returns Ray's id of this process's machine."""
        return machine()

    def join(self, host: str, port: int, timeout: float, start: Callable[..., None]) -> int:
        """Joins the process group by `start`; returns the id of this process."""
        # By default NCCL's watchdog, which a full queue of a GPU that waits for another process may hold up, has eight
        # minutes before torch ends the process.
        os.environ.setdefault("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", str(math.ceil(timeout)))
        local = 0 if os.environ.get("CUDA_VISIBLE_DEVICES") else self._rank
        start(rank=self._rank, size=self._size, host=host, port=port, local_rank=local, timeout=timeout)
        return os.getpid()

    def build(self, make: Callable[..., Any], *arguments: Any) -> None:
        """Makes the model that later calls are made on."""
        import torch

        from rollgrad.adapters.models.torch.allocator import keep_freed_memory, let_segments_grow

        let_segments_grow()
        try:
            self._model = make(*arguments)
        finally:
            gc.enable()
        self._release_memory()
        if not torch.cuda.is_available():
            keep_freed_memory()  # the memory of passes, not of loading

    def call(self, method: str, *arguments: Any) -> Any:
        """Calls a method of the model; returns its result."""
        from rollgrad.adapters.models.ray.wire import called

        try:
            return called(self._model, method, arguments)
        finally:
            if method in PASSES:
                self._release_memory()
            elif method == JUDGING and not self._own_gpu:  # a model that trains next would lack the memory
                from rollgrad.adapters.models.torch.allocator import FreedGPUMemory

                FreedGPUMemory().sleep()

    def begin_profile(self) -> None:
        """Begins to record what this process computes."""
        from rollgrad.adapters.system.profile import begin_profile

        self._end_profile = begin_profile()

    def end_profile(self) -> bytes:
        """Returns what was recorded, as a Chrome trace."""
        return self._end_profile()

    def _release_memory(self) -> None:
        """Gives freed memory back to the system: models take turns on a machine, and others need it. On a GPU of its
        own the next pass needs it again, and to allocate it anew takes time."""
        from rollgrad.adapters.models.torch.allocator import give_back_freed_memory

        give_back_freed_memory(of_gpu=not self._own_gpu)


def start_by_deepspeed(**place: Any) -> None:
    """Calls `start_process_group` of DeepSpeed's room, which is imported in the processes alone."""
    from rollgrad.adapters.models.deepspeed.processes import start_process_group

    start_process_group(**place)


def begin_workers(slots: Sequence[Slot], *, threads: int, modules: Sequence[str] = ()) -> list[Any]:
    """Begins to start the processes of a group, each of which then imports `modules`; returns Ray's handles of them
    without waiting.

    Raises:
        WorkerError: Ray's own processes have died, without which none would ever start.
    """
    require_raylet()
    remote = ray_module().remote(RankWorker)
    workers = [
        remote.options(**slot.options(), max_restarts=0).remote(rank, len(slots), threads, own_gpu=slot.gpus >= 1)
        for rank, slot in enumerate(slots)
    ]
    if modules:
        for worker in workers:
            worker.prepare.remote(modules)
    return workers


def end_workers(workers: Sequence[Any]) -> None:
    """Ends processes."""
    ray = ray_module()
    for worker in workers:
        if ray.is_initialized():
            ray.kill(worker)
