"""Results that the scripts under benchmarks/ keep."""

import json
import os
from pathlib import Path

import torch

from benchmarks.results import keep


def test_a_result_says_on_what_machine_it_was_measured(tmp_path: Path) -> None:
    measured = json.loads(keep("work", {"ratio": 2.0}, tmp_path / "results").read_text())
    assert measured["ratio"] == 2.0
    machine = measured["machine"]
    assert machine["processor"]
    assert machine["cores"] == os.cpu_count()
    assert machine["memory_gib"] >= 1
    assert torch.__version__.startswith(machine["versions"]["torch"])  # which may leave out the build: +cu130
