"""Every command and code block of the README and the docs runs, on a tiny model in the place of the real one."""

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from rollgrad.entrypoints.cli import main

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: Path) -> list[tuple[str, str]]:
    return BLOCK.findall(page.read_text(encoding="utf-8"))


@pytest.fixture
def workplace(tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout's examples, with a tiny model where the demo unpacks the real one."""
    for folder in ("examples", "benchmarks"):  # of which other tests may be compiling modules
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    model = shutil.copytree(tiny_model_dir, tmp_path / ".models" / "SmolLM2-135M-Instruct")
    # The tiny tokenizer makes three times as many tokens of the same text.
    settings = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**settings, "max_position_embeddings": 4096}))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_blocks_run(page: Path, workplace: Path, algorithms_as_before: None) -> None:
    for language, code in blocks(page):
        match language:
            case "bash":
                for line in code.replace("\\\n", " ").splitlines():
                    run_command(shlex.split(line, comments=True))
            case "python":
                run_python(code, workplace)
            case "text" | "yaml":
                pass
            case _:
                pytest.fail(f"{page.name} has a {language} block, which no test runs.")


def run_command(words: list[str]) -> None:
    match words:
        case []:
            pass
        case ["rollgrad", *arguments]:
            assert main(arguments) == 0, " ".join(words)
        case ["make", target]:
            # The targets themselves are this very suite, or run by it (test_demo.py, benchmarks).
            subprocess.run(["make", "-n", target], cwd=ROOT, check=True, capture_output=True, timeout=60)
        case _:
            pytest.fail(f"No test knows how to run {' '.join(words)!r}.")


def run_python(code: str, workplace: Path) -> None:
    """Runs a block; one that starts with a comment naming a file is written there instead."""
    named = re.match(r"# (\w+\.py)\n", code)
    if named:
        (workplace / named[1]).write_text(code, encoding="utf-8")
    exec(compile(code, "<docs>", "exec"), {"__name__": "__main__"})


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text(encoding="utf-8")):
            assert target.startswith("http") or (page.parent / target).exists(), f"{page.name}: {target}"
