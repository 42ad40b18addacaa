"""`scripts/setup.sh test` goes on without packages beside the environment; what needs them then says so and fails."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.beside import beside

ROOT = Path(__file__).resolve().parents[2]
INSTALLER = """#!/bin/sh
case "$*" in
*"tests/$ABSENT.txt"*) echo "$ABSENT: not found" >&2; exit 1 ;;
*is_available*) [ "$ABSENT" != GPU ]; exit ;;
esac
while [ $# -gt 0 ]; do
    [ "$1" != --target ] || mkdir -p "$2"
    shift
done
"""
"""In the places of python and uv: makes the folders, and has not got what ABSENT names."""
BESIDE = {"trackers", "clients", "cookbook", "verifiers", "verifiers-0.3"}


def set_up(venv: Path, absent: str, what: str = "test", *more: str) -> str:
    programs = venv / "bin"
    programs.mkdir(parents=True, exist_ok=True)
    for name in ("python", "uv", "chromium", *more):  # with a browser none is installed
        (programs / name).write_text(INSTALLER)
        (programs / name).chmod(0o755)
    environment = {"PATH": f"{programs}{os.pathsep}{os.defpath}", "VENV": str(venv), "ABSENT": absent}
    command = ["sh", str(ROOT / "scripts" / "setup.sh"), what]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stderr


def test_setting_up_goes_on_without_packages_beside_the_environment(tmp_path: Path) -> None:
    (tmp_path / "cookbook" / "of an older version").mkdir(parents=True)
    said = set_up(tmp_path, "cookbook")
    assert "cookbook: not found" in said, "the installer's own reason"
    assert said.splitlines()[-1] == (
        f"setup: tests/cookbook.txt could not be installed into {tmp_path}/cookbook; until it is, these fail: "
        "benchmarks/tinker_recipes.py"
    )
    assert {folder.name for folder in tmp_path.iterdir()} == BESIDE - {"cookbook"} | {"bin"}, "make sets up again"
    said = set_up(tmp_path, "verifiers")
    assert said.splitlines()[-1].endswith(": benchmarks/agents_learn.py tests/integration/test_verifiers_agent.py")
    assert set_up(tmp_path, "nothing") == ""
    assert {folder.name for folder in tmp_path.iterdir()} == BESIDE | {"bin", ".test-stamp"}


def test_a_gpu_that_torch_does_not_find_is_told(tmp_path: Path) -> None:
    assert set_up(tmp_path, "GPU", "demo") == "", "there is none"
    assert set_up(tmp_path, "nothing", "demo", "nvidia-smi") == ""
    said = set_up(tmp_path, "GPU", "demo")
    assert said.startswith("setup: nvidia-smi shows a GPU, but torch")
    assert "'rollgrad doctor' says which" in said


def test_what_needs_packages_that_are_not_there_fails_by_saying_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    name = "clients"
    with pytest.raises(
        FileNotFoundError, match=r"clients is not there: run scripts/setup.sh test, .* tests/clients.txt"
    ):
        beside(name)
    (tmp_path / name).mkdir()
    assert beside(name) == tmp_path / name
