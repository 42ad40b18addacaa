"""The documents for developers name what is there."""

import re
from pathlib import Path

from rollgrad.entrypoints.config_io import setting_names

ROOT = Path(__file__).resolve().parents[2]
LAYERS = ("domain", "application", "adapters", "entrypoints")
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text()


def test_paths_in_the_documents_exist() -> None:
    text = ARCHITECTURE + (ROOT / "CONTRIBUTING.md").read_text()
    paths = set(re.findall(rf"`((?:{'|'.join(LAYERS)}|tests|docs|benchmarks)/[\w./]+)`", text))
    assert len(paths) > 40
    assert {path for path in paths if not (ROOT / path).exists()} == set()


def test_every_package_is_described() -> None:
    """A layer's own modules need no line."""
    packages = {
        f"{layer}/{folder.name}/"
        for layer in LAYERS
        for folder in (ROOT / layer).iterdir()
        if (folder / "__init__.py").exists()
    }
    assert {package for package in packages if f"`{package}`" not in ARCHITECTURE} == set()


def test_the_way_of_a_setting_leads_through_names_that_are_there() -> None:
    """Each place names what the next one is reached by: the setting's name, or the place before."""
    rows = ARCHITECTURE.partition("## From a setting to its branch")[2].partition("## Words")[0]
    ways = [row for row in rows.splitlines() if row.startswith("| `")]
    assert len(ways) >= 6
    for way in ways:
        setting, *places = (cell.strip() for cell in way.strip("|").split("|"))
        assert setting.strip("`") in list(setting_names())
        assert len(places) == 3
        for path, name in re.findall(r"`([\w/.]+)` `(\w+)`", " ".join(places)):
            source = (ROOT / path).read_text()
            assert re.search(rf"^\s*(def {name}\(|{name}\b.*=|\"{name}\":)", source, re.MULTILINE), (path, name)


def test_words_are_in_order() -> None:
    rows = ARCHITECTURE.partition("## Words")[2].splitlines()[4:]
    words = [row.split("|")[1].strip() for row in rows if row.startswith("|")]
    assert len(words) >= 40
    assert words == sorted(words, key=lambda word: word.replace("-", " "))


def test_modules_stay_short() -> None:
    """CONTRIBUTING.md: modules stay under 400 lines."""
    lengths = {path: path.read_text().count("\n") for layer in LAYERS for path in (ROOT / layer).rglob("*.py")}
    assert {str(path.relative_to(ROOT)): lines for path, lines in lengths.items() if lines > 400} == {}
