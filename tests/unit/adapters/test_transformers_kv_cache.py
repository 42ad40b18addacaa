"""The cache keeps what it holds while sequences come, grow and go."""

import pytest
import torch
from torch import Tensor

from rollgrad.adapters.engines.embedded.kv_cache import BLOCK, KVCache, Place, table
from rollgrad.domain.errors import EngineError

WIDTHS = ((3, 4, 4), (2, 6, 5))
"""Heads, widths of keys and of values of two attentions."""

CAPACITY = 6


def pair(kv: KVCache, index: int) -> tuple[Tensor, Tensor]:
    """The keys and values of an attention, asked for with those of one token."""
    heads, wide, narrow = WIDTHS[index]
    return kv.pair(index, torch.zeros(1, heads, 1, wide), torch.zeros(1, heads, 1, narrow))


def made(cache: KVCache, tokens: int) -> Place:
    """A sequence of so many tokens, whose keys and values are random."""
    place = Place()
    cache.reserve(place, tokens)
    for index in range(2):
        for part in pair(cache, index):
            for number in place.blocks:
                part[number] = torch.randn(part[number].shape)
    return place


def held(cache: KVCache, place: Place, tokens: int) -> list[Tensor]:
    return [part for pair in cache.copy_out(place, tokens).pairs for part in pair]


@pytest.fixture
def cache() -> KVCache:
    made = KVCache()
    made.capacity = CAPACITY
    return made


def test_each_attention_has_room_for_its_own_heads_and_widths(cache: KVCache) -> None:
    made(cache, 1)
    for index, (heads, wide, narrow) in enumerate(WIDTHS):
        keys, values = pair(cache, index)
        assert keys.shape == (CAPACITY, heads, BLOCK, wide)
        assert values.shape == (CAPACITY, heads, BLOCK, narrow)
    assert cache.nbytes == 4 * CAPACITY * BLOCK * sum(heads * (wide + narrow) for heads, wide, narrow in WIDTHS)


def test_a_sequence_grows_where_it_is(cache: KVCache) -> None:
    first, second = made(cache, BLOCK), made(cache, 3)
    before, address = held(cache, first, BLOCK), pair(cache, 0)[0].data_ptr()
    cache.reserve(first, BLOCK)
    assert cache.used == 2, "it has room already"
    cache.reserve(first, BLOCK + 1)
    assert first.blocks == [0, 2]
    assert second.blocks == [1]
    assert pair(cache, 0)[0].data_ptr() == address
    for old, new in zip(before, held(cache, first, BLOCK), strict=True):
        assert torch.equal(old, new)


def test_more_blocks_than_there_are_is_an_error_and_changes_nothing(cache: KVCache) -> None:
    place = made(cache, CAPACITY * BLOCK)
    with pytest.raises(EngineError, match="6 blocks is full"):
        cache.reserve(Place(), 1)
    with pytest.raises(EngineError, match="6 blocks is full"):
        cache.reserve(place, CAPACITY * BLOCK + 1)
    assert place.blocks == list(range(CAPACITY))
    assert cache.used == CAPACITY


@pytest.mark.parametrize("ended", [[0], [1], [2], [0, 1], [0, 2], [1, 2], [0, 1, 2]], ids=str)
def test_sequences_that_end_leave_no_hole(cache: KVCache, ended: list[int]) -> None:
    lengths = [2 * BLOCK, BLOCK - 5, 2 * BLOCK + 1]
    places = [made(cache, length) for length in lengths]
    before = [held(cache, place, length) for place, length in zip(places, lengths, strict=True)]
    cache.free([places[index] for index in ended])
    left = [index for index in range(3) if index not in ended]
    assert sorted(number for index in left for number in places[index].blocks) == list(range(cache.used))
    for index in left:
        for old, new in zip(before[index], held(cache, places[index], lengths[index]), strict=True):
            assert torch.equal(old, new)
    assert all(not places[index].blocks for index in ended)


def test_blocks_in_use_hold_numbers(cache: KVCache, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that nobody has written to may hold anything, and 0 * nan is no number."""
    monkeypatch.setattr(Tensor, "new_empty", lambda like, *shape: like.new_full(shape, torch.nan))
    place = Place()
    cache.reserve(place, BLOCK)
    pair(cache, 0)
    cache.reserve(place, BLOCK + 1)
    pair(cache, 1)
    for index in range(2):
        for part in pair(cache, index):
            assert not part[: cache.used].isnan().any()
            assert part[cache.used :].isnan().all()


@pytest.mark.parametrize("length", [1, 4, BLOCK, BLOCK + 3, 2 * BLOCK])
def test_what_is_copied_out_comes_back_in_another_sequence(cache: KVCache, length: int) -> None:
    made(cache, 1)
    stored = cache.copy_out(made(cache, 2 * BLOCK), length)
    assert stored.length == length
    assert stored.nbytes == 4 * length * sum(heads * (wide + narrow) for heads, wide, narrow in WIDTHS)
    other = KVCache()
    other.capacity = CAPACITY
    for index in range(2):
        pair(other, index)
    made(other, BLOCK)
    place = Place()
    other.reserve(place, 2 * BLOCK + 1)
    other.copy_in(place, stored)
    again = [part for pair in stored.pairs for part in pair]
    for mine, theirs in zip(held(other, place, length), again, strict=True):
        assert torch.equal(mine, theirs)


def test_a_table_has_the_blocks_of_each_sequence() -> None:
    assert table([Place([4]), Place([2, 0, 1])]).tolist() == [[4, 4, 4], [2, 0, 1]]


def test_release_gives_the_memory_back(cache: KVCache) -> None:
    place = made(cache, BLOCK)
    cache.release()
    assert cache.nbytes == cache.used == 0
    assert place.blocks == []
    cache.capacity = 1
    cache.reserve(place, 1)
    assert pair(cache, 0)[0].shape[0] == 1
    assert not pair(cache, 0)[0].any()
