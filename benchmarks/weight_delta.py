"""How many weights an optimizer step changes in bfloat16, and what it costs to send these alone (`vllm.sync_delta`).

First the demo learns for a few steps at each learning rate; after each, the elements whose bits differ from those of
the step before are counted, and the bytes that go. Then a vLLM takes the weights whole and changed in that share, by
turns, through shared memory and through files. Bytes, and processor seconds of the trainer and of vLLM, are compared:
they mean something on a busy machine too. On a CPU vLLM repacks all layers either way.

    python benchmarks/weight_delta.py
"""

import asyncio
import statistics
import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

import psutil
import torch
import tyro
from attrs import asdict, define, evolve
from rich.console import Console
from rich.table import Table
from torch import Tensor

import rollgrad

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.machine import OtherProcesses
from benchmarks.results import keep
from benchmarks.smoke import shrink, smoke_model
from benchmarks.weight_sync import policy_of
from rollgrad.adapters.engines.embedded.weights import SharedWeights
from rollgrad.adapters.engines.vllm.engine import VLLMEngine
from rollgrad.adapters.models.torch.models import TorchPolicy
from rollgrad.adapters.weights.channel import Transfer
from rollgrad.adapters.weights.delta import Changes, changes
from rollgrad.adapters.weights.disk import Disk
from rollgrad.adapters.weights.shared_memory import shared_memory
from rollgrad.adapters.weights.transfer import Backend
from rollgrad.domain.ports.models import PolicyModel

WHOLE, CHANGED = "whole", "changed"


@define(kw_only=True)
class Work:
    """Settings of the measurement."""

    model: Path = Path(".models/SmolLM2-135M-Instruct")
    """Model directory; `make demo` unpacks this one."""
    rates: tuple[float, ...] = (2e-5, 1e-6)
    """Learning rates."""
    steps: int = 4
    """Steps of the demo at each of them."""
    shares: tuple[float, ...] = (0.01, 0.1)
    """Shares of all weights that change before a push to vLLM."""
    pushes: int = 4
    """Counted pushes of each kind, after one that is not."""
    smoke: bool = False
    """Smallest work on a tiny random model, to see that the script runs; its figures mean nothing."""


@define
class Learned:
    """Steps of the demo at one learning rate."""

    rate: float
    shares: list[float]
    """Share of the weights that each step changed."""
    bytes: list[float]
    """Bytes that go after each, as a share of all."""
    seconds: list[float]
    """Processor seconds to find it and copy it."""


@define
class Pushed:
    """Pushes of one kind; medians."""

    way: str
    share: float
    kind: str
    bytes: float
    trainer: float
    """Processor seconds of the trainer."""
    engine: float
    """Processor seconds of vLLM."""


def learn(work: Work, rate: float) -> Learned:
    """Runs the demo in bfloat16."""
    config = rollgrad.load_config("examples/sums.yaml")
    config.actor.model_name_or_path, config.actor.dtype, config.actor.adam.lr = str(work.model), "bfloat16", rate
    config.train.max_steps, config.eval.dataset, config.eval.steps = work.steps, None, -1
    if work.smoke:
        shrink(config, work.model)
    last: dict[str, Tensor] = {}
    found = Learned(rate, [], [], [])
    push = SharedWeights.push

    async def counted(channel: SharedWeights, policy: PolicyModel, version: int) -> dict[str, float]:
        now = {name: tensor.detach() for name, tensor in policy.weights()}
        total = sum(tensor.numel() for tensor in now.values())
        if last:
            differ = sum(int((tensor.view(torch.int16) != last[name]).sum()) for name, tensor in now.items())
            found.shares.append(differ / total)
        before = time.process_time()
        sent = changes(iter(now.items()), f"demo.{len(found.shares) - 1}", f"demo.{len(found.shares)}")
        size = sum(tensor.nbytes for _, tensor in sent)
        if last:
            found.seconds.append(time.process_time() - before)
            found.bytes.append(size / sum(tensor.nbytes for tensor in now.values()))
        last.update({name: tensor.view(torch.int16).clone() for name, tensor in now.items()})
        return await push(channel, policy, version)

    with tempfile.TemporaryDirectory() as directory, mock.patch.object(SharedWeights, "push", counted):
        config.ckpt.output_dir = directory
        config.ckpt.overwrite = True
        rollgrad.train(config)
    return found


