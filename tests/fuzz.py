"""Bad inputs for every boundary, and what must become of each: one of rollgrad's sentences, in time.

`cases(kind, count, seed, folder)` makes them; `fuzz_cases.outcome` runs one. Used by `tests/integration/test_fuzz.py`
(a few of each) and `scripts/fuzz.py` (all of them).
"""

import asyncio
import contextlib
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import torch
import yaml

from rollgrad.adapters.checkpoints.states import read_state, save_state
from rollgrad.adapters.data.datasets.loading import load_dataset
from rollgrad.adapters.rewards.answers import RewardParser
from rollgrad.adapters.rewards.function import FunctionReward
from rollgrad.adapters.rewards.http import HttpReward
from rollgrad.application.foreign import shown
from rollgrad.application.settings.rules import validate
from rollgrad.domain.episodes.generation import StopReason
from rollgrad.domain.episodes.prompts import Prompt
from rollgrad.domain.episodes.rewards import RewardRequest
from rollgrad.domain.ports.checkpoint_store import TrainingState
from rollgrad.entrypoints.config_io import dump_config, load_config, setting_names, structure_config
from rollgrad.testing.chat_codec import EOS, FakeChatCodec
from tests.fakes.reward_server import RewardServer
from tests.fakes.scripted_engine import ScriptedEngine, serving
from tests.fuzz_cases import SECONDS, Case, flipped
from tests.fuzz_commands import checkpoints, commands

VALUES: list[Any] = [
    float("nan"), float("inf"), -1, 0, 10**20, -(10**400), 1e308, "", " ", "\0", "\ud800", "x" * 10_000, None, True,
    [], [None], {}, {"a": {"b": []}}, [[[[]]]], "1e999", "null", "../../..", "\u2028", b"\xff".decode("latin-1"),
]  # fmt: skip
"""Values of settings and of JSON."""


def settings(draw: random.Random, folder: Path) -> Case:
    """A setting of another kind or size."""
    names = list(setting_names())
    chosen = {draw.choice(names): draw.choice(VALUES) for _ in range(draw.choice([1, 1, 2]))}
    tree: dict[str, Any] = {}
    for name, value in chosen.items():
        *sections, key = name.split(".")
        branch = tree
        for section in sections:
            branch = branch.setdefault(section, {})
        branch[key] = value
    wrong = any(isinstance(value, dict) and value.get("a") for value in chosen.values())
    return Case(f"settings {shown(chosen)}", lambda: validate(structure_config(tree)), refused=wrong)


def yaml_text(draw: random.Random, folder: Path) -> Case:
    """A damaged configuration file."""
    whole = dump_config(structure_config(None)).encode()
    kinds: list[Callable[[], bytes]] = [
        lambda: flipped(draw, whole),
        lambda: whole + b"train:\n  seed: 1\n",
        lambda: b"train: " + draw.choice([b"[", b"{a: ", b"- "]) * draw.choice([10, 5000]),
        lambda: b"train:\n  seed: " + b"9" * draw.choice([5001, 10**5]),
        lambda: yaml.safe_dump({"train": {"seed": draw.choice(VALUES[5:])}}, allow_unicode=False).encode(),
        lambda: draw.choice(
            [b"&a [*a]", b"a: &a {b: *a}", b"!!python/object:os.system {}", b"\xff\xfe", b"\0", b"? []"]
        ),
        lambda: draw.randbytes(draw.choice([1, 50, 1000])),
    ]
    number = draw.randrange(len(kinds))
    content = kinds[number]()
    file = folder / "run.yaml"

    def run() -> None:
        file.write_bytes(content)
        load_config(file)

    return Case(f"yaml {number} {content[:100]!r}", run, refused=number in (1, 2, 3))


ROWS = [{"prompt": f"question {n}", "answer": str(n)} for n in range(5)]


