"""Every command and code block of the README and the docs runs, on a tiny model in the place of the real one."""

import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from rollgrad.domain.algorithms.catalogue import ESTIMATORS, POLICY_LOSSES
from rollgrad.entrypoints.cli.main import main

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: Path) -> list[tuple[str, str]]:
    return BLOCK.findall(page.read_text(encoding="utf-8"))


HELD_OUT = 8
"""Rows of each file of held-out data, on which most runs are evaluated twice."""


LONGEST_PARAGRAPH = 800
"""Characters of a paragraph or list item beyond which it has to be divided; most have less than 400."""


@pytest.fixture
def workplace(tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout's examples, with a tiny model where the demo unpacks the real one, and little held-out data."""
    for folder in ("examples", "benchmarks"):  # of which other tests may be compiling modules
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in (tmp_path / "examples" / "data").glob("*_test.jsonl"):
        file.write_text(
            "".join(file.read_text(encoding="utf-8").splitlines(keepends=True)[:HELD_OUT]), encoding="utf-8"
        )
    model = shutil.copytree(tiny_model_dir, tmp_path / ".models" / "SmolLM2-135M-Instruct")
    # The tiny tokenizer makes three times as many tokens of the same text.
    settings = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**settings, "max_position_embeddings": 4096}))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)], ids=lambda page: page.name)
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
        case ["pip", "install", "-e", target]:
            # What it would install: the repository, with extras that it has.
            extras = re.fullmatch(r"\.\[([\w,-]+)\]", target)
            known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
            assert extras is not None
            assert set(extras[1].split(",")) <= known.keys()
        case ["make", target]:
            # The targets themselves are this very suite, or run by it (test_demo.py, benchmarks).
            subprocess.run(["make", "-n", target], cwd=ROOT, check=True, capture_output=True, timeout=300)
        case _:
            pytest.fail(f"No test knows how to run {' '.join(words)!r}.")


def run_python(code: str, workplace: Path) -> None:
    """Runs a block; one that starts with a comment naming a file is written there instead."""
    named = re.match(r"# (\w+\.py)\n", code)
    if named:
        (workplace / named[1]).write_text(code, encoding="utf-8")
    exec(compile(code, "<docs>", "exec"), {"__name__": "__main__"})


def anchors(page: Path) -> set[str]:
    """The names that GitHub gives the headings of a page."""
    prose = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", prose, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_lead_somewhere() -> None:
    for page in [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md"]:
        for link, anchor in re.findall(r"\]\(([^)#\s]*)#?([^)]*)\)", page.read_text(encoding="utf-8")):
            target = page.parent / link if link else page
            assert link.startswith("http") or target.exists(), f"{page.name}: {link}"
            if anchor and target.suffix == ".md":
                assert anchor in anchors(target), f"{page.name}: {link}#{anchor}"


def paragraphs(page: Path) -> list[str]:
    """Returns the paragraphs and list items of a page, without code, tables, headings and lists of model types."""
    prose = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    items = [item for part in prose.split("\n\n") for item in re.split(r"\n(?=\s*(?:[-*]|\d+\.) )", part)]
    return [item for item in items if not item.lstrip().startswith(("|", "#", "!", "* exact"))]


def test_no_paragraph_is_a_wall() -> None:
    """A reader who looks for one thing finds it in lists, tables and short paragraphs."""
    pages = [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md"]
    found = {f"{page.name}: {text[:60]}": len(text) for page in pages for text in paragraphs(page)}
    assert len(found) > 500
    assert {begin: size for begin, size in found.items() if size > LONGEST_PARAGRAPH} == {}


def test_the_readme_names_every_page() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert [page.name for page in PAGES[1:] if f"(docs/{page.name})" not in text] == []


def test_nothing_is_installed_from_an_index_that_does_not_have_it() -> None:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        # `pip install rollgrad[EXTRA]` adds an extra to what is installed, and needs no index for rollgrad.
        assert not re.findall(r"pip install (?:-\w+ )*[\"']?rollgrad(?!\[)", text), page.name


def test_the_extras_that_are_listed_are_those_there_are() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    table = (ROOT / "docs" / "install.md").read_text(encoding="utf-8").partition("## Extras")[2]
    names = ",".join(re.findall(r"^\| (`.*?) \|", table, re.MULTILINE))
    assert set(re.findall(r"`([\w-]+)`", names)) == extras.keys()


def test_readme_and_table_count_the_algorithms_that_there_are() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    words = {12: "twelve", 13: "thirteen", 14: "fourteen", 15: "fifteen", 16: "sixteen", 17: "seventeen"}
    words |= {18: "eighteen", 19: "nineteen", 20: "twenty", 21: "twenty-one", 22: "twenty-two"}
    estimators, losses = len(ESTIMATORS), len(POLICY_LOSSES)
    assert f"{words[estimators].capitalize()} estimators, {words[losses]} policy losses" in text
    table = (ROOT / "docs" / "support.md").read_text(encoding="utf-8")
    assert f"| {estimators} estimators (" in table
    assert f"| {losses} policy losses (" in table


def test_the_readme_begins_with_its_reader_then_python_then_the_picture() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert re.search(r"\b(you|your)\b", text.split("\n\n")[1].split(".")[0], re.IGNORECASE)
    before_picture = text.partition("![")[0]
    lines = [line for line in before_picture.partition("```python\n")[2].partition("```")[0].splitlines() if line]
    assert 5 <= len(lines) <= 10


@pytest.mark.slow
def test_the_repository_installs_by_its_path(tmp_path: Path) -> None:
    """The layers are links in the package, which an installation holds as files."""
    source = tmp_path / "source"
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        source.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, source / name)
    for name in ("rollgrad", "domain", "application", "adapters", "entrypoints"):
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(tmp_path)]
    subprocess.run([*command, str(source)], check=True, capture_output=True, timeout=300)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    packed = {name for name in names if name.endswith(".py")}
    layers = ("domain", "application", "adapters", "entrypoints")
    there = {f"rollgrad/{path.relative_to(source)}" for layer in layers for path in (source / layer).rglob("*.py")}
    own = (*(source / "rollgrad").glob("*.py"), *(source / "rollgrad" / "testing").glob("*.py"))
    assert packed == there | {str(path.relative_to(source)) for path in own}
    page = source / "entrypoints" / "ui" / "static"
    assert {f"rollgrad/{path.relative_to(source)}" for path in page.rglob("*") if path.is_file()} <= names
