"""Tests of `entrypoints.composition.injection`: what containers import."""

import subprocess
import sys

import pytest

IMPORTS = """
import importlib, sys
{before}
for name in {modules}:
    importlib.import_module(name)
print(sorted({{name.partition(".")[0] for name in sys.modules}}))
{after}
"""


def imported(*modules: str, before: str = "", after: str = "") -> str:
    """Returns what a process says of its modules after it has imported some."""
    script = IMPORTS.format(modules=modules, before=before, after=after)
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.slow  # several seconds: torch is imported
def test_the_composition_of_a_run_imports_no_web_framework() -> None:
    found = imported("rollgrad.entrypoints.composition.rl.container", "rollgrad.entrypoints.composition.offline.sft")
    assert "dependency_injector" in found
    for name in ("fastapi", "starlette", "uvicorn", "werkzeug", "pydantic_settings"):
        assert f"'{name}'" not in found


def test_what_was_hidden_can_be_imported_afterwards() -> None:
    imported("rollgrad.entrypoints.composition.injection", after="import starlette.requests, fastapi.params")


def test_who_imports_a_framework_first_has_its_integration() -> None:
    after = (
        "from dependency_injector import wiring\nfrom fastapi import Depends\n"
        "assert any(extract(Depends(len)) is len for extract in wiring.MARKER_EXTRACTORS)"
    )
    imported("rollgrad.entrypoints.composition.injection", before="import fastapi", after=after)
