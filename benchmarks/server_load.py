"""A training step beside an agent server in the same process, without clients and with 20 that mean harm.

The clients send 12 MB requests, headers without an end and bodies of which half comes, over and over, from a process of
their own (`server_clients.py`). Steps with and without them alternate: what else the machine does falls on both.

    python benchmarks/server_load.py --steps 20

`--smoke` is one small step of each, whose ratio means nothing.
"""

import asyncio
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
import tyro
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from rollgrad.entrypoints.composition.rl.training_server import TrainingServer
from rollgrad.testing.chat_codec import EOS, FakeChatCodec
from tests.fakes.scripted_engine import ScriptedEngine

POSITIONS = 8192
CLIENTS = Path(__file__).with_name("server_clients.py")


async def measure(steps: int, tokens: tuple[int, int]) -> tuple[list[float], list[float]]:
    """Returns the seconds of steps on so many sequences of so many tokens, without and with the clients."""
    codec = FakeChatCodec()
    engine = ScriptedEngine(codec, EOS, lambda prompt: "yes")
    engine.max_tokens = POSITIONS
    server = TrainingServer(engine, codec, None)
    port = int((await server.url()).rpartition(":")[2])
    clients = subprocess.Popen([sys.executable, str(CLIENTS), str(port)], stdin=subprocess.PIPE, text=True)
    assert clients.stdin is not None
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4)
    )
    optimizer = torch.optim.AdamW(model.parameters())
    ids = torch.randint(0, 512, tokens)

    def step() -> float:
        began = time.perf_counter()
        for _ in range(4):
            optimizer.zero_grad()
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
        return time.perf_counter() - began

    step()
    found: tuple[list[float], list[float]] = ([], [])
    for number in range(2 * steps):
        attacked = number % 2
        clients.stdin.write("on\n" if attacked else "off\n")
        clients.stdin.flush()
        await asyncio.sleep(1)
        found[attacked].append(await asyncio.to_thread(step))
    clients.kill()
    clients.wait()
    await server.aclose()
    return found


def main(steps: int = 20, smoke: bool = False) -> int:
    """Prints the medians and their ratio; returns 1 if it is above 1.1."""
    torch.set_num_threads(1)
    alone, attacked = asyncio.run(measure(1, (1, 16)) if smoke else measure(steps, (8, 256)))
    ratio = statistics.median(attacked) / statistics.median(alone)
    print(
        f"step alone {statistics.median(alone):.3f} s, attacked {statistics.median(attacked):.3f} s: {ratio:.3f} times"
    )
    return int(ratio > 1.1 and not smoke)


if __name__ == "__main__":
    sys.exit(tyro.cli(main))
