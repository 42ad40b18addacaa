"""The server of `rollgrad ui` on a run of 10,000 trajectories of 1,000 tokens. Measures its memory, and how long it
takes to start, to list and filter them, and to open one of 32,000 tokens, on the clock and in seconds of its CPU.

The run is written by the writer that training uses, into `--directory`, which is kept for another time.

    python benchmarks/run_page.py --directory runs/many

With `--pairs` it also trains the demo so many times with and so many times without trajectories, in turns, and says
whether they slow its steps by less than a hundredth. Each step with them is compared with the step of the same number
without, which has the same replies: on the clock, which other work on the machine disturbs, and in seconds of CPU of
the whole process, which it disturbs less. It also adds up their direct cost: the seconds for which training waited for
the writer, and those for which the writer's thread computed. Steps cannot lose more than this as long as nothing waits
for a core that the writer has.

    python benchmarks/run_page.py --directory runs/many --pairs 10

The figures are kept in `results/run_page.json` and `results/run_page_slowdown.json`. `--smoke` has 50 trajectories of
20 tokens, in a directory that is removed, a tiny model in the demo, and keeps nothing.
"""

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import comb
from pathlib import Path
from typing import Any

import torch
import tyro
import yaml
from attrs import evolve, frozen

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from smollm2 import unpack_smollm2

import rollgrad
from benchmarks.machine import OtherProcesses
from benchmarks.results import keep
from benchmarks.smoke import shrink, smoke_model
from rollgrad.adapters.tracking.trajectories import ParquetTrajectories
from rollgrad.application.rollouts.groups import RolloutGroup
from rollgrad.domain.batches.packed import RolloutBatch, pack
from rollgrad.domain.episodes.generation import Generation, StopReason
from rollgrad.domain.episodes.prompts import Prompt
from rollgrad.domain.episodes.trajectory import Trajectory, TrajectoryBuilder
from rollgrad.entrypoints.config_io import structure_config

ROOT = Path(__file__).resolve().parents[1]
WORDS = 30_000
"""Tokens of the vocabulary."""
GROUP = 8
PROMPT_TOKENS = 40
DEMO_STEPS = 6
"""Steps of a demo; the first, which also begins much that lasts, is not measured."""
BOUND = 0.01
"""Share of a step by which trajectories may slow it."""
UNSURE = 0.05
"""Chance at which the median lies outside its interval."""
TAKEN = "share of the machine that others took"
FEWEST = 6
"""Values with which there is such an interval."""
ASKED = 5
"""Times that each request is made."""
STARTS = 3
"""Times that the server is started."""


class Words:
    """A codec whose tokens are words of four to six letters."""

    def decode(self, token_ids: Sequence[int], *, special_tokens: bool = False) -> str:
        return "".join(f" w{token:04x}" for token in token_ids)


