"""What this machine can do at most: measured in the same run as whatever is held against it."""

import time

import torch
from attrs import frozen

MATRIX = 2048
READ_BYTES = 512 * 2**20


@frozen
class Machine:
    """`flops`: FLOP/s of a square matrix product; `bandwidth`: bytes/s read from memory."""

    flops: float
    bandwidth: float


def best_of(work: object, repeats: int = 5) -> float:
    """Shortest time of `work()`, in seconds."""
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        work()  # type: ignore[operator]
        times.append(time.perf_counter() - started)
    return min(times)


def measure(dtype: torch.dtype) -> Machine:
    """Measures the matrix product in `dtype` and a sum over memory that no cache holds."""
    a, b = (torch.randn(MATRIX, MATRIX).to(dtype) for _ in range(2))
    stream = torch.ones(READ_BYTES // 4)
    return Machine(
        flops=2 * MATRIX**3 / best_of(lambda: a @ b),
        bandwidth=READ_BYTES / best_of(lambda: stream.sum()),
    )


@frozen
class ModelCost:
    """FLOPs of a decoder: 2 x weights per token forward (6 with backward), and the vocabulary apart, because it is
    evaluated at few positions: 2 x V x H per position forward, 8 with backward when logits are recomputed."""

    body: int
    head: int
    weight_bytes: int

    @classmethod
    def of(cls, model: torch.nn.Module) -> "ModelCost":
        """Counts a transformers causal language model; attention scores are left out (small at these lengths)."""
        embedding = model.get_input_embeddings().weight  # type: ignore[operator]
        head = model.get_output_embeddings().weight  # type: ignore[operator]
        body = sum(p.numel() for p in model.base_model.parameters()) - embedding.numel()  # type: ignore[union-attr]
        return cls(body, head.numel(), sum(p.numel() * p.element_size() for p in model.parameters()))

    def update(self, distinct_tokens: int, action_tokens: int) -> int:
        """FLOPs of forward and backward."""
        return 6 * self.body * distinct_tokens + 8 * self.head * action_tokens

    def decode_floor(self, machine: Machine, rows: int) -> float:
        """Least seconds of one decoding step: all weights read once, or all products done."""
        return max(self.weight_bytes / machine.bandwidth, 2 * (self.body + self.head) * rows / machine.flops)
