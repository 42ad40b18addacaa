"""Metrics that are read while a run writes them."""

import json
import random
from pathlib import Path

from rollgrad.adapters.tracking.metrics_file import MetricsReader, read_logged


def line(step: int, **values: float) -> bytes:
    return json.dumps({"step": step, **values}).encode() + b"\n"


def test_a_file_that_grows_is_read_as_a_whole_one(tmp_path: Path) -> None:
    chance = random.Random(0)
    path = tmp_path / "metrics.jsonl"
    lines = [line(step, a=step, **({"b": -step} if step % 3 else {})) for step in [*range(1, 40), 39, 38]]
    content = b"".join((*lines[:20], b"broken\n", b'{"step": 50, "a": NaN}\n', *lines[20:]))
    reader = MetricsReader(path)
    place = 0
    while place < len(content):
        place = min(len(content), place + chance.randint(1, 60))
        path.write_bytes(content[:place])
        assert reader.read() == read_logged(path)
    assert reader.read().broken == (21,)
    assert reader.read().last_step == 50


def test_what_was_read_is_not_read_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"".join(line(step, a=1.0) for step in range(1000)))
    reader = MetricsReader(path)
    before = reader.read()
    known = path.read_bytes()
    path.write_bytes(b"\n" * 5000 + known[5000:] + line(1000, a=2.0))  # its end is the same
    assert reader.read().series["a"] == before.series["a"] | {1000: 2.0}


def test_a_file_that_was_set_back_is_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"".join(line(step, a=1.0) for step in range(1, 10)))
    reader = MetricsReader(path)
    reader.read()
    path.write_bytes(line(1, a=1.0) + line(2, a=3.0))
    assert reader.read().series == {"a": {1: 1.0, 2: 3.0}}
    path.write_bytes(b"".join(line(step, a=4.0) for step in range(1, 30)))
    assert set(reader.read().series["a"].values()) == {4.0}
