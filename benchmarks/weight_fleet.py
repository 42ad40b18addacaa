"""How fast weights get from one trainer process, and from two that divide them, into two engines of two ranks each, and
whether all of them then score the same tokens alike. Everything in one run, on this machine's CPU.

The model has SmolLM2-135M's sizes, random weights, and eight heads, which two ranks can divide.
A push writes each weight to shared memory once; each engine copies it out once and repacks it once. The bound is three
copies of all weights at the speed of `memcpy`, measured in the same run; beside it three copies for each engine, for
each of them takes all weights. In the same way processor seconds are compared, of all processes, with those of three
copies by one thread: on a busy machine these figures alone mean something. Before each way of pushing the trainer's
weights change.

    python benchmarks/weight_fleet.py
"""

import asyncio
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
import tyro
from attrs import asdict, define, evolve
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.machine import OtherProcesses
from benchmarks.results import keep
from benchmarks.weight_sync import COPIES, difference, memcpy_bytes_per_second
from rollgrad.adapters.engines.vllm.engine import VLLMEngine
from rollgrad.adapters.models.deepspeed.module import DeepSpeedModule
from rollgrad.adapters.models.deepspeed.settings import DeepSpeedSettings
from rollgrad.adapters.models.fsdp.division import start_process_group
from rollgrad.adapters.models.fsdp.module import FSDPTrainedModule
from rollgrad.adapters.models.ray.rank_policy import RankPolicy
from rollgrad.adapters.models.ray.rank_worker import begin_workers, start_by_deepspeed
from rollgrad.adapters.models.ray.sharded import ShardedPolicy
from rollgrad.adapters.models.ray.worker_group import WorkerGroup
from rollgrad.adapters.models.torch.loading.loading import load_causal_lm, load_tokenizer
from rollgrad.adapters.models.torch.loading.lora import add_lora
from rollgrad.adapters.models.torch.models import TorchPolicy
from rollgrad.adapters.models.torch.optimizers.optimizer import MasterOptimizer, OptimizerSettings
from rollgrad.adapters.ray.placement import Placement
from rollgrad.adapters.ray.session import RaySession
from rollgrad.adapters.weights.channel import Transfer
from rollgrad.adapters.weights.disk import Disk
from rollgrad.adapters.weights.shared_memory import shared_memory
from rollgrad.adapters.weights.transfer import Backend
from rollgrad.application.settings.sections.actor import LoraConfig
from rollgrad.domain.ports.models import PolicyModel
from tests.tiny_models import make_tiny_tokenizer, saved, tiny_model

RANKS = 2
"""Ranks of each engine."""
NEW_TOKENS = 16
CHANGE = 0.01
"""Largest relative change of a weight: engines without it score tokens differently, and none becomes nonsense."""
SECONDS = 900.0

Trainer = Callable[[str, int], Any]
"""Context manager of a policy, made from a directory and a seed of its change."""


@define(kw_only=True)
class Work:
    """Settings of the measurement."""

    hidden: int = 576
    """Numbers of a hidden state."""
    layers: int = 30
    """Layers."""
    vocabulary: int = 49152
    """Tokens."""
    pushes: int = 5
    """Counted pushes, after one that is not."""
    engines: int = 2
    """Engines of two ranks each."""
    smoke: bool = False
    """Smallest work on a tiny random model, to see that the script runs; its figures mean nothing."""


@define
class Pushed:
    """One way of pushing."""

    way: str
    bytes: int
    seconds: float
    """Median of a push, without the comparison that follows."""
    processor_seconds: float
    """Median over pushes of the processor seconds of all processes of this run."""
    nats: list[float]
    """Mean difference of a sampled token's log-prob between the trainer and each engine."""


def make_model(work: Work, path: Path) -> Path:
    """Writes a Llama with random weights and a tokenizer; returns its directory."""
    tokenizer = make_tiny_tokenizer()
    model = tiny_model(
        "LlamaForCausalLM",
        tokenizer,
        vocab_size=work.vocabulary,
        hidden_size=work.hidden,
        intermediate_size=8 * work.hidden // 3,
        num_hidden_layers=work.layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        tie_word_embeddings=True,
        initializer_range=0.05,
    )
    made: Path = saved(model, tokenizer, path)
    return made


def changed(path: str, seed: int) -> torch.nn.Module:
    """Returns the model with changed weights, in float32."""
    model: torch.nn.Module = load_causal_lm(path, dtype=torch.float32, device=torch.device("cpu"), flag="--model")
    chance = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + CHANGE * (2 * torch.rand(parameter.shape, generator=chance) - 1))
    return model


def policy_of(model: torch.nn.Module, path: str, optimize: Any = MasterOptimizer) -> TorchPolicy:
    """Returns the trainer's policy of a model."""
    return TorchPolicy(model, load_tokenizer(path, flag="--model"), OptimizerSettings(lr=1e-6), optimize=optimize)


@contextmanager
def one_process(path: str, seed: int) -> Iterator[PolicyModel]:
    """Gives a policy of this process."""
    yield policy_of(changed(path, seed), path)


@contextmanager
def merged_lora(path: str, seed: int) -> Iterator[PolicyModel]:
    """Gives a policy of this process with adapters, which are merged on their way."""
    model: torch.nn.Module = load_causal_lm(path, dtype=torch.float32, device=torch.device("cpu"), flag="--model")
    add_lora(model, LoraConfig(rank=16), seed=seed)
    policy = policy_of(model, path)
    for name, tensor in policy.adapter():
        if "lora_B" in name:
            tensor.normal_(0.0, CHANGE, generator=torch.Generator().manual_seed(seed))
    yield policy


