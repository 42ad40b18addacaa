"""Every recipe learns sums with SmolLM2-135M-Instruct: one short run each, and one picture of all.

The settings are those of `examples/sums.yaml` with the recipe's preset. Recipes of a loss take two optimizer steps a
rollout, so that ratios differ from 1; recipes of a correction are over-sampled, so that a part of each rollout is one
update old; `gigpo` plays up to two turns; the teacher of `opsd solved` is told the sum as it is written. `--only` runs
some of them and keeps the results of the others.

    python benchmarks/learning_curves.py --steps 10
"""

import json
import re
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import tyro
from attrs import define, evolve, frozen
from rich.console import Console
from rich.table import Table

import rollgrad
from rollgrad.domain.episodes.messages import Action
from rollgrad.domain.episodes.prompts import Prompt
from rollgrad.domain.ports.environment import StepResult
from rollgrad.entrypoints.config_io import structure_config

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]
from smollm2 import unpack_smollm2  # noqa: E402

from benchmarks.results import IMAGES, learned  # noqa: E402
from benchmarks.smoke import REPLY_TOKENS, shrink, smoke_model  # noqa: E402

TEACHER = "grpo"
"""The recipe whose model teaches those of `DISTILLED`."""
DISTILLED = ("on_policy_distill", "iw_opd")
"""Recipes that learn from a teacher."""

SOLVED = "opsd solved"
"""The recipe whose teacher is told solutions, in words that it follows."""

_CRITIC = {"critic": {"adam": {"lr": 1e-4}}}
_TWO_STEPS = {"train": {"batch_size": 32}}
_STALE = {"rollout": {"generate_batch_size": 12}}

RECIPES: dict[str, dict[str, Any]] = {
    "grpo": {},
    "dr_grpo": {},
    "lite_ppo": {},
    "dapo": {},
    "rloo": {},
    "reinforce_pp": {},
    "reinforce_pp_baseline": {},
    "opo": {},
    "otb": {},
    "gpg": {},
    "maxrl": {},
    "pass_at_k": {},
    "gdpo": {"reward": {"verifier": None}},
    "remax": {},
    "flash_reinforce": {},
    "ppo": _CRITIC,
    "vapo": {"critic": {"adam": {"lr": 1e-4}, "freezing_steps": 2}},
    "gspo": _TWO_STEPS,
    "luspo": _TWO_STEPS,
    "cispo": _TWO_STEPS,
    "sapo": _TWO_STEPS,
    "vespo": _TWO_STEPS,
    "topr": _TWO_STEPS,
    "gmpo": _TWO_STEPS,
    "clip_cov": _TWO_STEPS,
    "kl_cov": _TWO_STEPS,
    "dppo": _TWO_STEPS,
    "dro": _TWO_STEPS,
    "dr_grpo,tis": _STALE,
    "dr_grpo,icepop": _STALE,
    "dr_grpo,seq_mask_tis": _STALE,
    "dr_grpo,opsm": _STALE,
    "dr_grpo,m2po": _STALE,
    "dr_grpo top_entropy": {"algo": {"top_entropy_quantile": 0.2}},
    "gigpo": {},
    "on_policy_distill": {},
    "iw_opd": {},
    "opsd": {},
    SOLVED: {"algo": {"kl": {"teacher_template": "{prompt}\nAnswer with these words: {solution}"}}},
    "sdpo": {},
}
"""Presets, some with a word about what they need besides, and that."""
SMOKE = ("grpo", "on_policy_distill")


class SecondTry:
    """Says once that the last number of a reply is wrong, and judges the second reply."""

    def __init__(self) -> None:
        self._label = ""
        self._turns = 0

    async def reset(self, prompt: Prompt) -> str:
        self._label = str(prompt.label)
        return ""

    async def step(self, action: Action) -> StepResult:
        self._turns += 1
        right = re.findall(r"\d+", action.text)[-1:] == [self._label]
        again = "<|im_end|>\n<|im_start|>user\nThat is wrong, try again.<|im_end|>\n<|im_start|>assistant\n"
        return StepResult(observation=again, reward=float(right), terminated=right or self._turns == 2)

    async def close(self) -> None:
        pass


@define(kw_only=True)
class Options:
    """Trains with each recipe, and draws all curves."""

    steps: int = 10
    """Rollouts of each run."""
    only: tuple[str, ...] = ()
    """Recipes to run; default: all."""
    seed: int = 1
    """Seeds prompts and sampling."""
    smoke: bool = False
    """One step of two recipes on a tiny random model, kept nowhere, to see that the script runs."""


@frozen
class Curve:
    """Mean score of each rollout, and held-out greedy accuracy before and after."""

    scores: list[float]
    before: float
    after: float
    value_losses: list[float]


