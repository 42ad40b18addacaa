"""Memory and processor time of an update by what is kept for its backward pass: everything (`off`), results of
attention and products (`selective`), inputs of layers (`full`), and both with the inputs in the machine's memory.

    python benchmarks/activations.py            # about a minute on two cores
    python benchmarks/activations.py --smoke    # smaller, in seconds

One optimizer step of a model of Qwen3's kind with random weights in float32, over one pack of sequences. Memory is the
peak of torch's own count of allocated bytes, above what lies there between steps; inputs that are moved get memory that
torch does not count, as a GPU's would not. Its floor are the inputs of all layers in one place and the gradients. The
floor of the time are the products of matrices that any of the ways makes, at the speed of one large product.
"""

import argparse
import sys
import tempfile
import time
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from attrs import frozen

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks import results, smoke
from benchmarks.memory_plan import CPU, FLAG, OPTIMIZER, likelihood, peak
from rollgrad.adapters.models.torch.loading.loading import load_causal_lm
from rollgrad.adapters.models.torch.models import TorchPolicy
from rollgrad.adapters.models.torch.offloading import PlainTransfers
from rollgrad.application.settings.memory_plan_passes import MIB
from rollgrad.application.settings.sections.actor import Checkpointing
from rollgrad.domain.batches.packed import PackedBatch, pack
from rollgrad.testing.agent_executor import make_trajectory

PRODUCT = 1024
"""Rows and columns of a large product."""

WAYS = {
    "off": (Checkpointing.OFF, False),
    "selective": (Checkpointing.SELECTIVE, False),
    "selective, moved": (Checkpointing.SELECTIVE, True),
    "full": (Checkpointing.FULL, False),
    "full, moved": (Checkpointing.FULL, True),
}
"""Kinds of checkpointing, and whether inputs of layers are moved."""


@frozen(kw_only=True)
class Work:
    """Sizes of the model and of the pack."""

    width: int = 128
    layers: int = 24
    vocabulary: int = 2000
    samples: int = 4
    tokens: int = 512
    repeats: int = 2

    @property
    def body(self) -> int:
        """Numbers of all matrices of the layers: queries and results, twice as wide as states; keys and values, as
        wide; and three of three times their width."""
        return self.layers * self.width**2 * (2 * 2 + 2 + 3 * 3)


def make_model(work: Work, directory: str) -> None:
    """Saves a model with random weights."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        hidden_size=work.width,
        intermediate_size=3 * work.width,
        num_hidden_layers=work.layers,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=work.width // 8,
        vocab_size=work.vocabulary,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(directory)


def batch_of(work: Work) -> PackedBatch:
    """Returns samples of one length, each of its own prompt, half of it."""
    draw = torch.Generator().manual_seed(1)
    rows = torch.randint(3, work.vocabulary, (work.samples, work.tokens), generator=draw).tolist()
    half = work.tokens // 2
    return pack([make_trajectory(row[:half], row[half:], group_id=n, sample_id=n) for n, row in enumerate(rows)])


class Elsewhere:
    """Memory that torch does not count."""

    def __init__(self) -> None:
        self.nbytes = 0

    def room(self, _: PlainTransfers, tensor: torch.Tensor) -> torch.Tensor:
        """Returns some for a tensor."""
        self.nbytes += tensor.nbytes
        return torch.from_numpy(np.empty(tensor.shape, dtype=np.float32))


def measure(name: str, directory: str, work: Work) -> dict[str, float]:
    """Returns bytes and processor seconds of one way."""
    kind, moves = WAYS[name]
    model = load_causal_lm(directory, dtype=torch.float32, device=CPU, flag=FLAG)
    policy = TorchPolicy(model, None, OPTIMIZER, gradient_checkpointing=kind, offload_activations=moves)
    update = partial(policy.update, [batch_of(work)], likelihood)
    update()
    elsewhere, room = Elsewhere(), PlainTransfers.room
    PlainTransfers.room = lambda self, tensor: elsewhere.room(self, tensor)  # type: ignore[method-assign]
    try:
        most = peak(update)
    finally:
        PlainTransfers.room = room  # type: ignore[method-assign]
    seconds = []
    for _ in range(work.repeats):
        begun = time.process_time()
        update()
        seconds.append(time.process_time() - begun)
    return {"bytes": most, "moved": elsewhere.nbytes, "seconds": min(seconds)}


def seconds_of_product() -> float:
    """Returns the processor's seconds of one large product."""
    a, b = torch.ones(PRODUCT, PRODUCT), torch.ones(PRODUCT, PRODUCT)
    seconds = []
    for _ in range(5):
        begun = time.process_time()
        torch.mm(a, b)
        seconds.append(time.process_time() - begun)
    return min(seconds)


def main() -> None:
    """Prints a table, and keeps it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--smoke", action="store_true", help=smoke.HELP)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    work = Work(width=64, layers=2, samples=2, tokens=64, repeats=1) if arguments.smoke else Work()
    found: dict[str, Any] = {}
    print(f"{'kept':18} {'peak MiB':>9} {'moved MiB':>9} {'processor s':>11} of off: bytes, time")
    with tempfile.TemporaryDirectory() as directory:
        make_model(work, directory)
        for name in WAYS:
            row = found[name] = measure(name, directory, work)
            shares = [row[part] / found["off"][part] for part in ("bytes", "seconds")]
            figures = f"{row['bytes'] / MIB:9.1f} {row['moved'] / MIB:9.1f} {row['seconds']:11.2f}"
            print(f"{name:18} {figures} {shares[0]:.2f}, {shares[1]:.2f}", flush=True)
    tokens = work.samples * work.tokens
    states = tokens * work.width * work.layers * 4
    gradients = 4 * (work.body + work.vocabulary * work.width)
    flops = tokens * (6 * work.body + 0.5 * 8 * work.vocabulary * work.width)
    floor = {"bytes": states + gradients, "seconds": flops * seconds_of_product() / (2 * PRODUCT**3)}
    print(f"floor: {floor['bytes'] / MIB:.1f} MiB, {floor['seconds']:.2f} s of the processor")
    if not arguments.smoke:
        results.keep("activations", {"ways": found, "floor": floor})


if __name__ == "__main__":
    main()