def part_of(path: str, seed: int, strategy: str) -> RankPolicy:
    """Returns one process's part of a policy."""
    torch.set_num_threads(1)
    by_zero = partial(DeepSpeedModule, division=DeepSpeedSettings(zero_stage=3))
    return RankPolicy(policy_of(changed(path, seed), path, FSDPTrainedModule if strategy == "fsdp2" else by_zero))


@contextmanager
def two_processes(path: str, seed: int, *, strategy: str) -> Iterator[PolicyModel]:
    """Gives a policy that two processes divide."""
    placement = Placement("actor", 2, gpus=0, here=2, timeout=SECONDS)
    start = start_process_group if strategy == "fsdp2" else start_by_deepspeed
    slots = [placement.slot(rank) for rank in range(2)]
    group = WorkerGroup("actor", begin_workers(slots, threads=1), timeout=SECONDS, start=start)
    try:
        group.build(part_of, path, seed, strategy)
        yield ShardedPolicy(group)
    finally:
        group.close()
        placement.remove()


def processor_seconds() -> float:
    """Returns the processor seconds of this process and of those that it has started."""
    found = 0.0
    for process in (this := psutil.Process(), *this.children(recursive=True)):
        try:
            found += sum(process.cpu_times()[:2])
        except psutil.NoSuchProcess:
            continue
    return found


async def pushed(way: str, policy: PolicyModel, engines: list[VLLMEngine], backend: Backend, pushes: int) -> Pushed:
    """Measures pushes, and compares what trainer and engines compute afterwards."""
    seconds, busy, size = list[float](), list[float](), 0
    for version in range(pushes + 1):
        transfer = Transfer(engines, [(number, 0) for number in range(len(engines))], backend)
        before = processor_seconds()
        await transfer.send(policy, version)
        busy.append(processor_seconds() - before)
        seconds.append(transfer.seconds)
        size = transfer.bytes
        await transfer.prove(await transfer.probe(policy, 1.0))
        for error in transfer.failed.values():
            raise error
    nats = [await difference(engine, policy, NEW_TOKENS) for engine in engines]
    return Pushed(way, size, statistics.median(seconds[1:]), statistics.median(busy[1:]), nats)


def copy_seconds(threads: int) -> float:
    """Returns the seconds in which so many threads copy a byte between large tensors."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return 1 / memcpy_bytes_per_second()
    finally:
        torch.set_num_threads(before)


def main(work: Work) -> None:
    """Measures and prints."""
    with ExitStack() as stack:
        if work.smoke:
            work = evolve(work, hidden=64, layers=2, vocabulary=512, pushes=1, engines=1)
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model = make_model(work, directory / "model")
        session = RaySession(None, cpus=2)
        stack.callback(session.close)
        others = OtherProcesses()
        copies = {"all": copy_seconds(torch.get_num_threads()), "one": copy_seconds(1)}
        engines = []
        for _ in range(work.engines):
            engine = VLLMEngine(
                str(model),
                eos_token_ids=(),
                dtype="float32",
                max_tokens=256,
                max_batch_size=8,
                tensor_parallel_size=RANKS,
                threads=RANKS,
            )
            stack.callback(engine.close)
            engines.append(engine)
        measured = asyncio.run(all_ways(work, str(model), engines, directory / "weights"))
        report(work, measured, copies, others.share())


async def all_ways(work: Work, model: str, engines: list[VLLMEngine], directory: Path) -> list[Pushed]:
    """Measures every way of pushing, one after the other."""
    fsdp2, zero3 = (partial(two_processes, strategy=strategy) for strategy in ("fsdp2", "zero3"))
    ways: list[tuple[str, Trainer, Backend]] = [
        ("one process, shared memory", one_process, shared_memory),
        ("two processes (FSDP2), shared memory", fsdp2, shared_memory),
        ("two processes (ZeRO-3), shared memory", zero3, shared_memory),
        ("one process, files", one_process, Disk(directory)),
        ("one process, LoRA merged, shared memory", merged_lora, shared_memory),
    ]
    found = []
    for seed, (way, trainer, backend) in enumerate(ways[:2] if work.smoke else ways):
        with trainer(model, seed) as policy:
            found.append(await pushed(way, policy, engines, backend, work.pushes))
    return found


def report(work: Work, measured: list[Pushed], copies: dict[str, float], others: float) -> None:
    """Prints the figures, and keeps them if they mean something."""
    table = Table("push by", "MB", "seconds", "times 3 copies", "of each engine's", "processor s", "times 3", "nats")
    for push in measured:
        bound, least = COPIES * push.bytes * copies["all"], COPIES * push.bytes * copies["one"]
        table.add_row(
            push.way,
            f"{push.bytes / 1e6:.0f}",
            f"{push.seconds:.3f}",
            f"{push.seconds / bound:.2f}",
            f"{push.seconds / bound / work.engines:.2f}",
            f"{push.processor_seconds:.3f}",
            f"{push.processor_seconds / least:.2f}",
            f"{max(push.nats):.1e}",
        )
    Console(width=130, highlight=False).print(table)
    speeds = ", ".join(f"{1e-9 / seconds:.1f} GB/s by {threads}" for threads, seconds in copies.items())
    print(f"memcpy: {speeds} of torch's threads; other processes took {others:.0%} of the machine")
    worst = max(max(push.nats) for push in measured)
    print(f"trainer and engines differ by {worst:.1e} nats a token at most")
    if not work.smoke:
        figures = {"pushes": [asdict(push) for push in measured], "memcpy_seconds_a_byte": copies}
        print(f"kept in {keep('weight_fleet', {**figures, 'engines': work.engines, 'ranks': RANKS, 'others': others})}")


if __name__ == "__main__":
    main(tyro.cli(Work, description=__doc__))
