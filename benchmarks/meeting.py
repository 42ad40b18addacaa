"""Processes of this machine that compute together over gloo for a benchmark, and the bytes that they exchange."""

import inspect
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing.process import BaseProcess
from multiprocessing.queues import Queue
from queue import Empty
from typing import Any, TypeVar

import torch
from torch import distributed

SECONDS = 1200.0
"""Longest that a process may take."""

Found = TypeVar("Found")


def found_together(share: Callable[[int], Found], processes: int) -> list[Found]:
    """Returns what `share` of its rank finds in each of so many new processes, which are one group of torch's. It is
    pickled; results are in the order in which processes end."""
    context = multiprocessing.get_context("spawn")
    found: Queue[Found] = context.Queue()
    store = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    start = partial(_find, share, processes, store.port, found)
    started = [context.Process(target=start, args=(rank,)) for rank in range(processes)]
    for process in started:
        process.start()
    try:
        results = [_next(found, started) for _ in started]
        for process in started:
            process.join(SECONDS)
    finally:
        for process in started:
            process.kill()
            process.join()
    return results


def _next(found: "Queue[Found]", processes: Sequence[BaseProcess]) -> Found:
    """Returns what the next process finds; one that ends without a result ends the benchmark."""
    for _ in range(round(SECONDS)):
        try:
            return found.get(timeout=1.0)
        except Empty:
            if any(process.exitcode for process in processes):
                break
    raise RuntimeError("a process ended, or took too long; what it said is above")


def _find(share: Callable[[int], Found], processes: int, port: int, found: "Queue[Found]", rank: int) -> None:
    from rollgrad.adapters.models.fsdp.division import start_process_group

    torch.set_num_threads(1)
    start_process_group(rank=rank, size=processes, host="127.0.0.1", port=port, local_rank=rank, timeout=SECONDS)
    found.put(share(rank))
    distributed.barrier()  # nobody leaves while another still computes


@contextmanager
def received() -> Iterator[list[float]]:
    """Yields a list to which each exchange inside the block adds the bytes that this process gets from others."""
    total: list[float] = []

    def counting(exchange: Callable[..., Any], whole: str) -> Callable[..., Any]:
        names = list(inspect.signature(exchange).parameters)

        def counted(*positional: Any, **named: Any) -> Any:
            given = dict(zip(names, positional, strict=False)) | named
            group, splits = given["group"], given.get("output_split_sizes")
            own = 1 / distributed.get_world_size(group)
            if splits:
                own = splits[distributed.get_rank(group)] / max(1, sum(splits))
            total.append(given[whole].nbytes * (1 - own))
            return exchange(*positional, **named)

        return counted

    wholes = {
        "all_gather_single": "output_tensor",
        "reduce_scatter_single": "input",
        "all_to_all_single": "output",
    }
    before = {name: getattr(distributed, name) for name in wholes}
    for name, whole in wholes.items():
        setattr(distributed, name, counting(before[name], whole))
    try:
        yield total
    finally:
        for name, exchange in before.items():
            setattr(distributed, name, exchange)
