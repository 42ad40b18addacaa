"""Docstrings of modules, classes, functions and attributes are sentences with a subject."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LAYERS = (
    "domain",
    "application",
    "adapters",
    "entrypoints",
    "rollgrad/testing",
    "tests",
    "examples",
    "scripts",
    "benchmarks",
)
RIDDLES = ("What ", "Of ", "The same", "See ", "Where ", "Whose ", "Whatever ")
"""Beginnings of fragments, of references instead of sentences, and of questions that leave the subject to the
reader."""


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    """Yields each docstring with its line, those below attributes included."""
    for node in ast.walk(ast.parse(source)):
        for statement in getattr(node, "body", None) if isinstance(getattr(node, "body", None), list) else ():
            match statement:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    yield statement.lineno, text.lstrip()


@pytest.mark.parametrize("layer", LAYERS)
def test_docstrings_begin_with_their_subject(layer: str) -> None:
    paths = sorted((ROOT / layer).rglob("*.py"))
    assert paths
    riddles = [
        f"{path.relative_to(ROOT)}:{line}: {text.splitlines()[0]}"
        for path in paths
        for line, text in docstrings(path.read_text(encoding="utf-8"))
        if text.startswith(RIDDLES)
    ]
    assert riddles == [], "Begin a docstring with its subject, or with a verb (Returns, Yields, Raises):"


def test_docstrings_of_all_kinds_are_seen() -> None:
    function = '    def f(self):\n        "Where d."\n'
    source = '"""What a."""\nclass A:\n    """Of b."""\n    x: int = 1\n    """See c."""\n' + function
    assert [text for _, text in docstrings(source)] == ["What a.", "Of b.", "See c.", "Where d."]
