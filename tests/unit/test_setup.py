"""`scripts/setup.sh test` goes on without packages beside the environment; what needs them then says so and fails."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.beside import beside

ROOT = Path(__file__).resolve().parents[2]
INSTALLER = """#!/bin/sh
case "$0 $*" in
*"/uv cache dir") [ "$ABSENT" = /dev/null ] && echo /dev/null/uv || echo "$VENV/bin"; exit ;;
*"/uv pip install"*) [ "$ABSENT" != /dev/null -o "$UV_NO_CACHE" = 1 ] || exit 1 ;;
esac
case "$*" in
*"torch=="*+cpu*|*"torch=="*--index-url*) [ "$ABSENT" != "the CPU build" ]; exit ;;
*"tests/$ABSENT.txt"*) echo "$ABSENT: not found" >&2; exit 1 ;;
*is_available*) [ "$ABSENT" != GPU ]; exit ;;
esac
while [ $# -gt 0 ]; do
    [ "$1" != --target ] || mkdir -p "$2"
    shift
done
"""
"""In the places of python and uv: makes the folders, and has not got what ABSENT names: /dev/null is where a
cache cannot be."""
BESIDE = {"trackers", "clients", "cookbook", "verifiers", "verifiers-0.3"}


def run_set_up(venv: Path, absent: str, what: str = "test", *more: str) -> tuple[str, str]:
    """Returns stdout and stderr of the script."""
    programs = venv / "bin"
    programs.mkdir(parents=True, exist_ok=True)
    for name in ("python", "uv", "chromium", *more):  # with a browser none is installed
        (programs / name).write_text(INSTALLER)
        (programs / name).chmod(0o755)
    environment = {"PATH": f"{programs}{os.pathsep}{os.defpath}", "VENV": str(venv), "ABSENT": absent}
    command = ["sh", str(ROOT / "scripts" / "setup.sh"), what]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return ran.stdout, ran.stderr


def set_up(venv: Path, absent: str, what: str = "test", *more: str) -> str:
    return run_set_up(venv, absent, what, *more)[1]


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


def test_without_a_place_for_its_cache_uv_installs_all_the_same(tmp_path: Path) -> None:
    said, _ = run_set_up(tmp_path, "/dev/null", "demo")
    assert (tmp_path / ".demo-stamp").exists()
    assert "by pip" not in said


def test_behind_a_mirror_of_pypi_alone_the_demo_takes_the_cuda_build(tmp_path: Path) -> None:
    said, _ = run_set_up(tmp_path, "the CPU build", "demo")
    assert (tmp_path / ".demo-stamp").exists()
    assert "by pip, which takes longer" in said
    assert "the CPU build cannot be had, so the CUDA build" in said
    assert "CUDA" not in run_set_up(tmp_path, "nothing", "demo")[0]


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