def correct_and_short(completions: list[str], labels: list[Any]) -> dict[str, Any]:
    """Two named rewards: the right number last, and few words around it."""
    replies = [completion.split() for completion in completions]
    numbers = [[word.strip(".,!?=*") for word in reply] for reply in replies]
    correct = [
        float(next((n for n in reversed(words) if n.isdigit()), None) == str(label))
        for words, label in zip(numbers, labels, strict=True)
    ]
    return {"rewards": {"correct": correct, "short": [float(len(r) <= 6) for r in replies]}, "scores": correct}


def with_solutions(path: Path, folder: Path) -> Path:
    """Writes the rows of a file to `folder`, each with its sum in the column `solution`."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    written = folder / "solved.jsonl"
    with written.open("w") as file:
        for row in rows:
            first, second = re.findall(r"\d+", row["input"])
            file.write(json.dumps({**row, "solution": f"{first} + {second} = {row['label']}"}) + "\n")
    return written


def run(recipe: str, options: Options, folder: Path, tiny: Path | None) -> Curve:
    """One run, a small one if there is a tiny model; its model stays in `folder`."""
    import yaml

    settings = yaml.safe_load((ROOT / "examples" / "sums.yaml").read_text())
    del settings["algo"]
    for section, values in RECIPES[recipe].items():
        settings.setdefault(section, {}).update(values)
    config = structure_config(settings, preset=recipe.partition(" ")[0])
    config.actor.model_name_or_path = str(ROOT / config.actor.model_name_or_path)
    config.data.prompt_dataset = str(ROOT / config.data.prompt_dataset)
    config.eval.dataset = str(ROOT / str(config.eval.dataset))
    config.eval.max_samples, config.eval.steps = 60, -1
    config.rollout.max_new_tokens = REPLY_TOKENS
    config.train.max_steps, config.train.seed = options.steps, options.seed
    if tiny is not None:
        shrink(config, tiny)
    config.logger.console = False
    config.ckpt.output_dir = str(folder)
    if recipe == SOLVED:
        config.data.prompt_dataset = str(with_solutions(Path(config.data.prompt_dataset), folder.parent))
    if recipe in DISTILLED:
        config.ref.model_name_or_path = str(folder.parent / TEACHER / "model")
    result = rollgrad.train(
        config,
        reward=correct_and_short if recipe == "gdpo" else None,
        environment=SecondTry if recipe == "gigpo" else None,
    )
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    key = "reward/score_mean_before_filter"
    return Curve(
        scores=[row[key] for row in rows if key in row],
        before=result.before["eval/pass@1"],
        after=result.after["eval/pass@1"],
        value_losses=[row["critic/value_loss"] for row in rows if "critic/value_loss" in row],
    )


def draw(curves: dict[str, Curve], picture: Path) -> None:
    """Small multiples to the PNG file `picture`: each recipe in colour over all others in grey."""
    from matplotlib.figure import Figure

    columns = 6
    rows = -(-len(curves) // columns)
    figure = Figure(figsize=(2.3 * columns, 1.9 * rows), layout="constrained", facecolor="white")
    grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).ravel()
    for axes, (name, curve) in zip(grid, curves.items(), strict=False):
        for other in curves.values():
            axes.plot(range(1, len(other.scores) + 1), other.scores, color="#d8dbe2", linewidth=0.7)
        axes.plot(range(1, len(curve.scores) + 1), curve.scores, color="#2f6fde", linewidth=2)
        axes.set_title(f"{name}  {curve.before:.0%} → {curve.after:.0%}", fontsize=8, loc="left")
        axes.set_ylim(0, 1)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=7)
    for axes in grid[len(curves) :]:
        axes.set_axis_off()
    figure.supxlabel("rollout", fontsize=8)
    figure.supylabel("share of sums right, as sampled", fontsize=8)
    figure.savefig(picture, dpi=130)


def main(options: Options) -> None:
    """Trains with the chosen recipes."""
    if not options.smoke:
        unpack_smollm2()
        return compare(options, IMAGES, None)
    with smoke_model() as tiny, tempfile.TemporaryDirectory() as images:
        return compare(evolve(options, steps=1, only=options.only or SMOKE), Path(images), tiny)


def compare(options: Options, images: Path, tiny: Path | None) -> None:
    """Runs, and writes figures and picture to `images` after each run."""
    console = Console(highlight=False)
    with tempfile.TemporaryDirectory() as scratch:

        def made(recipe: str) -> Curve:
            folder = Path(scratch) / recipe
            curve = run(recipe, options, folder, tiny)
            console.print(f"{recipe:24} {curve.scores[0]:.2f} -> {curve.scores[-1]:.2f}, held out {curve.after:.0%}")
            if recipe != TEACHER:
                shutil.rmtree(folder)
            return curve

        found = learned("algorithms", RECIPES, options.only or RECIPES, made, draw, dict[str, Curve], images)
    table = Table("preset", "first rollout", "last", "held out before", "after")
    for name, curve in found.items():
        table.add_row(name, *(f"{x:.0%}" for x in (curve.scores[0], curve.scores[-1], curve.before, curve.after)))
    console.print(table)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
