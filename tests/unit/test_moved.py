"""Modules are found by their former names."""

import sys
from importlib import import_module

import pytest

from rollgrad.moved import MOVED, todays_name

BELOW = ("rollgrad.domain.estimators.types", "rollgrad.domain.losses.kl")


@pytest.mark.parametrize("former", [*MOVED, *BELOW])
def test_a_former_name_is_the_same_module_and_says_the_new_name(former: str) -> None:
    sys.modules.pop(former, None)
    today = todays_name(former)
    assert today is not None
    with pytest.warns(FutureWarning, match=f"{former} is now {today}"):
        assert import_module(former) is import_module(today)
    spec = import_module(today).__spec__
    assert spec is not None
    assert spec.name == today


def test_names_that_never_were_are_not_found() -> None:
    with pytest.raises(ModuleNotFoundError):
        import_module("rollgrad.domain.nothing")
