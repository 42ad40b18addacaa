"""Contenders that take their steps in turns, each in a process of its own."""

import multiprocessing
import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from attrs import AttrsInstance, asdict

from benchmarks.machine import OtherProcesses
from benchmarks.results import keep

PRELOADED = (
    "rollgrad.entrypoints.composition.offline.dpo",
    "rollgrad.entrypoints.composition.rl.container",
    "rollgrad.entrypoints.composition.offline.sft",
    "trl.trainer.dpo_trainer",
    "trl.trainer.grpo_trainer",
    "trl.trainer.sft_trainer",
    "transformers.models.llama.modeling_llama",
)


class Turns:
    """A contender's side of the alternation."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def wait(self, done: str) -> None:
        """Hands in what the finished step did, and returns when the next may start."""
        self._pipe.send(done)
        self._pipe.recv()


class Contender:
    """A process that takes a step when it is told to."""

    def __init__(self, name: str, target: Callable[[Any, Connection], None], work: Any) -> None:
        # Imports take longer than the smallest work: one process makes them all, has no threads, and is forked.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(list(PRELOADED))
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=target, args=(work, theirs), daemon=True)
        self._process.start()
        theirs.close()
        self.name = name
        self.ready: str = self._pipe.recv()
        """The first word of the contender, before any step."""
        self.seconds: list[float] = []
        self.done: list[str] = []

    def step(self) -> None:
        """Takes one step and times it."""
        started = time.perf_counter()
        self._pipe.send(None)
        self.done.append(self._pipe.recv())
        self.seconds.append(time.perf_counter() - started)

    def stop(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.join()

    @property
    def median(self) -> float:
        """Median seconds of the counted steps."""
        return statistics.median(self.seconds[1:])

    def report(self) -> str:
        """Returns what was done, and how long each step took."""
        steps = " ".join(f"{seconds:.1f}" for seconds in self.seconds[1:])
        return (
            f"{self.name:9} {' or '.join(dict.fromkeys(self.done))} a step; seconds a step: {steps} "
            f"(first, not counted: {self.seconds[0]:.1f})"
        )


Target = Callable[[Any, Connection], None]


def alternate(ours: Target, theirs: Target, work: Any, steps: int) -> tuple[Contender, Contender]:
    """Returns both contenders after one step that is not counted and `steps` that are, taken in turns, and prints their
    reports; both processes have ended."""
    contenders = Contender("rollgrad", ours, work), Contender("TRL", theirs, work)
    others = OtherProcesses()
    for _ in range(steps + 1):
        for contender in contenders:
            contender.step()
    print(f"other processes took {others.share():.0%} of the machine meanwhile")
    for contender in contenders:
        contender.stop()
        print(contender.report())
    return contenders


def keep_turns(name: str, work: AttrsInstance, ours: Contender, theirs: Contender, floor: float) -> None:
    """Keeps the figures of `alternate` beside the work and the seconds of its floor, and prints the file's name."""
    figures = {
        "ratio": theirs.median / ours.median,
        "floor_s": floor,
        "seconds_a_step": {contender.name: contender.seconds[1:] for contender in (ours, theirs)},
        "work": asdict(work),
    }
    print(keep(name, figures))
