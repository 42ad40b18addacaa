"""Fixtures that all runs of the tests in this folder have in common."""

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prepared data and the reference's log-probs stay out of the user's home. What libraries keep stays there: vLLM
    would examine a model's class, and matplotlib the fonts, anew in each run, which takes seconds."""
    for name, library in (("VLLM_CACHE_ROOT", "vllm"), ("MPLCONFIGDIR", "matplotlib")):
        monkeypatch.setenv(name, str(Path.home() / ".cache" / library))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
