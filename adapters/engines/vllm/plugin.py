"""The plugin that vLLM loads in each of its processes: the entry point `rollgrad` of `vllm.general_plugins`."""

import multiprocessing
import os
import signal
import threading
import time
from typing import Any

from rollgrad.application.settings.sections.vllm import SyncBackend

BACKEND = "rollgrad"
"""Name of our own weight transfer backend in vLLM: of shared memory, and of files."""

VLLM_BACKENDS = {
    SyncBackend.SHARED_MEMORY: BACKEND,
    SyncBackend.DISK: BACKEND,
    SyncBackend.NCCL: "nccl",
    SyncBackend.CUDA_IPC: "ipc",
}
"""vLLM's names of the backends."""

ENGINE_CORE = "EngineCore"
"""Begins the names of the processes that vLLM starts for engines. They do not watch the process that started them:
where that is killed, they would keep the memory of its GPU."""

WORKER = "VllmWorker"
"""Begins the names of the processes that these start where several share a model. They end by themselves when they are
asked nothing more, but one that waits for a GPU does not come to that: in a broadcast of NCCL it waits for ever for
another process that was killed."""

GRACE_SECONDS = 5.0
"""Time for such a process to end by itself."""

_registered = False


def end_with_parent() -> None:
    """Starts a thread that kills this process once the one that started it is gone, if vLLM started it for an engine.

    The kernel's own signal at a parent's death (PR_SET_PDEATHSIG) comes as soon as the thread ends that started the
    process, which need not be the last one of its process.
    """
    parent, name = multiprocessing.parent_process(), multiprocessing.current_process().name
    if parent is None or not name.startswith((ENGINE_CORE, WORKER)):
        return

    def watch() -> None:
        parent.join()
        if name.startswith(WORKER):
            time.sleep(GRACE_SECONDS)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="end-with-parent", daemon=True).start()


def register() -> None:
    """Makes the backend known to this process, which may use a processor's AMX from now on, and lets one that vLLM
    started for an engine end with the process that started it; may be called again."""
    global _registered
    if _registered:
        return
    end_with_parent()
    import torch

    # Linux lets a process use tiles once it has asked for them. oneDNN asks where it multiplies large matrices, vLLM's
    # attention never: in a process of small products alone it would end with SIGILL. Without AMX nothing happens.
    torch.cpu._init_amx()
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.platforms import current_platform

    from rollgrad.adapters.engines.vllm import call_repairs, cpu_repairs, model_repairs
    from rollgrad.adapters.engines.vllm.loaders import complete_loaders
    from rollgrad.adapters.engines.vllm.weight_receiver import gpu_receiver_class, receiver_class

    WeightTransferEngineFactory.register_engine(BACKEND, receiver_class())
    create = WeightTransferEngineFactory.create_engine

    def created(config: Any, *arguments: Any, **named: Any) -> Any:
        end_of_channel = (gpu_receiver_class(config.backend) or create)(config, *arguments, **named)
        complete_loaders(end_of_channel.model)  # in a worker
        call_repairs.repair_sleep()  # its import takes a second, which other processes are spared
        return end_of_channel

    WeightTransferEngineFactory.create_engine = created
    call_repairs.repair()
    model_repairs.repair()
    if current_platform.is_cpu():
        cpu_repairs.repair()
    _registered = True