def data(draw: random.Random, folder: Path) -> Case:
    """A damaged or strange dataset file, or the name of none."""
    if draw.random() < 0.2:
        name = draw.choice(["x" * 300, "a\0b", "\u2028", ".", "..", ":", "@", "a:b:c@d", "/dev/null", ","])
        return Case(f"dataset {name[:50]!r}", lambda: _load(name), refused=True)
    suffix = draw.choice([".jsonl", ".json", ".csv", ".parquet", ".arrow"])
    lines = [json.dumps(row) for row in ROWS]
    place = draw.randrange(len(lines))
    kinds: list[tuple[bytes, bool]] = [
        (flipped(draw, "\n".join(lines).encode()), False),
        ("\n".join([*lines[:place], draw.choice(["null", "3", '"x"', "[", "{"]), *lines[place:]]).encode(), False),
        (json.dumps(draw.choice(VALUES)).encode(), False),
        ("ä".encode("latin-1") * 3, False),
        (draw.randbytes(200), False),
        (b"", True),
    ]
    content, refused = draw.choice(kinds)
    file = folder / f"data{draw.randrange(10**9)}{suffix}"

    def run() -> None:
        file.write_bytes(content)
        try:
            _load(str(file))
        finally:
            file.unlink()

    return Case(f"dataset {suffix} {content[:80]!r}", run, refused=refused)


def _load(name: str) -> None:
    rows = load_dataset(name, split="train", probs=None, seed=0, max_samples=None)
    for row in rows:
        assert isinstance(row, dict)


class Odd:
    """A value whose every method raises."""

    def __repr__(self) -> str:
        raise SystemExit(1)

    __str__ = __float__ = __iter__ = __len__ = __repr__  # type: ignore[assignment]


def strange(draw: random.Random, depth: int = 0) -> Any:
    """A value that a reward function or server may answer with."""
    kind = draw.randrange(5) if depth < 4 else 0
    if kind == 1:
        return [strange(draw, depth + 1) for _ in range(draw.randrange(4))]
    if kind >= 2:
        names = ["rewards", "scores", "extra_logs", "score", "a", ""]
        return {draw.choice(names): strange(draw, depth + 1) for _ in range(draw.randrange(1, 4))}
    return draw.choice([*VALUES, 1.0, [1.0], 10**6000])


REQUEST = RewardRequest(prompt=Prompt(token_ids=(1,), text="go"), response="x", stop_reason=StopReason.STOP)


def answers(draw: random.Random, folder: Path) -> Case:
    """Draws an answer of a reward server or function."""
    value = Odd() if draw.random() < 0.05 else strange(draw)
    return Case("answer", lambda: RewardParser("The server").parse(value, draw.choice([1, 2])))


def functions(draw: random.Random, folder: Path) -> Case:
    """Draws the work of a reward function."""
    error = draw.choice([SystemExit(0), StopIteration(), MemoryError(), RecursionError(), BaseException("x"),
                         asyncio.CancelledError(), ExceptionGroup("g", [ValueError()]), GeneratorExit()])  # fmt: skip
    value, raises = strange(draw), draw.random() < 0.5

    def reward_func(queries: Any, prompts: Any, labels: Any) -> Any:
        if raises:
            raise error
        return value

    source = FunctionReward(reward_func, timeout=SECONDS)
    name = f"function {type(error).__name__}" if raises else "function"
    return Case(name, lambda: asyncio.run(source.score([REQUEST])), refused=raises)


