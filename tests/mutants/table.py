"""The mutants, as mutants.yaml lists them."""

from pathlib import Path

import yaml
from attrs import frozen

ROOT = Path(__file__).parents[2]


@frozen(kw_only=True)
class Mutant:
    name: str
    file: str
    old: str
    new: str
    tests: list[str]


def mutants() -> list[Mutant]:
    return [Mutant(**row) for row in yaml.safe_load(Path(__file__).with_name("mutants.yaml").read_text())]
