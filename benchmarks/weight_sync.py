"""How fast weights get into vLLM, and how fast it then samples. The first is compared with the speed of the memory; the
second with the embedded engine, and with vLLM whose model has a process of its own, which is vLLM's way on a CPU. The
same is measured with LoRA, whose adapters go merged into the weights or alone (`actor.lora.sync`). Everything in one
run, one engine after the other.

A push writes every byte to shared memory once, copies it out once and repacks it once: the bound is three copies at
the speed of `memcpy` (which reads and writes), measured in this run. Beside it the same through files of a temporary
directory. Only the ratios carry over to other machines; how fast vLLM samples beside an adapter does not even so: on a
CPU it has no kernels for it.

    python benchmarks/weight_sync.py
"""

import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import torch
import tyro
from attrs import define, evolve

from rollgrad.adapters.engines.embedded.engine import EmbeddedEngine
from rollgrad.adapters.engines.vllm.engine import VLLMEngine
from rollgrad.adapters.models.torch.loading.loading import load_causal_lm, load_tokenizer, resolve_dtype
from rollgrad.adapters.models.torch.loading.lora import add_lora
from rollgrad.adapters.models.torch.models import TorchPolicy
from rollgrad.adapters.models.torch.optimizers.optimizer import OptimizerSettings
from rollgrad.adapters.weights.channel import EngineWeights
from rollgrad.adapters.weights.disk import Disk
from rollgrad.adapters.weights.shared_memory import shared_memory, shared_memory_adapter
from rollgrad.adapters.weights.transfer import Backend
from rollgrad.application.settings.sections.actor import LoraConfig
from rollgrad.domain.batches.packed import pack
from rollgrad.domain.episodes.generation import GenerationRequest, SamplingParams
from rollgrad.domain.episodes.trajectory import TrajectoryBuilder
from rollgrad.domain.ports.models import PolicyModel
from rollgrad.domain.ports.rollout_engine import RolloutEngine

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.machine import OtherProcesses, best_of
from benchmarks.smoke import smoke_model

COPIES = 3
SAMPLES = 8
PROMPT = tuple(range(100, 140))
COPIED_BYTES = 256 * 2**20
TRAINED_B = 1e-3
"""Size of an entry of B after some training."""


