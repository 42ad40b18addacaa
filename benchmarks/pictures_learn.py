"""A tiny model of random weights learns the tasks of `examples/` that have images, in one process and in a cluster; one
picture of all.

python benchmarks/pictures_learn.py
python benchmarks/pictures_learn.py --only shapes_cluster
"""

import json
import math
import sys
import tempfile
import time
from pathlib import Path
from typing import Literal

import tyro
from attrs import define
from rich.console import Console
from rich.table import Table

import rollgrad
from rollgrad.application.settings.sections.rollout import Engine

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]
from shapes import SHAPE_TASK, PictureTask, prepare  # noqa: E402
from streak import STREAK_TASK  # noqa: E402

from benchmarks.results import IMAGES, learned  # noqa: E402

Name = Literal["shapes", "streak", "shapes_cluster", "streak_cluster"]
EVERY = 20
"""Steps between evaluations."""

TASKS: dict[Name, PictureTask] = {"shapes": SHAPE_TASK, "streak": STREAK_TASK}
CLUSTERED: dict[Name, Name] = {"shapes_cluster": "shapes", "streak_cluster": "streak"}
"""Runs in a cluster, and the task of each."""
TITLES: dict[Name, str] = {
    "shapes": "one turn: name the shape",
    "streak": "up to three turns: a streak of shapes",
    "shapes_cluster": "one turn, in a cluster with vLLM",
    "streak_cluster": "up to three turns, in a cluster with vLLM",
}


@define(kw_only=True)
class Options:
    """Trains on the tasks, and draws all curves."""

    only: tuple[Name, ...] = ()
    """Runs to make, default all, with `smoke` those in one process; the figures of the others are kept."""
    steps: int = 80
    """Steps of each run."""
    smoke: bool = False
    """One step of each task, kept nowhere, to see that the script runs."""


@define(kw_only=True)
class Curves:
    """Steps and values of the share of held-out images that are right, greedily, and of the mean reward as sampled;
    and seconds of the whole run."""

    held_out: list[tuple[int, float]]
    sampled: list[tuple[int, float]]
    seconds: float


def run(name: Name, options: Options, scratch: Path) -> Curves:
    """Trains, a single step on few images for a smoke test."""
    task_name = CLUSTERED.get(name, name)
    task, config = TASKS[task_name], rollgrad.load_config(ROOT / "examples" / f"{task_name}.yaml")
    if name in CLUSTERED:
        config.cluster.enable, config.rollout.engine = True, Engine.VLLM
        config.actor.num_gpus_per_node, config.ds.zero_stage = 2, 3  # as in examples/sums_cluster.yaml
    prepare(task, config, scratch / f"{name}_data", 40 if options.smoke else 2000)
    config.train.max_steps, config.eval.steps = options.steps, EVERY
    if options.smoke:
        config.train.max_steps, config.rollout.batch_size, config.train.batch_size = 1, 4, 32
    config.logger.console, config.ckpt.output_dir = False, str(scratch / name)
    started = time.monotonic()
    result = rollgrad.train(config, environment=task.environment)
    seconds = time.monotonic() - started
    if result.stopped_by is not None:
        sys.exit(128 + result.stopped_by)
    rows = [json.loads(line) for line in (scratch / name / "metrics.jsonl").read_text().splitlines()]
    held_out, sampled = (
        [(row["step"], round(row[key], 4)) for row in rows if key in row] for key in ("eval/pass@1", "reward/mean")
    )
    return Curves(held_out=held_out, sampled=sampled, seconds=round(seconds))


def draw(found: dict[Name, Curves], picture: Path) -> None:
    """Draws the held-out share and the reward of each run over its steps, two runs in a row."""
    from matplotlib.figure import Figure

    rows = math.ceil(len(found) / 2)
    figure = Figure(figsize=(6.8, 3 * rows), layout="constrained", facecolor="white")
    grid = figure.subplots(rows, 2, sharey=True, squeeze=False).ravel()
    for axes in grid[len(found) :]:
        axes.set_visible(False)
    for axes, (name, curves) in zip(grid, found.items(), strict=False):
        axes.plot(*zip(*curves.sampled, strict=True), color="#f0883e", linewidth=1, label="reward, as sampled")
        axes.plot(
            *zip(*curves.held_out, strict=True), marker="o", color="#2f6fde", label="held-out images right, greedy"
        )
        axes.set_title(TITLES[name], fontsize=9, loc="left")
        axes.set_xlabel("step", fontsize=8)
        axes.set_ylim(0, 1.02)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=7)
    grid[0].legend(fontsize=7, frameon=False)
    figure.savefig(picture, dpi=110)


def main(options: Options) -> None:
    """Makes the chosen runs, and writes figures (pictures.json) and picture (pictures.png) after each."""
    with tempfile.TemporaryDirectory() as scratch:
        found = learned(
            "pictures",
            TITLES,
            options.only or (TASKS if options.smoke else TITLES),
            lambda name: run(name, options, Path(scratch)),
            draw,
            dict[Name, Curves],
            Path(scratch) if options.smoke else IMAGES,
        )
    table = Table("run", "steps", "seconds", "held out before", "after")
    for name, curves in found.items():
        steps, (before, after) = curves.sampled[-1][0], (curves.held_out[place][1] for place in (0, -1))
        table.add_row(name, str(steps), f"{curves.seconds:.0f}", f"{before:.0%}", f"{after:.0%}")
    Console(highlight=False).print(table)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
