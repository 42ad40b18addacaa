"""Equality of rewards up to rounding, with numbers of which nothing is rounded."""

import pytest

from rollgrad.domain.algorithms.equality import are_apart, differ, reaches

ONE = 2.0**21
"""A number that differs by rounding, at most, from those that are 1 away."""


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("scale", [2.0**-30, 1.0, 2.0**30])
def test_differences_are_relative_to_the_largest_number(sign: int, scale: float) -> None:
    unit = sign * scale
    assert not differ([unit * ONE, unit * (ONE - 1), unit * ONE])
    assert differ([unit * ONE, unit * (ONE - 2)])
    assert differ([0.0, unit])
    assert differ([-unit * ONE, unit * ONE])


@pytest.mark.parametrize("scale", [2.0**-30, 1.0, 2.0**30])
def test_what_is_less_by_rounding_is_reached(scale: float) -> None:
    for least in (scale * ONE, -scale * ONE):
        assert [reaches(least - scale * less, least) for less in (-1, 0, 1, 2)] == [True, True, True, False]
    assert [reaches(value, 0.0) for value in (scale, 0.0, -scale)] == [True, True, False]


@pytest.mark.parametrize("scale", [2.0**-30, 1.0, 2.0**30])
def test_a_margin_is_less_than_what_two_numbers_differ_by_but_for_their_rounding(scale: float) -> None:
    for low, high in ((0.0, scale * ONE), (-scale * ONE, 0.0)):
        assert [are_apart(low, high, scale * (ONE + more)) for more in (-1, 0, 1, 2)] == [True, True, True, False]