def change(policy: TorchPolicy, share: float, seed: int) -> None:
    """Changes so many weights by their last bit."""
    chance = torch.Generator().manual_seed(seed)
    for _, tensor in policy.weights():
        bits = tensor.detach().view(torch.int16)
        bits ^= (torch.rand(bits.shape, generator=chance) < share).to(torch.int16)


def seconds_of_vllm() -> float:
    """Returns the processor seconds of the processes that this one has started."""
    return sum(sum(process.cpu_times()[:2]) for process in psutil.Process().children(recursive=True))


async def send(engine: VLLMEngine, policy: TorchPolicy, backend: Backend) -> tuple[float, float, float]:
    """Returns bytes, and processor seconds of the trainer and of vLLM, of one push."""
    transfer = Transfer([engine], [(0, 0)], backend)
    here, there = time.process_time(), seconds_of_vllm()
    await transfer.send(policy, 0)
    taken = transfer.bytes, time.process_time() - here, seconds_of_vllm() - there
    await transfer.prove(await transfer.probe(policy, 1.0))
    for error in transfer.failed.values():
        raise error
    return taken


async def pushed(engine: VLLMEngine, policy: TorchPolicy, work: Work, directory: Path) -> list[Pushed]:
    """Measures pushes."""
    found = []
    for way, backend in (("shared memory", shared_memory), ("files", Disk(directory))):
        for share in work.shares:
            rows: dict[str, list[tuple[float, float, float]]] = {WHOLE: [], CHANGED: []}
            for turn in range(work.pushes + 1):
                of_changes = Changes(backend)
                await send(engine, policy, of_changes)  # what changes build on; the whole push below is not
                change(policy, share, turn)
                rows[CHANGED].append(await send(engine, policy, of_changes))
                rows[WHOLE].append(await send(engine, policy, backend))
            for kind, figures in rows.items():
                medians = (statistics.median(column) for column in zip(*figures[1:], strict=True))
                found.append(Pushed(way, share, kind, *medians))
    return found


def measure_pushes(work: Work) -> list[Pushed]:
    """Starts vLLM and measures."""
    policy = policy_of(work, torch.bfloat16)  # type: ignore[arg-type]
    engine = VLLMEngine(str(work.model), eos_token_ids=(), dtype="bfloat16", max_tokens=256, max_batch_size=8)
    try:
        with tempfile.TemporaryDirectory() as directory:
            return asyncio.run(pushed(engine, policy, work, Path(directory)))
    finally:
        engine.close()


def main(work: Work) -> None:
    """Measures and prints."""
    if work.smoke:
        with smoke_model() as model:
            measure(evolve(work, model=model, steps=2, pushes=1, shares=(0.05,)))
    else:
        measure(work)


def measure(work: Work) -> None:
    """Measures, prints, and keeps the figures if they mean something."""
    others = OtherProcesses()
    learned = [learn(work, rate) for rate in work.rates]
    pushes = measure_pushes(work)
    console = Console(width=120, highlight=False)
    table = Table("learning rate", "weights changed", "bytes of all", "processor s to find them")
    for one in learned:
        table.add_row(
            f"{one.rate:g}",
            " ".join(f"{share:.2%}" for share in one.shares),
            " ".join(f"{share:.1%}" for share in one.bytes),
            f"{statistics.median(one.seconds):.2f}",
        )
    console.print(table)
    table = Table("push by", "changed", "what", "MB", "trainer, processor s", "vLLM, processor s")
    for push in pushes:
        row = (f"{push.bytes / 1e6:.1f}", f"{push.trainer:.2f}", f"{push.engine:.2f}")
        table.add_row(push.way, f"{push.share:.0%}", push.kind, *row)
    console.print(table)
    whole = next(push for push in pushes if push.kind == WHOLE)
    least = next(push for push in pushes if push.kind == CHANGED)
    print(f"{whole.bytes / least.bytes:.1f} times fewer bytes at {least.share:.0%}")
    if not work.smoke:
        figures = {"learned": [asdict(one) for one in learned], "pushes": [asdict(push) for push in pushes]}
        print(f"kept in {keep('weight_delta', {**figures, 'others': others.share()})}")


if __name__ == "__main__":
    main(tyro.cli(Work, description=__doc__))
