"""The server of `rollgrad ui` on a run of 10,000 trajectories of 1,000 tokens: how long it takes to start, to list and
filter them, and to open one of 32,000 tokens, on the clock and in seconds of its CPU; and its memory.

The run is written by the writer that training uses, into `--directory`, which is kept for another time.

    python benchmarks/run_page.py --directory runs/many

With `--pairs` it also trains the demo so many times with and without trajectories, in turns, and says by how much they
slow its steps: the median of the pairs and their range, beside what the same run without them differs by from one time
to the next; and which share of a step the writing is, measured by itself.

    python benchmarks/run_page.py --directory runs/many --pairs 4

`--smoke` has 50 trajectories of 20 tokens, in a directory that is removed, and a tiny model in the demo.
"""

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Sequence
from pathlib import Path

import torch
import tyro
import yaml
from attrs import evolve

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from smollm2 import unpack_smollm2

import rollgrad
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
DEMO_STEPS = 3
"""Steps of a demo."""
ASKED = 5
"""Times that each request is made."""


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


def demo(directory: Path, gib: float, steps: int, tiny: Path | None) -> tuple[float, float]:
    """Trains the demo, of which `gib` of trajectories are kept; returns the seconds of CPU and on the clock of a step
    after the first, which also begins much that lasts."""
    config = structure_config(yaml.safe_load((ROOT / "examples" / "sums.yaml").read_text()))
    config.actor.model_name_or_path = str(ROOT / config.actor.model_name_or_path)
    config.data.prompt_dataset = str(ROOT / config.data.prompt_dataset)
    config.eval.dataset, config.eval.steps = None, -1
    if tiny is not None:
        shrink(config, tiny)
    config.train.max_steps, config.logger.console = steps, False
    config.logger.trajectories_max_gib = gib
    config.ckpt.output_dir, config.ckpt.state_minutes = str(directory), None
    times = []
    rollgrad.train(config, on_step=lambda *step: times.append((time.process_time(), time.perf_counter())))
    (cpu_before, clock_before), (cpu_after, clock_after) = times[0], times[-1]
    return (cpu_after - cpu_before) / (steps - 1), (clock_after - clock_before) / (steps - 1)


def slowdown(pairs: int, steps: int, tiny: Path | None) -> float:
    """Prints by how much trajectories slow the demo: the first of a pair is now the one, now the other. Returns the
    seconds of CPU of a step without them."""
    seconds: dict[float, list[tuple[float, float]]] = {0.0: [], 2.0: []}
    with tempfile.TemporaryDirectory() as scratch:
        for pair in range(pairs):
            for gib in sorted(seconds, reverse=bool(pair % 2)):
                seconds[gib].append(demo(Path(scratch) / f"{pair}-{gib:g}", gib, steps, tiny))
    for place, name in enumerate(("of CPU", "on the clock")):
        without, kept = ([times[place] for times in seconds[gib]] for gib in seconds)
        slower = [after / before - 1 for before, after in zip(without, kept, strict=True)]
        spread = (max(without) - min(without)) / statistics.median(without)
        print(
            f"a step of the demo {name} {statistics.median(without):8.3f} s without trajectories, "
            f"{statistics.median(kept):8.3f} s with: {statistics.median(slower):+.1%} "
            f"(pairs: {pairs}, from {min(slower):+.1%} to {max(slower):+.1%}; those without differ by {spread:.1%})"
        )
    return statistics.median(times[0] for times in seconds[0.0])


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


def told(name: str, seconds: Sequence[float], computed: float) -> None:
    """Prints the median time of requests, and the server's own seconds for each."""
    print(f"{name:40} {statistics.median(seconds):8.3f} s, of the server's CPU {computed / len(seconds):8.3f} s")


def measure(directory: Path) -> None:
    """Prints the figures of a server on this run."""
    began = time.perf_counter()
    command = [sys.executable, "-m", "rollgrad.entrypoints.cli.main", "ui", str(directory), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            root = server.stdout.readline().strip()
            get(f"{root}/")
            told("start, and first page", [time.perf_counter() - began], cpu(server.pid))
            (run,) = json.loads(get(f"{root}/api/runs"))["runs"]
            base = f"{root}/api/run/{run['id']}"
            rows = f"{base}/trajectories?size=200"
            ask(server.pid, "first list, which reads all files", rows, times=1)
            longest = json.loads(get(f"{rows}&sort=-action_tokens"))["rows"][0]
            search = urllib.parse.quote('"w0001" or response contains "w0002"')
            ask(server.pid, "search in all texts", f"{rows}&filter={search}", times=1)
            asked = {
                "list": rows,
                "list, sorted by reward": f"{rows}&sort=-reward,action_tokens",
                "filter by numbers": f"{rows}&filter={urllib.parse.quote('reward < 0.5 and action_tokens > 900')}",
                "points of the scatter": f"{base}/points?x=action_tokens&y=reward&color=step",
                f"one of {longest['action_tokens']} tokens": f"{base}/trajectory/{longest['key']}",
            }
            for name, url in asked.items():
                ask(server.pid, name, url)
            print(f"{'memory of the server':40} {memory(server.pid):8.0f} MB")
            matched = json.loads(get(rows))
            print(f"{matched['matched']} trajectories")
        finally:
            server.terminate()


def ask(process: int, name: str, url: str, times: int = ASKED) -> None:
    """Makes a request some times, and prints how long it takes."""
    seconds = []
    before = cpu(process)
    for _ in range(times):
        began = time.perf_counter()
        get(url)
        seconds.append(time.perf_counter() - began)
    told(name, seconds, cpu(process) - before)


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
        measure(run)
    step = None
    if smoke:
        with smoke_model() as tiny:
            step = slowdown(1, 2, tiny)
    elif pairs:
        unpack_smollm2()
        step = slowdown(pairs, DEMO_STEPS, None)
    written = writing(3 if smoke else 100)
    share = "" if step is None else f", {written / step:.2%} of a step of the demo"
    print(f"writing a step of 64 rollouts of 10 tokens {written:8.4f} s of CPU{share}")


if __name__ == "__main__":
    tyro.cli(main)
