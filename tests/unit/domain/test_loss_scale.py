"""The loss scale of float16: halved by an overflow, doubled after a thousand steps without one."""

from hypothesis import given
from hypothesis import strategies as st

from rollgrad.domain.control.loss_scale import FIRST, SMALLEST, WINDOW, LossScale


def followed(scale: LossScale, *overflows: bool) -> LossScale:
    for overflow in overflows:
        scale = scale.followed_by(overflow=overflow)
    return scale


def test_it_starts_at_two_to_the_sixteenth_and_halves() -> None:
    assert LossScale().factor == FIRST == 65536
    assert followed(LossScale(), True, True).factor == 16384
    assert followed(LossScale(), *[True] * 40).factor == SMALLEST == 1


def test_a_whole_window_without_an_overflow_doubles_it() -> None:
    begun = followed(LossScale(), True)
    almost = followed(begun, *[False] * (WINDOW - 1))
    assert almost.factor == begun.factor
    assert followed(almost, False) == LossScale(factor=2 * begun.factor)
    assert followed(almost, True, *[False] * (WINDOW - 1)).factor == begun.factor / 2  # it counts from the overflow


@given(st.lists(st.integers(0, 2 * WINDOW), max_size=30))
def test_it_is_a_power_of_two_and_never_below_the_smallest(good_steps: list[int]) -> None:
    """Powers of two scale without rounding."""
    scale = LossScale()
    for count in good_steps:
        scale = followed(scale, *[False] * count, True)
        assert scale.factor >= SMALLEST
        assert scale.factor.hex().startswith("0x1.0000000000000p")
