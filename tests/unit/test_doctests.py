"""The examples in docstrings, and that each module can be imported."""

import doctest
import importlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import rollgrad
from rollgrad.adapters import tracking

PACKAGE = Path(rollgrad.__file__).parent
BESIDE = {f"{tracking.__name__}.{name}" for name in ("mlflow", "swanlab", "trackio", "wandb")}
"""Modules whose packages lie beside the environment (`scripts/setup.sh`), and cannot be imported in it."""


def modules() -> Iterator[tuple[str, Path]]:
    """Yields each module's name and file."""
    for folder, _, names in os.walk(PACKAGE, followlinks=True):
        for file in (Path(folder, name) for name in names if name.endswith(".py") and name != "__main__.py"):
            words = file.relative_to(PACKAGE.parent).with_suffix("").parts
            yield ".".join(words).removesuffix(".__init__"), file


MODULES = {name: file for name, file in sorted(modules()) if name not in BESIDE}


@pytest.mark.parametrize("name", [name for name, file in MODULES.items() if ">>> " in file.read_text()])
def test_examples_of_docstrings(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    failed, tried = doctest.testmod(importlib.import_module(name))
    assert not failed, capsys.readouterr().out
    assert tried


def test_each_module_can_be_imported() -> None:
    for name in MODULES:
        importlib.import_module(name)
