"""Fixtures that all runs of the tests in this folder have in common."""

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prepared data and the reference's log-probs stay out of the user's home."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
