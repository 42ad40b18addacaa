"""Time of an attention layer, forward and backward, and bytes that a process receives for it, where two processes share
one sequence: divided by heads, by copies of too few heads, and by queries.

Times are seconds of the processor, of the slower process. Beside them stands the least that the layer's products can
take: those of the scores that a causal sequence has, at the speed of one large product of matrices. Processes are on
this machine's CPU, one thread each, where sending is copying.

    python benchmarks/sequence_parallel.py
"""

import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import tyro
from attrs import define, frozen
from rich.console import Console
from rich.table import Table
from torch import distributed

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.meeting import found_together, received
from benchmarks.results import keep

PROCESSES = 2
FORWARD_BACKWARD = 3.5
"""Products of matrices of both passes, as a multiple of those of the forward pass, with scores computed again (Dao
2023, "FlashAttention-2", section 4.1)."""


@define(kw_only=True)
class Work:
    """Settings of the measurement."""

    tokens: int = 8192
    """Tokens of the sequence."""
    query_heads: int = 8
    """Query heads."""
    width: int = 64
    """Numbers of a head."""
    rounds: int = 7
    """Passes, of which the fastest counts."""
    smoke: bool = False
    """Smallest work, to see that the script runs; its figures mean nothing."""


SMALL = Work(tokens=64, query_heads=4, width=8, rounds=1, smoke=True)
"""Sizes of the smallest work."""


@frozen
class Way:
    """How two processes share a layer with `key_heads`: teams of `heads` processes divide heads, each of which is
    there `copies` times."""

    name: str
    key_heads: int
    heads: int
    copies: int = 1


WAYS = (
    Way("2 key heads, divided by heads", 2, heads=2),
    Way("2 key heads, divided by queries", 2, heads=1),
    Way("1 key head, divided by copies of it", 1, heads=2, copies=2),
    Way("1 key head, divided by queries", 1, heads=1),
)


@frozen
class Found:
    """Processor's seconds of a layer, bytes that a process received for it, and floating-point operations a second of
    one large product."""

    seconds: float
    received: int
    speed: float


def main(work: Work) -> None:
    """Measures each way."""
    if work.smoke:
        work = SMALL
    results = measured(work)
    flops = FORWARD_BACKWARD * 4 * work.query_heads * work.width * work.tokens**2 / 2 / PROCESSES
    bound = flops / max(each.speed for each in results)
    table = Table("a layer with", "forward and backward", "least", "bytes received a token of the process")
    for way, each in zip(WAYS, results, strict=True):
        own = each.received / (work.tokens / PROCESSES)
        table.add_row(way.name, f"{1e3 * each.seconds:,.0f} ms", f"{1e3 * bound:,.0f} ms", f"{own:,.0f}")
    Console(width=120).print(table)
    *_, copies, alone = results
    print(f"copies over queries: {copies.received / alone.received:.1f} times the bytes")
    if not work.smoke:
        figures = {name: getattr(work, name) for name in ("tokens", "query_heads", "width")} | {"bound_seconds": bound}
        for way, each in zip(WAYS, results, strict=True):
            figures |= {f"{way.name}: seconds": each.seconds, f"{way.name}: received": each.received}
        print(f"kept in {keep('sequence_parallel', figures)}")


def measured(work: Work) -> list[Found]:
    """Returns what new processes find, of each way the slowest's."""
    found = found_together(partial(share, work), PROCESSES)
    return [max(of_way, key=lambda each: each.seconds) for of_way in zip(*found, strict=True)]


def share(work: Work, rank: int) -> list[Found]:
    """Makes the passes as the process `rank`; returns the fastest of each way."""
    layers = [layer(work, way, rank) for way in WAYS]
    found: list[list[Found]] = [[] for _ in WAYS]
    for _ in range(work.rounds + 1):  # the first makes what is kept between layers
        speed = product_speed()
        for of_way, passed in zip(found, layers, strict=True):
            distributed.barrier()
            of_way.append(Found(*passed(), speed))
    return [min(of_way[1:], key=lambda each: each.seconds) for of_way in found]


def product_speed() -> float:
    """Returns the floating-point operations in a second of the processor, of a product of two large matrices."""
    a = b = torch.ones(1024, 1024)
    began = time.process_time()
    a @ b
    return 2 * 1024**3 / (time.process_time() - began)


def layer(work: Work, way: Way, rank: int) -> Callable[[], tuple[float, int]]:
    """Returns a function that makes a layer's passes, and returns their seconds of the processor and the bytes that
    this process received for them."""
    from rollgrad.adapters.models.torch.kernels.score_form import ScoreForm
    from rollgrad.adapters.models.torch.layers.layout import build_layout
    from rollgrad.adapters.models.torch.layers.sequence_parallel import SequenceGroup
    from rollgrad.domain.batches.packed import pack
    from rollgrad.testing.agent_executor import make_trajectory

    group = SequenceGroup(rank=rank, size=PROCESSES, heads=way.heads, group=distributed.group.WORLD)
    tokens = [3] * (work.tokens // 2)
    mine = group.share(build_layout(pack([make_trajectory(tokens, tokens)])))
    plan = mine.plan(torch.nn.Linear(1, 1))
    count = len(mine.of(mine.layout.tokens_M))
    shapes = [(1, heads, count, work.width) for heads in (work.query_heads, way.key_heads, way.key_heads)]
    query, key, value = (torch.randn(shape).requires_grad_() for shape in shapes)

    def passed() -> tuple[float, int]:
        with received() as total:
            began = time.process_time()
            k, v = (x.repeat_interleave(way.copies, dim=1) for x in (key, value))
            plan.attend(0, query, k, v, ScoreForm(work.width**-0.5)).sum().backward()
            return time.process_time() - began, round(sum(total))

    return passed


if __name__ == "__main__":
    main(tyro.cli(Work, description=__doc__))
