"""The classical pipeline on sums with SmolLM2-135M-Instruct, on one machine without a GPU: supervised fine-tuning, a
reward model that learns which of two answers is right, PPO with that reward model as only reward and as the beginning
of the critic. After each stage it measures held-out sums, whose answers are known.

`make demo-pipeline` runs this file, whose option `image` names a PNG file for the curves.
"""

import json
import random
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import tyro
from attrs import define
from rich.console import Console
from rich.table import Table
from smollm2 import HERE, MODEL, unpack_smollm2

import rollgrad
from rollgrad.application.settings.sections.actor import DType
from rollgrad.application.settings.sections.reward import Verifier
from rollgrad.domain.algorithms.shaping_settings import Normalise
from rollgrad.entrypoints.cli.logs import configure_logging

OFFSETS = (-10, -3, -2, -1, 1, 2, 3, 10)
"""Errors of wrong answers, as a model that adds badly makes them."""


@define(kw_only=True)
class Options:
    """Settings of the three stages."""

    model: Path = MODEL
    """Model to begin with."""
    output_dir: Path = Path("runs/pipeline")
    """Directory of data, models and metrics of all stages."""
    sft_steps: int = 8
    """Optimizer steps of supervised fine-tuning, of 8 solved sums each."""
    rm_steps: int = 60
    """Optimizer steps of the reward model, of 16 pairs each."""
    ppo_steps: int = 12
    """Rollouts of PPO, of 8 sums with 8 answers each."""
    held_out: int = 100
    """Held-out sums, and pairs of answers to them, that each stage is measured on."""
    seed: int = 1
    """Seeds data, orders and sampling."""
    image: Path | None = None
    """PNG file for the curves of all stages."""


def rows_of(name: str) -> list[dict[str, str]]:
    """The rows of a file of sums: `input` asks, `label` is the sum."""
    return [json.loads(line) for line in (HERE / "data" / f"{name}.jsonl").read_text().splitlines()]


def answer(row: Mapping[str, str], result: int) -> str:
    """The sum, worked out."""
    first, second = (word.strip("?") for word in row["input"].split() if word.strip("?").isdigit())
    return f"{first} + {second} = {result}"


def pairs_of(rows: list[dict[str, str]], count: int, chance: random.Random) -> Iterator[dict[str, str]]:
    """`count` pairs for each sum, of the right answer and a wrong one."""
    for row in rows:
        for offset in chance.sample(OFFSETS, count):
            right = int(row["label"])
            chosen, rejected = answer(row, right), answer(row, abs(right + offset))
            yield {"prompt": row["input"], "chosen": chosen, "rejected": rejected}


def write(path: Path, rows: Iterator[Any] | list[Any]) -> str:
    """Writes rows to a JSONL file, and returns its name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def fine_tune(options: Options) -> rollgrad.TrainResult:
    """The first stage: a few solved sums show the form of an answer."""
    chance = random.Random(options.seed)
    rows = chance.sample(rows_of("sums_train"), 64)
    solved = [{"prompt": row["input"], "completion": answer(row, int(row["label"]))} for row in rows]
    run = rollgrad.SFTRun()
    run.actor.model_name_or_path = str(options.model)
    run.actor.adam.lr = 5e-5
    run.data.dataset = write(options.output_dir / "data" / "solved.jsonl", solved)
    run.train.batch_size, run.train.max_steps, run.train.seed = 8, options.sft_steps, options.seed
    run.ckpt.output_dir, run.ckpt.overwrite = str(options.output_dir / "sft"), True
    return rollgrad.train_sft(run)


def train_judge(options: Options, policy: Path) -> rollgrad.TrainResult:
    """The second stage: the fine-tuned model becomes a reward model."""
    chance = random.Random(options.seed)
    held_out = list(pairs_of(rows_of("sums_test")[: options.held_out], 1, chance))
    run = rollgrad.RMRun()
    run.actor.model_name_or_path = str(policy)
    run.actor.adam.lr = 5e-5
    run.rm.centring = 0.01
    run.data.dataset = write(options.output_dir / "data" / "pairs.jsonl", pairs_of(rows_of("sums_train"), 4, chance))
    run.eval.dataset = write(options.output_dir / "data" / "held_out_pairs.jsonl", held_out)
    run.data.max_dropped = 0.1  # 0 + 1 is as far from -1 as from 1
    run.eval.steps = max(1, options.rm_steps // 4)
    run.train.batch_size, run.train.max_steps, run.train.seed = 16, options.rm_steps, options.seed
    run.ckpt.output_dir, run.ckpt.overwrite = str(options.output_dir / "rm"), True
    return rollgrad.train_rm(run)


def rl_settings(options: Options, policy: Path) -> rollgrad.RLConfig:
    """The settings of sampling answers from `policy`."""
    run = rollgrad.RLConfig()
    run.actor.model_name_or_path = str(policy)
    run.actor.dtype = DType.FLOAT32  # steps as small as PPO's are mostly rounded away in bfloat16
    run.data.label_key = "label"
    run.rollout.max_new_tokens = 24
    run.train.seed = options.seed
    return run


def reinforce(options: Options, policy: Path, judge: Path) -> rollgrad.TrainResult:
    """The third stage: PPO, whose reward is the reward model's score, and whose critic begins as it."""
    run = rl_settings(options, policy)
    run.actor.adam.lr, run.critic.adam.lr = 1e-5, 2e-5
    run.algo.advantage.estimator = "gae"
    run.algo.kl.init_coef = 0.05  # the reward model knows solved sums, and judges anything else as it happens to
    run.critic.model_name_or_path = run.reward.model_name_or_path = str(judge)
    run.reward.normalize, run.reward.timeout = Normalise.MODEL, 300.0
    run.data.prompt_dataset = str(HERE / "data" / "sums_train.jsonl")
    run.rollout.batch_size = run.rollout.n_samples_per_prompt = 8
    run.train.max_steps = options.ppo_steps
    run.ckpt.output_dir, run.ckpt.overwrite = str(options.output_dir / "ppo"), True
    return rollgrad.train(run)