@define(kw_only=True)
class Work:
    """Settings of the measurement."""

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
    lora_rank: int = 32
    """Rank of the adapters, which all linear layers have; 0 leaves this part out."""
    smoke: bool = False
    """Smallest work on a tiny random model, without LoRA and with the one engine whose model has a process of its own,
    to see that the script runs."""


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
    """Speed of one large copy, by all of torch's threads."""
    source = torch.ones(COPIED_BYTES // 4)
    target = torch.empty_like(source)
    return COPIED_BYTES / best_of(lambda: target.copy_(source))


def table(rows: Sequence[Sequence[Any]]) -> None:
    """Prints columns, the first row as their titles."""
    widths = [max(len(str(row[column])) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        print("  ".join(str(cell).rjust(width) for cell, width in zip(row, widths, strict=True)))
    print()


def policy_of(work: Work, dtype: torch.dtype) -> TorchPolicy:
    """The trainer's model."""
    flag = "--model"
    model = load_causal_lm(str(work.model), dtype=dtype, device=torch.device("cpu"), flag=flag)
    return TorchPolicy(model, load_tokenizer(str(work.model), flag=flag), OptimizerSettings(lr=1e-6))


async def difference(engine: RolloutEngine, policy: PolicyModel, new_tokens: int) -> float:
    """Returns how much trainer and engine differ in the log-prob of a sampled token on average, nats."""
    requests = [
        GenerationRequest(prompt_token_ids=PROMPT, params=SamplingParams(max_new_tokens=new_tokens, seed=row))
        for row in range(SAMPLES)
    ]
    replies = await asyncio.gather(*(engine.generate(request) for request in requests))
    trajectories = []
    for row, reply in enumerate(replies):
        builder = TrajectoryBuilder(PROMPT, group_id=0, sample_id=row)
        builder.add_action(reply)
        trajectories.append(builder.build(stop_reason=reply.stop_reason))
    scores = policy.score(batch := pack(trajectories)).logprobs_N[batch.action_mask_N]
    sampled = torch.tensor([logprob for reply in replies for logprob in reply.logprobs])
    return float((scores - sampled).abs().mean())


@define
class Measured:
    """Result of an engine of its own."""

    start: float
    """Seconds until it is ready."""
    rates: list[float]
    """Tokens per second for each number of rows."""
    pushes: list[tuple[float, float]]
    """Seconds and bytes of a push by each backend."""
    difference: float
    """Mean difference of log-probs between trainer and engine, nats."""


def of_vllm(
    policy: TorchPolicy,
    work: Work,
    dtype: torch.dtype,
    *backends: Backend,
    lora: LoraConfig | None = None,
    apart: bool = False,
) -> Measured:
    """Measures an engine; with `lora` one that takes adapters alone, by `shared_memory_adapter`; with `apart` one whose
    model has a process of its own."""
    import vllm.v1.engine.async_llm  # noqa: F401 (no engine's start is to take longer for it)
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    started = time.perf_counter()
    own = mock.patch("vllm.v1.executor.uniproc_executor.UniProcExecutor", MultiprocExecutor)
    with own if apart else nullcontext():
        engine = VLLMEngine(
            str(work.model),
            eos_token_ids=(),
            dtype=str(dtype).removeprefix("torch."),
            max_tokens=1024,
            max_batch_size=64,
            lora=lora,
        )
    start = time.perf_counter() - started

    async def measured() -> Measured:
        pushes = [await seconds_of_a_push(EngineWeights(engine, backend=backend), policy, work) for backend in backends]
        rates = [await tokens_per_second(engine, rows, work) for rows in work.rows]
        return Measured(start, rates, pushes, await difference(engine, policy, work.new_tokens))

    try:
        return asyncio.run(measured())
    finally:
        engine.close()


def compare_lora(work: Work, dtype: torch.dtype) -> None:
    """Measures and prints what the two ways of LoRA cost."""
    policy = policy_of(work, dtype)
    lora = LoraConfig(rank=work.lora_rank)
    add_lora(policy.module, lora, seed=0)
    for name, tensor in policy.adapter():
        if "lora_B" in name:  # fresh adapters would change nothing
            tensor.normal_(0.0, TRAINED_B, generator=torch.Generator().manual_seed(0))
    merged = of_vllm(policy, work, dtype, shared_memory)
    alone = of_vllm(policy, work, dtype, shared_memory_adapter, lora=lora)
    (merged_seconds, merged_size), (alone_seconds, alone_size) = merged.pushes[0], alone.pushes[0]
    print(f"LoRA of rank {work.lora_rank}: merged, and the adapter alone\n")
    table(
        [
            ("", "merged", "adapter", "merged : adapter"),
            ("MB of a push", f"{merged_size / 1e6:.0f}", f"{alone_size / 1e6:.0f}", f"{merged_size / alone_size:.1f}"),
            (
                "seconds of a push",
                f"{merged_seconds:.3f}",
                f"{alone_seconds:.3f}",
                f"{merged_seconds / alone_seconds:.1f}",
            ),
            (
                "nats between trainer and engine",
                f"{merged.difference:.4f}",
                f"{alone.difference:.4f}",
                f"{merged.difference / alone.difference:.1f}",
            ),
            *(
                (f"tokens/s, {rows} rows", f"{one:.0f}", f"{other:.0f}", f"{one / other:.1f}")
                for rows, one, other in zip(work.rows, merged.rates, alone.rates, strict=True)
            ),
        ]
    )


def main(work: Work) -> None:
    """Measures and prints what is asked for."""
    if not work.smoke:
        return compare(work)
    with smoke_model() as model:
        return compare(evolve(work, model=model, pushes=1, rows=(2,), new_tokens=4, rounds=1, lora_rank=0))


def compare(work: Work) -> None:
    """Measures, prints."""
    dtype = resolve_dtype(work.dtype, torch.device("cpu"))
    policy = policy_of(work, dtype)
    others = OtherProcesses()
    memcpy = memcpy_bytes_per_second()
    embedded = EmbeddedEngine(policy.module, eos_token_ids=())

    async def of_embedded() -> list[float]:
        return [await tokens_per_second(embedded, rows, work) for rows in work.rows]

    here = asyncio.run(of_embedded())
    with tempfile.TemporaryDirectory() as directory:
        there = of_vllm(policy, work, dtype, shared_memory, Disk(Path(directory)), apart=work.smoke)
    apart = there if work.smoke else of_vllm(policy, work, dtype, shared_memory, apart=True)
    pushes = dict(zip(("shared_memory", "disk"), there.pushes, strict=True))

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
            ("", "vLLM", "its model apart", "ratio", "embedded", "ratio"),
            (
                "seconds to start",
                f"{there.start:.1f}",
                f"{apart.start:.1f}",
                f"{apart.start / there.start:.2f}",
                "",
                "",
            ),
            (
                "seconds of a push",
                f"{there.pushes[0][0]:.3f}",
                f"{apart.pushes[0][0]:.3f}",
                f"{apart.pushes[0][0] / there.pushes[0][0]:.2f}",
                "",
                "",
            ),
            *(
                (
                    f"tokens/s, {rows} rows",
                    f"{ours:.0f}",
                    f"{other:.0f}",
                    f"{ours / other:.2f}",
                    f"{theirs:.0f}",
                    f"{ours / theirs:.2f}",
                )
                for rows, ours, other, theirs in zip(work.rows, there.rates, apart.rates, here, strict=True)
            ),
        ]
    )
    if work.lora_rank:
        compare_lora(work, dtype)


if __name__ == "__main__":
    main(tyro.cli(Work, description=__doc__))
