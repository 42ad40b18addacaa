"""Slices of splits, against those of `datasets`, whose notation it is."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollgrad.domain.errors import DataError
from rollgrad.domain.splits import SPLIT, parse_split


@given(
    count=st.integers(1, 400),
    bounds=st.tuples(st.integers(-100, 100), st.integers(-100, 100)),
    unit=st.sampled_from(["%", ""]),
    left_out=st.sampled_from([(), (0,), (1,), (0, 1)]),
)
def test_a_slice_has_the_rows_that_it_has_in_datasets(
    count: int, bounds: tuple[int, int], unit: str, left_out: tuple[int, ...]
) -> None:
    """Which refuses numbers of rows that there are not; here they are bounded, as in Python."""
    import datasets

    held = tuple(max(-count, min(count, bound)) if unit == "" else bound for bound in bounds)
    first, last = ("" if place in left_out else f"{bound}{unit}" for place, bound in enumerate(held))
    spec = f"train[{first}:{last}]"
    (theirs,) = datasets.ReadInstruction.from_spec(spec).to_absolute({"train": count})
    wanted = range(count)[theirs.from_ : theirs.to]
    split = parse_split(spec)
    assert (split.name, split.sliced) == ("train", True)
    if wanted:
        assert split.rows(count, "rows.jsonl", "--data.split") == wanted
    else:
        with pytest.raises(DataError, match=rf"has none of the {count} rows of rows.jsonl: change --data.split"):
            split.rows(count, "rows.jsonl", "--data.split")


@given(count=st.integers(1, 1000), share=st.integers(1, 99))
def test_what_is_trained_on_and_what_is_held_out_are_all_rows_once(count: int, share: int) -> None:
    parts = []
    for spec in (f"train[:{share}%]", f"train[{share}%:]"):
        try:
            parts += [*parse_split(spec).rows(count, "a", "--data.split")]
        except DataError:  # none
            continue
    assert parts == [*range(count)]


@pytest.mark.parametrize("split", ["", "train[", "[:2]", "train[1]", "train[:2]+test", "train[:x]", "train[1.5%:]"])
def test_what_is_no_split_is_no_value(split: str) -> None:
    assert not SPLIT.holds(split)
    with pytest.raises(ValueError, match="it must be a name, or one with a slice"):
        parse_split(split)


def test_a_name_alone_is_the_whole_split() -> None:
    split = parse_split("validation_matched")
    assert (split.name, split.sliced) == ("validation_matched", False)
