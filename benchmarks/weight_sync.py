"""How fast weights get into vLLM, against what the memory allows, and how fast it then samples, against the embedded
engine; everything in one run, one engine after the other.

A push writes every byte to shared memory once, copies it out once and repacks it once: the bound is three copies at
the speed of `memcpy` (which reads and writes), measured in this run. Beside it the same through files of a temporary
directory. Only the ratios carry over to other machines.

    python benchmarks/weight_sync.py
"""

import asyncio
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
import tyro
from attrs import define

from benchmarks.machine import OtherProcesses, best_of
from rollgrad.adapters.torch.loading import load_causal_lm, load_tokenizer, resolve_dtype
from rollgrad.adapters.torch.models import TorchPolicy
from rollgrad.adapters.torch.optimizer import OptimizerSettings
from rollgrad.adapters.transformers.engine import EmbeddedEngine
from rollgrad.adapters.vllm.disk import Disk
from rollgrad.adapters.vllm.engine import VLLMEngine
from rollgrad.adapters.vllm.shared_memory import shared_memory
from rollgrad.adapters.vllm.transport import Backend
from rollgrad.adapters.vllm.weights import EngineWeights
from rollgrad.domain.ports.rollout_engine import RolloutEngine
from rollgrad.domain.sampling import GenerationRequest, SamplingParams

COPIES = 3
SAMPLES = 8
PROMPT = tuple(range(100, 140))
COPIED_BYTES = 256 * 2**20


@define(kw_only=True)
class Work:
    """What is measured."""

    model: Path = Path(".models/SmolLM2-135M-Instruct")
    """Model directory; `make demo` unpacks this one."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Compute format; auto is what the processor multiplies natively."""
    pushes: int = 5
    """Counted pushes, after one that is not."""
    rows: tuple[int, ...] = (1, 16, 64)
    """Sequences at once."""
    new_tokens: int = 32
    """Sampled tokens of each."""
    rounds: int = 3
    """Counted rounds of generation, after one that is not."""


async def tokens_per_second(engine: RolloutEngine, rows: int, work: Work) -> float:
    """Median over the rounds; rows share prompts by eights, as GRPO's samples do."""
    rates = []
    for turn in range(work.rounds + 1):
        requests = [
            GenerationRequest(
                prompt_token_ids=(*PROMPT, 200 + row // SAMPLES, 300 + turn),
                params=SamplingParams(max_new_tokens=work.new_tokens, seed=row),
            )
            for row in range(rows)
        ]
        started = time.perf_counter()
        await asyncio.gather(*(engine.generate(request) for request in requests))
        rates.append(rows * work.new_tokens / (time.perf_counter() - started))
    return statistics.median(rates[1:])


async def seconds_of_a_push(channel: EngineWeights, policy: TorchPolicy, work: Work) -> tuple[float, float]:
    """(median seconds, bytes); each push is followed by the comparison of log-probs, which is not counted."""
    moved = [await channel.push(policy, version) for version in range(work.pushes + 1)]
    return statistics.median(push["seconds"] for push in moved[1:]), moved[0]["bytes"]


def memcpy_bytes_per_second() -> float:
    """Of one large copy, by all threads that torch has here."""
    source = torch.ones(COPIED_BYTES // 4)
    target = torch.empty_like(source)
    return COPIED_BYTES / best_of(lambda: target.copy_(source))


def table(rows: Sequence[Sequence[Any]]) -> None:
    """Prints columns, the first row as their titles."""
    widths = [max(len(str(row[column])) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        print("  ".join(str(cell).rjust(width) for cell, width in zip(row, widths, strict=True)))
    print()


def main(work: Work) -> None:
    """Measures, prints."""
    flag = "--model"
    dtype = resolve_dtype(work.dtype, torch.device("cpu"))
    model = load_causal_lm(str(work.model), dtype=dtype, device=torch.device("cpu"), flag=flag)
    policy = TorchPolicy(model, load_tokenizer(str(work.model), flag=flag), OptimizerSettings(lr=1e-6))
    others = OtherProcesses()
    memcpy = memcpy_bytes_per_second()
    embedded = EmbeddedEngine(model, eos_token_ids=())

    async def of_embedded() -> list[float]:
        return [await tokens_per_second(embedded, rows, work) for rows in work.rows]

    here = asyncio.run(of_embedded())
    engine = VLLMEngine(
        str(work.model), eos_token_ids=(), dtype=str(dtype).removeprefix("torch."), max_tokens=1024, max_batch_size=64
    )

    async def of_vllm(directory: Path) -> tuple[list[float], dict[str, tuple[float, float]]]:
        rates = [await tokens_per_second(engine, rows, work) for rows in work.rows]
        backends: dict[str, Backend] = {"shared_memory": shared_memory, "disk": Disk(directory)}
        channels = {name: EngineWeights(engine, backend=backend) for name, backend in backends.items()}
        return rates, {name: await seconds_of_a_push(channel, policy, work) for name, channel in channels.items()}

    with tempfile.TemporaryDirectory() as directory:
        there, pushes = asyncio.run(of_vllm(Path(directory)))
    engine.close()

    bound = COPIES * pushes["shared_memory"][1] / memcpy
    print(f"\n{work.model.name}, {dtype}; other processes took {others.share():.0%} of the machine\n")
    table(
        [
            ("push by", "MB", "seconds", "GB/s", "memcpy GB/s", f"bound, {COPIES} copies", "times the bound"),
            *(
                (
                    name,
                    f"{size / 1e6:.0f}",
                    f"{seconds:.3f}",
                    f"{size / seconds / 1e9:.2f}",
                    f"{memcpy / 1e9:.1f}",
                    f"{bound:.3f} s",
                    f"{seconds / bound:.1f}",
                )
                for name, (seconds, size) in pushes.items()
            ),
        ]
    )
    table(
        [
            ("rows", "vLLM tokens/s", "embedded tokens/s", "ratio"),
            *(
                (rows, f"{ours:.0f}", f"{theirs:.0f}", f"{ours / theirs:.2f}")
                for rows, ours, theirs in zip(work.rows, there, here, strict=True)
            ),
        ]
    )


if __name__ == "__main__":
    main(tyro.cli(Work, description=__doc__))
