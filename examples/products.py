"""Teaches SmolLM2-135M-Instruct to multiply with a Python sandbox, with GRPO, on one machine without a GPU.

Episodes have several turns: the model calls the tool, reads its result, answers, and may answer once more after a wrong
answer. The settings are in `products.yaml`; evaluation is on products that training never sees. At the end the trained
model is asked one of them, as `rollgrad chat` would ask it. `make demo-agent` runs this file.
"""

import asyncio
import json
import sys
from pathlib import Path

from smollm2 import HERE, train_smollm2

from rollgrad.entrypoints.composition.serving.arguments import AssistantArguments
from rollgrad.entrypoints.composition.serving.assistant import load_assistant

QUESTION = "What is 73 * 48?"


def main() -> int:
    result = train_smollm2("products", __doc__)
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
    await conversation.close()
    await loaded.tools.aclose()


if __name__ == "__main__":
    sys.exit(main())
