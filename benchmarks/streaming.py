"""Time to the first token of streamed replies, and the cost of streaming, of the engines of `rollgrad serve agent`.

    python benchmarks/streaming.py --model .models/SmolLM2-135M-Instruct --engine vllm cluster

For each engine a server is started in a process of its own, and asked for replies of `--tokens` tokens, `--at_once` of
them together and one alone: whole, then streamed. Printed are the seconds to a reply's first token (median) and until
all are whole, and what streaming adds to these, in microseconds a token. `--smoke` is the least work, on a
tiny random model.
"""

import asyncio
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import httpx2
import tyro
from attrs import frozen

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.served import served
from benchmarks.smoke import smoke_model
from rollgrad.adapters.system.server_sent_events import ServerSentEvents

ENGINES: dict[str, Sequence[str]] = {
    "embedded": (),
    "vllm": ("--engine", "vllm"),
    "cluster": ("--engine", "vllm", "--num_engines", "1"),
}


@frozen
class Measured:
    """Seconds from a request to its first piece, median over replies, and until the last reply is whole."""

    first: float
    whole: float


async def reply(http: httpx2.AsyncClient, tokens: int, seed: int, stream: bool) -> float:
    body = {"prompt": f"{seed} is a number, and", "max_tokens": tokens, "seed": seed, "stream": stream}
    asked = time.perf_counter()
    first, events = None, ServerSentEvents()
    async with http.stream("POST", "/v1/completions", json=body) as answer:
        async for part in answer.aiter_bytes():
            assert answer.status_code == 200, part
            told = (data for data in events.feed(part) if data != "[DONE]")
            if first is None and (not stream or any("error" not in json.loads(data) for data in told)):
                first = time.perf_counter() - asked
    assert first is not None
    return first


async def measure(url: str, tokens: int, at_once: int, stream: bool) -> Measured:
    async with httpx2.AsyncClient(base_url=url, timeout=None, limits=httpx2.Limits(max_connections=None)) as http:
        begun = time.perf_counter()
        firsts = await asyncio.gather(*(reply(http, tokens, seed, stream) for seed in range(at_once)))
        return Measured(statistics.median(firsts), time.perf_counter() - begun)


def main(
    model: str = ".models/SmolLM2-135M-Instruct",
    engine: tuple[str, ...] = ("embedded", "vllm", "cluster"),
    tokens: int = 100,
    at_once: int = 32,
    smoke: bool = False,
) -> None:
    if smoke:
        with smoke_model() as tiny:
            compare(str(tiny), ("embedded",), 4, 2)
    else:
        compare(model, engine, tokens, at_once)


def compare(model: str, engines: Sequence[str], tokens: int, at_once: int) -> None:
    for name in engines:
        with served(["agent", "--model", model, "--max_new_tokens", str(tokens), *ENGINES[name]]) as url:
            for count in (1, at_once):
                found: dict[bool, Measured] = {}
                for stream in (False, True, False, True):  # the first of each warms up
                    found[stream] = asyncio.run(measure(url, tokens, count, stream))
                streamed, whole = found[True], found[False]
                added = (streamed.whole - whole.whole) / (tokens * count) * 1e6
                print(
                    f"{name}, {count} at once: first token {streamed.first:.3f} s; whole {streamed.whole:.2f} s, "
                    f"in one piece {whole.whole:.2f} s: {added:+.0f} us a token"
                )


if __name__ == "__main__":
    tyro.cli(main)
