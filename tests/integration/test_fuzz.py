"""A few bad inputs of every kind; `scripts/fuzz.py` has them all."""

from pathlib import Path

import pytest

from tests.fuzz import KINDS, cases
from tests.fuzz_cases import outcome

SHARE = 20
"""One in so many of the cases of the full form is played here."""


@pytest.mark.parametrize("kind", KINDS)
def test_bad_input(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    monkeypatch.chdir(empty)  # "." is a dataset's name, and all files below it are read
    count = max(2, KINDS[kind][1] // SHARE)
    assert [wrong for case in cases(kind, count, 1, tmp_path) if (wrong := outcome(case))] == []
