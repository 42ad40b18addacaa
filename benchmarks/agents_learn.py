"""Trains SmolLM2 through agents that know nothing of training: each plays as a client of the run's server.

`python benchmarks/agents_learn.py [--steps 8] [--smoke]` runs the files of `examples/agents` on `examples/sums.yaml`
with the same seed, and prints the reward of each rollout beside that of the plain single-turn executor. Episodes, seeds
and tokens are the same for all, so the curves should be too. The environment of verifiers brings prompts and rewards of
its own; `scripts/setup.sh test` installs that package (`tests/verifiers.txt`).
"""

import argparse
import json
import os
import runpy
import sys
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console
from rich.table import Table

import rollgrad

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]
from smollm2 import unpack_smollm2  # noqa: E402

from benchmarks.beside import beside  # noqa: E402
from benchmarks.smoke import HELP, REPLY_TOKENS, shrink, smoke_model  # noqa: E402

FILES = ROOT / "examples" / "agents"
VERIFIERS = "a taskset of verifiers 0.4"
AGENTS = {
    "single-turn executor": {},
    "openai SDK": {"file": "openai_sdk.py"},
    "anthropic SDK, streaming": {"file": "anthropic_sdk.py"},
    "OpenAI Agents SDK": {"file": "openai_agents.py"},
    "Pydantic AI": {"file": "pydantic_agent.py"},
    "a program (openai SDK)": {"command": f"{sys.executable} {FILES / 'program.py'}"},
    VERIFIERS: {"file": "verifiers_sums.py"},
}
SMOKE = (VERIFIERS,)


def rewards(name: str, steps: int, output: str, tiny: Path | None) -> list[float]:
    """The mean reward of each rollout with an agent; of a small run if there is a tiny model."""
    how = AGENTS[name]
    config = rollgrad.load_config(ROOT / "examples" / "sums.yaml")
    config.train.max_steps = steps
    config.eval.dataset, config.eval.steps = None, -1
    config.rollout.max_new_tokens = REPLY_TOKENS
    config.ckpt.output_dir = output
    if tiny is not None:
        shrink(config, tiny)
    if "file" in how:
        config.train.agent_func_path = str(FILES / how["file"])
    config.agent.command = how.get("command")
    if name == VERIFIERS:
        os.environ["PYTHONPATH"] = f"{FILES}{os.pathsep}{beside('verifiers')}"
        config.data.prompt_dataset, config.data.label_key = f"{output}/rows.jsonl", None
        config.reward.verifier = None
        runpy.run_path(str(FILES / how["file"]))["run_agent"].write_rows(config.data.prompt_dataset)
    rollgrad.train(config)
    lines = [json.loads(line) for line in (Path(output) / "metrics.jsonl").read_text().splitlines()]
    return [line["reward/mean"] for line in lines if "reward/mean" in line]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=8, help="rollouts of each agent")
    parser.add_argument("--smoke", action="store_true", help=HELP)
    arguments = parser.parse_args()
    steps: int = 1 if arguments.smoke else arguments.steps
    if not arguments.smoke:
        unpack_smollm2()
    table = Table("agent", *(str(step + 1) for step in range(steps)), title="mean reward of each rollout")
    with smoke_model() if arguments.smoke else nullcontext() as tiny:
        for name in SMOKE if arguments.smoke else AGENTS:
            with TemporaryDirectory() as output:
                table.add_row(name, *(f"{reward:.2f}" for reward in rewards(name, steps, output, tiny)))
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
