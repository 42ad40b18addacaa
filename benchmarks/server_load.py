"""A training step beside an agent server in the same process, without clients and with 20 that mean harm.

The clients send 12 MB requests, headers without an end and bodies of which half comes, over and over, from a process of
their own. Steps with and without them alternate, so that what else the machine does falls on both.

    python benchmarks/server_load.py --steps 20
"""

import asyncio
import multiprocessing
import socket
import statistics
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import tyro
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from rollgrad.entrypoints.composition.training_server import TrainingServer
from tests.fakes.chat_codec import EOS, FakeChatCodec
from tests.fakes.scripted_engine import ScriptedEngine

CLIENTS = 20
POSITIONS = 8192
PAUSE = 0.05
"""Seconds between two attempts of a client: it harms by what it sends, not by the processor that it takes itself."""
BODY = b'{"messages": [{"role": "user", "content": "' + b"<|im_end|>" * 1_200_000 + b'"}]}'


def harm(port: int, number: int, active: Any) -> None:
    """Sends one kind of harm while `active` is set, for ever."""
    while True:
        active.wait()
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
            head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
            if number % 3 == 0:
                connection.sendall(head + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY)
                connection.recv(1000)
            elif number % 3 == 1:
                connection.sendall(head)
                while active.is_set():
                    connection.sendall(b"X-Header: value\r\n" * 100)
                    time.sleep(PAUSE)
            else:
                connection.sendall(head + b"Content-Length: 100000\r\n\r\n" + BODY[:50_000])
                connection.settimeout(1)
                connection.recv(1000)
        time.sleep(PAUSE)


async def measure(steps: int) -> tuple[list[float], list[float]]:
    """Returns the seconds of steps without and with the clients."""
    codec = FakeChatCodec()
    engine = ScriptedEngine(codec, EOS, lambda prompt: "yes")
    engine.max_tokens = POSITIONS  # type: ignore[attr-defined]
    server = TrainingServer(engine, codec)
    port = int((await server.url()).rpartition(":")[2])
    context = multiprocessing.get_context("spawn")
    active = context.Event()
    clients = [context.Process(target=harm, args=(port, n, active), daemon=True) for n in range(CLIENTS)]
    for client in clients:
        client.start()
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4)
    )
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.randint(0, 512, (8, 256))

    def step() -> float:
        began = time.perf_counter()
        for _ in range(4):
            optimizer.zero_grad()
            model(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
        return time.perf_counter() - began

    await asyncio.sleep(20)  # the clients import
    step()
    found: tuple[list[float], list[float]] = ([], [])
    for number in range(2 * steps):
        attacked = number % 2
        active.set() if attacked else active.clear()
        await asyncio.sleep(1)
        found[attacked].append(await asyncio.to_thread(step))
    for client in clients:
        client.kill()
    await server.aclose()
    return found


def main(steps: int = 20) -> int:
    """Prints the medians and their ratio; returns 1 if it is above 1.1."""
    torch.set_num_threads(1)
    alone, attacked = asyncio.run(measure(steps))
    ratio = statistics.median(attacked) / statistics.median(alone)
    print(
        f"step alone {statistics.median(alone):.3f} s, attacked {statistics.median(attacked):.3f} s: {ratio:.3f} times"
    )
    return int(ratio > 1.1)


if __name__ == "__main__":
    sys.exit(tyro.cli(main))