def accuracy(options: Options, policy: Path) -> float:
    """The share of held-out sums that a model answers rightly, decoding greedily."""
    run = rl_settings(options, policy)
    run.eval.dataset, run.eval.max_samples = str(HERE / "data" / "sums_test.jsonl"), options.held_out
    run.reward.verifier = Verifier.LAST_NUMBER
    return rollgrad.evaluate(run)["eval/pass@1"]


def series(folder: Path, key: str) -> tuple[list[int], list[float]]:
    """Steps and values of a metric of a run."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    found = [(row["step"], row[key]) for row in rows if key in row]
    return [step for step, _ in found], [value for _, value in found]


def draw(options: Options, right: Mapping[str, float], picture: Path) -> None:
    """The curves of all stages, and held-out accuracy after each, as a PNG file."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 2.6), layout="constrained", facecolor="white")
    panels = (
        ("Fine-tuning: loss", "sft", "train/loss"),
        ("Reward model: held-out pairs in order", "rm", "eval/accuracy"),
        ("PPO: reward model's score", "ppo", "reward/mean"),
    )
    *curves, bars = figure.subplots(1, len(panels) + 1)
    for axes, (title, stage, key) in zip(curves, panels, strict=True):
        axes.plot(*series(options.output_dir / stage, key), color="#2f6fde", marker=".")
        axes.set_title(title, fontsize=9, loc="left")
        axes.set_xlabel("step", fontsize=8)
    bars.bar(list(right), list(right.values()), color="#2f6fde")
    bars.set_title("Held-out sums right", fontsize=9, loc="left")
    bars.set_ylim(0, 1)
    for axes in (*curves, bars):
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=8)
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=110)


def whole(stage: rollgrad.TrainResult) -> rollgrad.TrainResult:
    """Returns the result of a stage, unless a signal cut it short: then the pipeline ends here, with that status."""
    if stage.stopped_by is not None:
        sys.exit(128 + stage.stopped_by)
    return stage


def main(options: Options) -> None:
    """Runs the three stages, and shows what came of each."""
    configure_logging()
    if options.model == MODEL:
        unpack_smollm2()
    started = time.process_time()
    right = {"before": accuracy(options, options.model)}
    tuned = whole(fine_tune(options))
    right["SFT"] = accuracy(options, tuned.model)
    judge = whole(train_judge(options, tuned.model))
    trained = whole(reinforce(options, tuned.model, judge.model))
    right["PPO"] = accuracy(options, trained.model)
    table = Table("stage", "held-out sums right", title=f"{time.process_time() - started:.0f} s of processor time")
    for stage, share in right.items():
        table.add_row(stage, f"{share:.0%}")
    console = Console(highlight=False)
    console.print(table)
    console.print(f"reward model: {judge.after['eval/accuracy']:.0%} of held-out pairs in order")
    console.print(f"model   {trained.model}", soft_wrap=True)
    if options.image is not None:
        draw(options, right, options.image)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