def http_answers(draw: random.Random, folder: Path) -> Case:
    """Draws a reward server's answer, down to its bytes."""
    text = json.dumps({"rewards": [1.0], "scores": [1.0], "extra_logs": {"a": [1]}})
    kinds = [
        lambda: flipped(draw, text.encode()).decode("latin-1"),
        lambda: "[" * draw.choice([10, 200_000]),
        lambda: '{"rewards": [' + "9" * draw.choice([400, 5000]) + "]}",
        lambda: draw.choice(["", "null", "NaN", "<html>", '{"rewards": null}', "\ufeff{}", '"x"', "{}"]),
    ]
    number = draw.randrange(len(kinds))
    said, status = kinds[number](), draw.choice([200, 200, 200, 204, 301, 400, 404])
    if status == 204:
        said = ""

    async def score(url: str) -> None:
        source = HttpReward([url], timeout=SECONDS / 2)
        try:
            await source.score([REQUEST])
        finally:
            await source.aclose()

    def run() -> None:
        server = RewardServer(lambda body: (status, said))
        try:
            asyncio.run(score(server.url))
        finally:
            server.close()

    return Case(f"http {status} {said[:80]!r}", run, refused=number > 0 or status != 200)


def requests(draw: random.Random, folder: Path) -> Case:
    """Draws a client's request to the agent server; every answer is a status that blames the client, or 200."""
    whole = json.dumps({"messages": [{"role": "user", "content": "go"}], "max_tokens": 3}).encode()
    bodies = []
    for _ in range(20):
        key = draw.choice(["messages", "max_tokens", "tools", "stop", "stream", "temperature", "n", "top_p", "seed"])
        changed = json.dumps({**json.loads(whole), key: strange_json(draw)}).encode()
        bodies.append(draw.choice([flipped(draw, whole), changed, b"[" * 100_000, b'{"a":' * 5000, whole[:20]]))
    path = draw.choice(["/v1/chat/completions", "/v1/messages", "/v1/messages/count_tokens", "/s/x/v1/messages"])

    async def ask() -> None:
        codec = FakeChatCodec()
        async with (
            serving(ScriptedEngine(codec, EOS, lambda prompt: "yes"), codec, stateless=True) as served,
            httpx2.AsyncClient(base_url=served.url, timeout=SECONDS) as http,
        ):
            for body in bodies:
                answer = await http.post(path, content=body)
                assert answer.status_code in (200, 400, 410, 413), f"{answer.status_code} to {body[:200]!r}"
                assert "Traceback" not in answer.text

    return Case(f"requests {path}", lambda: asyncio.run(ask()))


def strange_json(draw: random.Random) -> Any:
    """`strange` without what JSON has not."""
    while True:
        value = strange(draw)
        with contextlib.suppress(ValueError, TypeError):
            json.dumps(value)
            return value


def states(draw: random.Random, folder: Path) -> Case:
    """A training state with damaged bytes in one of its files."""
    saved = TrainingState(
        step=3,
        state={"run": {"step": 3}, "update": {"w": torch.arange(50.0)}, "before": {"metrics": [1.0, 2.0]}},
        description={"settings": {"train.seed": 1}},
    )
    path = folder / "training_state_3"
    if not path.is_dir():
        save_state(folder, saved, keep=1)
    file = draw.choice(sorted(each for each in path.iterdir() if each.is_file()))
    whole = file.read_bytes()
    damaged = flipped(draw, whole)

    def run() -> None:
        file.write_bytes(damaged)
        try:
            read_state(path)
        finally:
            file.write_bytes(whole)

    return Case(f"state {file.name}", run, refused=file.name != "manifest.json")


KINDS: dict[str, tuple[Callable[[random.Random, Path], Case], int]] = {
    "settings": (settings, 900),
    "yaml": (yaml_text, 300),
    "data": (data, 200),
    "answers": (answers, 400),
    "functions": (functions, 200),
    "http": (http_answers, 60),
    "requests": (requests, 20),
    "states": (states, 200),
    "commands": (commands, 300),
    "checkpoints": (checkpoints, 300),
}
"""Strategy of the cases of each kind, and how many there are in the full form (each of `requests` is twenty)."""


def cases(kind: str, count: int, seed: int, folder: Path) -> Iterator[Case]:
    """Yields `count` cases, the same for the same seed."""
    draw = random.Random(f"{kind} {seed}")
    for _ in range(count):
        yield KINDS[kind][0](draw, folder)
