"""Peak speed of this machine, measured in the same run as the figures compared with it, and the cost of a model."""

import os
import time
from collections.abc import Callable

import psutil
import torch
from attrs import frozen

MATRIX, SMOKE_MATRIX = 2048, 64
READ_BYTES, SMOKE_READ_BYTES = 512 * 2**20, 2**20
CPU = torch.device("cpu")


@frozen
class Machine:
    """`flops`: FLOP/s of a square matrix product; `bandwidth`: bytes/s read from memory."""

    flops: float
    bandwidth: float


def measure(dtype: torch.dtype, device: torch.device = CPU, *, smoke: bool = False) -> Machine:
    """Measures the matrix product in `dtype` and a sum over memory that no cache holds, on a device; with `smoke` so
    little of both that the figures mean nothing."""
    side, size = (SMOKE_MATRIX, SMOKE_READ_BYTES) if smoke else (MATRIX, READ_BYTES)
    a, b = (torch.randn(side, side).to(device=device, dtype=dtype) for _ in range(2))
    stream = torch.ones(size // 4, device=device)
    return Machine(
        flops=2 * side**3 / best_of(lambda: a @ b),
        bandwidth=size / best_of(lambda: stream.sum()),
    )


def best_of(work: Callable[[], object], repeats: int = 5) -> float:
    """Shortest time of `work()`, in seconds."""
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        if torch.cuda.is_available():  # whose kernels have only been asked for
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return min(times)


class OtherProcesses:
    """Load of other processes on the machine: figures are valid only if it is small, for threads that wait
    for each other lose a whole time slice whenever one of them has to share its core."""

    def __init__(self) -> None:
        self._before = self._seconds()

    def share(self) -> float:
        """Share of the machine that others took since this object was made."""
        elapsed, busy = (now - before for now, before in zip(self._seconds(), self._before, strict=True))
        return max(0.0, busy / (elapsed * (os.cpu_count() or 1)))

    @staticmethod
    def _seconds() -> tuple[float, float]:
        """The clock, and processor seconds that others have used."""
        machine = psutil.cpu_times()
        busy = sum(machine) - machine.idle - getattr(machine, "iowait", 0.0)
        this = psutil.Process()
        # user, system, and both of children that have ended
        own = sum(sum(p.cpu_times()[:4]) for p in (this, *this.children(recursive=True)))
        return time.perf_counter(), busy - own


@frozen
class ModelCost:
    """Weights of a decoder: `body` without the input embedding, which is looked up, and `head`, V x H, apart, because
    it is evaluated at few positions. A token's forward pass takes 2 FLOPs a weight, its backward pass 4. Attention
    scores are left out: at the lengths measured here they are under 2% of the rest."""

    body: int
    head: int
    bytes_per_weight: int

    @classmethod
    def of(cls, model: torch.nn.Module) -> "ModelCost":
        """Counts a transformers causal language model."""
        embedding = model.get_input_embeddings().weight  # type: ignore[operator]
        head = model.get_output_embeddings().weight  # type: ignore[operator]
        body = sum(p.numel() for p in model.base_model.parameters()) - embedding.numel()  # type: ignore[union-attr]
        return cls(body, head.numel(), head.element_size())

    def update(self, tokens: int, action_tokens: int, *, head_flops: int = 6) -> int:
        """FLOPs of forward and backward; `head_flops` a weight is 8 where the backward pass recomputes logits."""
        return 6 * self.body * tokens + head_flops * self.head * action_tokens

    def decoding_step(self, machine: Machine, rows: int) -> float:
        """Least seconds of one token for each row: all weights read once, or all products done."""
        weights = self.body + self.head
        return max(weights * self.bytes_per_weight / machine.bandwidth, 2 * weights * rows / machine.flops)

    def generation(self, machine: Machine, *, prompts: int, prompt_tokens: int, rows: int, new_tokens: int) -> float:
        """Least seconds of `new_tokens` for each of `rows` sequences: `prompts` distinct prompts, `prompt_tokens` in
        all, go through the model once and give the first token; the rest are decoding steps."""
        prefill = 2 * (self.body * prompt_tokens + self.head * prompts) / machine.flops
        return prefill + (new_tokens - 1) * self.decoding_step(machine, rows)
