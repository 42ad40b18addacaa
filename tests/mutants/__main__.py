"""Applies each mutant of mutants.yaml to a copy of the tree, and says whether the tests that should find it do.

    python -m tests.mutants                 # all, some minutes
    python -m tests.mutants --only 3 7      # the third and the seventh
    python -m tests.mutants --write         # and keeps the result in results.yaml, beside that before the tests grew

Exit code 1 if a mutant stays alive, or if the tests fail without one.
"""

import argparse
import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

import hypothesis  # noqa: F401
import pytest
import torch  # noqa: F401
import transformers  # noqa: F401
import yaml

from tests.mutants.table import ROOT, Mutant, mutants

RESULTS = Path(__file__).with_name("results.yaml")
SECONDS = 600
LEFT_OUT = shutil.ignore_patterns(".git", ".venv", ".models", ".*_cache", "__pycache__", "shared")


def copied_tree(directory: Path) -> Path:
    tree = directory / "tree"
    shutil.copytree(ROOT, tree, symlinks=True, ignore=LEFT_OUT)
    for name in (".venv", ".models"):
        if (ROOT / name).exists():
            (tree / name).symlink_to((ROOT / name).resolve())
    return tree


def failure(tree: Path, tests: list[str]) -> str | None:
    """The first test that fails, or why there is no telling; None if all pass. They run in a fork of this
    process, which has imported libraries, and nothing of the tree."""
    with tempfile.NamedTemporaryFile("w+") as output:
        child = os.fork()
        if child == 0:
            status = 1
            try:
                status = run_tests(tree, tests, output.fileno())
            finally:
                os._exit(status)
        deadline = time.monotonic() + SECONDS
        while not (ended := os.waitpid(child, os.WNOHANG))[0]:
            if time.monotonic() > deadline:
                os.killpg(child, signal.SIGKILL)
                os.waitpid(child, 0)
                return "hangs"
            time.sleep(0.1)
        status = os.waitstatus_to_exitcode(ended[1])
        text = Path(output.name).read_text()
    if status == 0:
        return None
    if status != 1 and "Timeout" not in text:  # nothing was tested
        raise SystemExit(f"pytest ended with {status}:\n{text}")
    names = [line.split(" - ")[0].split(" ", 1)[1] for line in text.splitlines() if line.startswith("FAILED ")]
    return names[0] if names else "hangs"


def run_tests(tree: Path, tests: list[str], output: int) -> int:
    os.setpgid(0, 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(tree)
    os.environ["PYTHONPATH"] = str(tree)
    sys.path[:] = [str(tree), *(path for path in sys.path if path and Path(path).resolve() != ROOT)]
    for name in [name for name in sys.modules if name.split(".")[0] in ("rollgrad", "tests")]:
        del sys.modules[name]
    return int(pytest.main(["-q", "-x", "--no-header", "--timeout=120", "-p", "no:cacheprovider", *tests]))


def judge(tree: Path, mutant: Mutant) -> str | None:
    file = tree / mutant.file
    whole = file.read_text()
    file.write_text(whole.replace(mutant.old, mutant.new))
    try:
        return failure(tree, mutant.tests)
    finally:
        file.write_text(whole)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=int, nargs="+", help="numbers of mutants, from 1")
    parser.add_argument("--write", action="store_true", help="keep the result as `after` in results.yaml")
    arguments = parser.parse_args()
    chosen = list(enumerate(mutants(), start=1))
    if arguments.only:
        chosen = [(number, mutant) for number, mutant in chosen if number in arguments.only]
    results: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="mutants-") as directory:
        tree = copied_tree(Path(directory))
        unwell = failure(tree, sorted({test for _, mutant in chosen for test in mutant.tests}))
        if unwell is not None:
            raise SystemExit(f"The tests fail without a mutant: {unwell}.")
        for number, mutant in chosen:
            killer = judge(tree, mutant)
            results[mutant.name] = "ALIVE" if killer is None else f"killed by {killer}"
            print(f"{number:3} {mutant.name}: {results[mutant.name]}", flush=True)
    alive = list(results.values()).count("ALIVE")
    print(f"{len(results) - alive} of {len(results)} killed")
    if arguments.write:
        old = RESULTS.read_text()
        kept = yaml.safe_load(old)
        for name, found in results.items():
            kept.setdefault(name, {})["after"] = found
        comment, _, _ = old.partition("\n")
        RESULTS.write_text(f"{comment}\n{yaml.safe_dump(kept, sort_keys=False, width=200)}")
    sys.exit(1 if alive else 0)


if __name__ == "__main__":
    main()
