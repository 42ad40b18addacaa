"""The mutants fit the code as it is, so that they can be run at any time."""

import ast

import pytest

from tests.mutants.table import ROOT, Mutant, mutants

MUTANTS = mutants()


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_changes_one_place_of_the_code(mutant: Mutant) -> None:
    code = (ROOT / mutant.file).read_text()
    assert code.count(mutant.old) == 1, "move the mutant in tests/mutants/mutants.yaml to where its code is now"
    mutated = code.replace(mutant.old, mutant.new)
    assert ast.dump(ast.parse(mutated)) != ast.dump(ast.parse(code))
    assert all((ROOT / file).is_file() for file in mutant.tests)


def test_there_are_enough_and_no_two_of_a_name() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 40
