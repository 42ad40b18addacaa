"""Memory in use while a run goes on, as metrics."""

import torch

from rollgrad.adapters.system.memory import available_memory, total_memory


class MemoryUsage:
    """Measures memory after each step. Does not begin to use a GPU, nor reset what torch counts."""

    def __init__(self) -> None:
        self._retries = 0

    def __call__(self) -> dict[str, float]:
        """Returns the share of the machine's, or its container's, memory that is in use. For a GPU that this process
        computes on it also returns the largest share that torch has had, and how often torch had to give memory back to
        find room since the last call."""
        usage = {"memory/host_share": 1 - available_memory() / total_memory()}
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            free, total = torch.cuda.mem_get_info()
            given_back = torch.cuda.max_memory_reserved() - torch.cuda.memory_reserved()
            retries = torch.cuda.memory_stats().get("num_alloc_retries", 0)
            usage["memory/gpu_share"] = (total - free + given_back) / total
            usage["memory/gpu_retries"] = float(retries - self._retries)
            self._retries = retries
        return usage