def trajectory(rng: random.Random, group: int, sample: int, prompt: Sequence[int], tokens: int) -> Trajectory:
    builder = TrajectoryBuilder(prompt, group_id=group, sample_id=sample)
    count = rng.randint(tokens // 2, tokens * 3 // 2)
    builder.add_action(
        Generation(
            token_ids=[rng.randrange(WORDS) for _ in range(count)],
            logprobs=[-rng.expovariate(1.5) for _ in range(count)],
            versions=[0] * count,
            stop_reason=StopReason.STOP,
        )
    )
    reward = float(rng.random() < 0.4)
    builder.set_reward(reward)
    stop = StopReason.LENGTH if rng.random() < 0.1 else StopReason.STOP
    return builder.build(stop_reason=stop, reward_parts={"correct": reward})


def rollouts_of(rng: random.Random, first: int, sizes: Sequence[tuple[int, int]]) -> list[RolloutGroup]:
    """Returns groups, numbered from `first`, of so many tokens and so many samples each."""
    groups = []
    for group, (tokens, count) in enumerate(sizes, first):
        prompt = [rng.randrange(WORDS) for _ in range(PROMPT_TOKENS)]
        samples = [trajectory(rng, group, group * GROUP + index, prompt, tokens) for index in range(count)]
        text = Words().decode(prompt)
        its = Prompt(token_ids=tuple(prompt), text=text, label=str(group))
        groups.append(RolloutGroup(group_id=group, prompt=its, trajectories=tuple(samples)))
    return groups


def learned(groups: Sequence[RolloutGroup]) -> RolloutBatch:
    """Returns the batch of an update."""
    batch = pack([sample for group in groups for sample in group.trajectories])
    mask = batch.action_mask_N
    advantages = torch.where(mask, batch.rewards_N.sum() / len(batch) - 0.4, 0.0)
    return evolve(batch, advantages_N=advantages, loss_weights_N=mask / mask.sum())


def write_run(directory: Path, *, steps: int, rollouts: int, tokens: int, longest: int) -> None:
    """Writes a run whose last step has one more group of two trajectories of `longest` tokens."""
    directory.mkdir(parents=True)
    rng = random.Random(0)
    store = ParquetTrajectories(directory / "trajectories", Words(), max_gib=8.0)  # type: ignore[arg-type]
    for step in range(1, steps + 1):
        sizes = [(tokens, GROUP)] * (rollouts // GROUP) + ([(longest, 2)] if step == steps else [])
        groups = rollouts_of(rng, step * rollouts, sizes)
        batch = learned(groups)
        store.update(step, groups, batch)
        with (directory / "metrics.jsonl").open("a", encoding="utf-8") as file:
            assert batch.advantages_N is not None
            assert batch.loss_weights_N is not None
            loss = float(-(batch.advantages_N * batch.loss_weights_N).sum())
            file.write(json.dumps({"step": step, "reward/mean": 0.4, "policy/policy_loss": loss}) + "\n")
    store.close()


@frozen
class Step:
    """One step of a demo: seconds on the clock, of CPU of the whole process, for which training waited for the writer
    of trajectories, and of CPU of that writer; the mean length of its replies."""

    clock: float
    cpu: float
    waited: float
    wrote: float
    length: float


def demo(directory: Path, gib: float, steps: int, tiny: Path | None) -> list[Step]:
    """Trains the demo, of which `gib` of trajectories are kept; returns its steps after the first."""
    config = structure_config(yaml.safe_load((ROOT / "examples" / "sums.yaml").read_text()))
    config.actor.model_name_or_path = str(ROOT / config.actor.model_name_or_path)
    config.data.prompt_dataset = str(ROOT / config.data.prompt_dataset)
    config.eval.dataset, config.eval.steps = None, -1
    if tiny is not None:
        shrink(config, tiny)
    config.train.max_steps, config.logger.console = steps, False
    config.logger.trajectories_max_gib = gib
    config.ckpt.output_dir, config.ckpt.state_minutes = str(directory), None
    ends, lengths = [], []

    def on_step(number: int, metrics: Mapping[str, float], samples: object) -> None:
        ends.append((time.perf_counter(), time.process_time(), sum(waits), writer_cpu()))
        lengths.append(metrics["rollout/response_length_mean"])

    with waiting() as waits:
        rollgrad.train(config, on_step=on_step)
    spent = [[after - before for before, after in zip(*ends[n - 1 : n + 1], strict=True)] for n in range(1, steps)]
    return [Step(*times, length=length) for times, length in zip(spent, lengths[1:], strict=True)]


@contextmanager
def waiting() -> Iterator[list[float]]:
    """Gives a list that gets the seconds for which each update waits until its trajectories are taken."""
    update, seconds = ParquetTrajectories.update, list[float]()

    def timed(self: ParquetTrajectories, *given: Any) -> None:
        began = time.perf_counter()
        update(self, *given)
        seconds.append(time.perf_counter() - began)

    ParquetTrajectories.update = timed  # type: ignore[method-assign]
    try:
        yield seconds
    finally:
        ParquetTrajectories.update = update  # type: ignore[method-assign]


def writer_cpu() -> float:
    """Returns the seconds for which the thread that writes trajectories has computed; none without such a thread."""
    writers = [thread.ident for thread in threading.enumerate() if thread.name.startswith("trajectories")]
    return sum(time.clock_gettime(time.pthread_getcpuclockid(writer)) for writer in writers if writer is not None)


def slowdown(pairs: int, steps: int, tiny: Path | None) -> dict[str, Any]:
    """Prints by how much trajectories slow the demo, and returns the figures: the first of a pair is now the one, now
    the other."""
    kept: dict[float, list[Step]] = {0.0: [], 2.0: []}
    others = OtherProcesses()
    with tempfile.TemporaryDirectory() as scratch:
        for pair in range(pairs):
            for gib in sorted(kept, reverse=bool(pair % 2)):
                kept[gib] += demo(Path(scratch) / f"{pair}-{gib:g}", gib, steps, tiny)
    paired = list(zip(*kept.values(), strict=True))
    alike = sum(before.length == after.length for before, after in paired)
    figures: dict[str, Any] = {"pairs of steps": len(paired), "with the same replies": alike}
    figures[TAKEN] = others.share()
    print(f"{len(paired)} steps of the demo with trajectories against as many without, of which {alike} have the same")
    print(f"replies; other processes took {figures[TAKEN]:.0%} of the machine")
    for name, its in (("on the clock", "clock"), ("of CPU", "cpu")):
        before, after = ([getattr(step, its) for step in kept[gib]] for gib in kept)
        slower = [now / then - 1 for then, now in zip(before, after, strict=True)]
        figures[name] = told_slowdown(name, before, after, slower)
    direct = [(step.waited + step.wrote) / step.clock for step in kept[2.0]]
    waited, wrote = (statistics.mean(getattr(step, its) for step in kept[2.0]) for its in ("waited", "wrote"))
    figures["directly"] = {"waited": waited, "writer's CPU": wrote, "share": statistics.mean(direct)}
    print(
        f"directly: training waits {waited * 1000:.1f} ms a step for the writer, which computes {wrote * 1000:.1f} ms; "
        f"together {statistics.mean(direct):.2%} of a step: {'under' if statistics.mean(direct) < BOUND else 'over'} "
        f"{BOUND:.0%}"
    )
    return figures


def told_slowdown(
    name: str, before: Sequence[float], after: Sequence[float], slower: Sequence[float]
) -> dict[str, float | str]:
    """Prints and returns by how much steps are slower, and what that shows."""
    low, high = median_interval(slower)
    verdict = "undecided"
    if len(slower) >= FEWEST and not low <= BOUND <= high:
        verdict = f"{'under' if high < BOUND else 'over'} {BOUND:.0%}"
    print(
        f"{name:12} {statistics.median(before):8.3f} s a step without, {statistics.median(after):8.3f} s with: "
        f"{statistics.median(slower):+.2%} ({1 - UNSURE:.0%} interval of the median {low:+.2%} to {high:+.2%}): "
        f"{verdict}"
    )
    medians: dict[str, float | str] = {"without": statistics.median(before), "with": statistics.median(after)}
    return medians | {"slower": statistics.median(slower), "low": low, "high": high, "verdict": verdict}


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Returns two of the values between which the median of their distribution, whatever that is, lies but for a chance
    of `UNSURE`: each value is below the median as often as a coin shows heads. Of fewer than `FEWEST` values, the least
    and the greatest."""
    ordered, count = sorted(values), len(values)
    beyond = 0
    while sum(comb(count, heads) for heads in range(beyond + 1)) / 2**count <= UNSURE / 2:
        beyond += 1
    place = max(0, beyond - 1)
    return ordered[place], ordered[count - 1 - place]


def writing(steps: int) -> float:
    """Returns the seconds of CPU that keeping a step of 64 rollouts of 10 tokens takes, as the demo's are."""
    groups = rollouts_of(random.Random(0), 0, [(10, GROUP)] * 8)
    batch = learned(groups)
    with tempfile.TemporaryDirectory() as directory:
        store = ParquetTrajectories(Path(directory) / "trajectories", Words(), max_gib=8.0)  # type: ignore[arg-type]
        store.update(0, groups, batch)
        store.flush()
        began = time.process_time()
        for step in range(1, steps + 1):
            store.update(step, groups, batch)
        store.close()
        return (time.process_time() - began) / steps


def get(url: str) -> bytes:
    """Returns the answer to a request."""
    with urllib.request.urlopen(url) as answer:
        content: bytes = answer.read()
    return content


def cpu(process: int) -> float:
    """Returns the seconds for which a process has computed so far."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(directory: Path, starts: int) -> dict[str, Any]:
    """Prints and returns the figures of a server on this run, which is started some times."""
    clock: dict[str, list[float]] = {}
    computed: dict[str, list[float]] = {}
    peaks, matched = [], 0
    others = OtherProcesses()
    for _ in range(starts):
        peak, matched = serve_once(directory, clock, computed)
        peaks.append(peak)
    figures: dict[str, Any] = {"trajectories": matched, "memory_mb": max(peaks), "seconds": {}, TAKEN: others.share()}
    for name, seconds in clock.items():
        median, cpu_mean = statistics.median(seconds), statistics.mean(computed[name])
        figures["seconds"][name] = {"clock": median, "greatest": max(seconds), "cpu": cpu_mean}
        print(f"{name:40} {median:6.3f} s, at most {max(seconds):6.3f} s; of the server's CPU {cpu_mean:6.3f} s")
    print(f"{'memory of the server':40} {max(peaks):6.0f} MB")
    print(f"other processes took {figures[TAKEN]:.0%} of the machine")
    print(f"{matched} trajectories")
    return figures


def serve_once(directory: Path, clock: dict[str, list[float]], computed: dict[str, list[float]]) -> tuple[float, int]:
    """Adds the seconds of each request, on the clock and of the server's CPU, to the figures; returns the server's
    memory in megabytes, and the number of rollouts."""
    began = time.perf_counter()
    command = [sys.executable, "-m", "rollgrad.entrypoints.cli.main", "ui", str(directory), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:

        def ask(name: str, url: str, times: int = ASKED, began: float | None = None) -> Any:
            before = 0.0 if began is not None else cpu(server.pid)
            for _ in range(times):
                asked = time.perf_counter() if began is None else began
                answer = get(url)
                clock.setdefault(name, []).append(time.perf_counter() - asked)
            computed.setdefault(name, []).append((cpu(server.pid) - before) / times)
            return answer

        try:
            assert server.stdout is not None
            root = server.stdout.readline().strip()
            ask("start, and first page", f"{root}/", times=1, began=began)
            (run,) = json.loads(get(f"{root}/api/runs"))["runs"]
            base = f"{root}/api/run/{run['id']}"
            rows = f"{base}/trajectories?size=200"
            listed = json.loads(ask("first list, which reads all files", rows, times=1))
            longest = json.loads(get(f"{rows}&sort=-action_tokens"))["rows"][0]
            search = urllib.parse.quote('"w0001" or response contains "w0002"')
            ask("search in all texts", f"{rows}&filter={search}", times=1)
            ask("list", rows)
            ask("list, sorted by reward", f"{rows}&sort=-reward,action_tokens")
            numbers = urllib.parse.quote("reward < 0.5 and action_tokens > 900")
            ask("filter by numbers", f"{rows}&filter={numbers}")
            ask("points of the scatter", f"{base}/points?x=action_tokens&y=reward&color=step")
            ask(f"one of {longest['action_tokens']} tokens", f"{base}/trajectory/{longest['key']}")
            return memory(server.pid), listed["matched"]
        finally:
            server.terminate()


def memory(process: int) -> float:
    """Returns the largest resident size of a process so far, in megabytes."""
    status = Path(f"/proc/{process}/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM"))) / 1024


def main(directory: Path | None = None, steps: int = 40, pairs: int = 0, smoke: bool = False) -> None:
    """Args:
    directory: of the run, which is written if it is not there; by default one that is removed.
    steps: number of updates, of 250 trajectories each.
    pairs: demos with and without trajectories.
    smoke: smallest work.
    """
    with tempfile.TemporaryDirectory() as temporary:
        run = directory or Path(temporary) / "many"
        if not run.exists():
            sizes = (2, 24, 20, 60) if smoke else (steps, 256, 1000, 32_000)
            write_run(run, **dict(zip(("steps", "rollouts", "tokens", "longest"), sizes, strict=True)))
        page = measure(run, 1 if smoke else STARTS)
    page["writing"] = writing(3 if smoke else 100)
    print(f"writing a step of 64 rollouts of 10 tokens {page['writing']:.4f} s of CPU")
    if smoke:
        with smoke_model() as tiny:
            slowdown(1, 2, tiny)
        return
    print(f"kept in {keep('run_page', page)}")
    if pairs:
        unpack_smollm2()
        print(f"kept in {keep('run_page_slowdown', slowdown(pairs, DEMO_STEPS, None))}")


if __name__ == "__main__":
    tyro.cli(main)
