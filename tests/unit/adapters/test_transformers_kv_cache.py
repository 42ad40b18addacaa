"""The cache keeps what it holds while it grows and moves."""

import pytest
import torch
from torch import Tensor

from rollgrad.adapters.engines.embedded.kv_cache import LENGTH_STEP, KVCache

WIDTHS = ((3, 4, 4), (2, 6, 5))
"""Heads, widths of keys and of values of two attentions."""


def seen(index: int) -> tuple[Tensor, Tensor]:
    """Arguments of the attention's call: keys and values of one token."""
    heads, wide, narrow = WIDTHS[index]
    return torch.zeros(1, heads, 1, wide), torch.zeros(1, heads, 1, narrow)


def pair(kv: KVCache, index: int) -> tuple[Tensor, Tensor]:
    return kv.pair(index, *seen(index))


@pytest.fixture
def kv() -> KVCache:
    cache = KVCache()
    cache.reserve(2, 5)
    for index in range(2):
        for part in pair(cache, index):
            part[:, :, :5] = torch.randn(part[:, :, :5].shape)
    return cache


def test_each_attention_has_room_for_its_own_heads_and_widths(kv: KVCache) -> None:
    for index, (heads, wide, narrow) in enumerate(WIDTHS):
        keys, values = pair(kv, index)
        assert keys.shape == (2, heads, LENGTH_STEP, wide)
        assert values.shape == (2, heads, LENGTH_STEP, narrow)


def test_growing_keeps_what_is_stored(kv: KVCache) -> None:
    before = [part[:, :, :5].clone() for index in range(2) for part in pair(kv, index)]
    kv.reserve(4, LENGTH_STEP + 1)
    after = [part for index in range(2) for part in pair(kv, index)]
    for old, new in zip(before, after, strict=True):
        assert new.shape[0] == 4
        assert new.shape[2] == 2 * LENGTH_STEP
        assert torch.equal(new[:2, :, :5], old)


def test_it_never_shrinks_and_does_not_move_without_need(kv: KVCache) -> None:
    kv.reserve(4, 100)
    address = pair(kv, 0)[0].data_ptr()
    kv.reserve(1, 1)
    kv.reserve(4, 2 * LENGTH_STEP)
    assert pair(kv, 0)[0].data_ptr() == address


def test_moving_copies_rows_in_every_layer(kv: KVCache) -> None:
    kv.reserve(3, 2)
    for index in range(2):
        for part in pair(kv, index):
            part[:] = torch.arange(3.0)[:, None, None, None]
    kv.move([2], [0])
    kv.move([], [])
    for index in range(2):
        for part in pair(kv, index):
            assert part[:, 0, 0, 0].tolist() == [2.0, 1.0, 2.0]


def test_what_is_copied_out_comes_back_in_another_row(kv: KVCache) -> None:
    stored = kv.copy_out(1, 4)
    assert stored.length == 4
    assert stored.nbytes == 4 * 4 * sum(heads * (wide + narrow) for heads, wide, narrow in WIDTHS)
    other = KVCache()
    other.reserve(3, 9)
    other.copy_in(2, stored)
    for index in range(2):
        for mine, theirs in zip(pair(other, index), pair(kv, index), strict=True):
            assert torch.equal(mine[2, :, :4], theirs[1, :, :4])


def test_release_gives_the_memory_back(kv: KVCache) -> None:
    assert kv.nbytes == sum(2 * LENGTH_STEP * heads * (wide + narrow) * 4 for heads, wide, narrow in WIDTHS)
    kv.release()
    assert kv.nbytes == 0
    kv.reserve(1, 1)
    assert not pair(kv, 0)[0].any()
