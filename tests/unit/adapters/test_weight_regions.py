import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from rollgrad.adapters.weights.regions import Region, elements_within, parts_within

VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "all": lambda whole: whole,
    "half of the rows": lambda whole: whole.narrow(0, 3, 3),
    "half of each row": lambda whole: whole.narrow(1, 2, 2),
    "a column": lambda whole: whole[:, 1],
    "turned": lambda whole: whole.narrow(1, 1, 2).transpose(0, 1),
    "every other row": lambda whole: whole[::2],
    "a row over and over": lambda whole: whole[2:3].expand(3, -1, -1),
    "a block": lambda whole: whole[1:4, 1:3, 2:4],
    "reversed axes": lambda whole: whole.permute(2, 1, 0)[1:],
}


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("run", [1, 2, 7, 16, 40, 1000])
def test_a_part_that_comes_run_by_run_is_the_part(name: str, run: int) -> None:
    whole = torch.arange(6 * 4 * 5).reshape(6, 4, 5)
    wanted = VIEWS[name](whole)
    source = Region.of(VIEWS[name](torch.empty(whole.shape, device="meta")))
    arrived = torch.full((wanted.numel() + 7,), -1)
    target = Region.of(arrived[3 : 3 + wanted.numel()].view(wanted.shape))
    count = 0
    for begin in range(0, whole.numel(), run):
        bucket = torch.full((run + 11,), -2)
        piece = whole.flatten()[begin : begin + run]
        bucket[11 : 11 + len(piece)] = piece
        for part, place in parts_within(source, target, begin, begin + len(piece)):
            assert part.offset >= begin
            assert part.last() < begin + len(piece), "what the run does not have is not read"
            place.view(arrived).copy_(part.view(bucket[11:], begin))
            count += math.prod(part.shape)
    assert count == wanted.numel(), "each element came once"
    assert torch.equal(target.view(arrived), wanted)
    assert (arrived[:3] == -1).all()
    assert (arrived[3 + wanted.numel() :] == -1).all()


def test_a_run_without_anything_wanted_is_not_read() -> None:
    rows = Region(20, (2, 10), (10, 1))
    assert not list(parts_within(rows, rows, 0, 20))
    assert not list(parts_within(rows, rows, 40, 60))
    assert not list(parts_within(Region(0, (4, 2), (10, 1)), rows, 12, 18)), "between two rows' parts"


def test_what_lies_wholly_in_a_run_is_one_copy() -> None:
    rows = Region(20, (2, 10), (10, 1))
    assert list(parts_within(rows, Region(0, (2, 10), (10, 1)), 20, 40)) == [(rows, Region(0, (2, 10), (10, 1)))]


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("share", [0.0, 0.05, 0.5, 1.0])
def test_elements_that_are_set_are_set_in_the_part(name: str, share: float) -> None:
    whole = torch.arange(6 * 4 * 5).reshape(6, 4, 5)
    source = Region.of(VIEWS[name](torch.empty(whole.shape, device="meta")))
    assert source.nested() is (name != "a row over and over")
    if not source.nested():
        return
    memory = torch.full((2 * whole.numel() + 40,), -1)
    target = Region.of(memory[3 : 3 + 2 * VIEWS[name](whole).numel() : 2].view(VIEWS[name](whole).shape))
    target.view(memory).copy_(VIEWS[name](whole))
    before = memory.clone()
    positions = (torch.rand(whole.numel(), generator=torch.Generator().manual_seed(0)) < share).nonzero().squeeze(1)
    whole.view(-1)[positions] = new = -2 - positions
    found, places = elements_within(source, target, positions)
    memory[places] = new[found]
    assert torch.equal(target.view(memory), VIEWS[name](whole))
    assert (memory != before).sum() == len(found) == (VIEWS[name](whole) < -1).sum()


def test_axes_that_overlap_are_not_nested() -> None:
    assert not Region(0, (3, 4), (2, 1)).nested()
    assert not Region(0, (3, 4), (0, 1)).nested()
    assert Region(0, (1, 4), (0, 1)).nested(), "an axis of one index has no step"
    assert Region(7, (), ()).nested()
