"""The cache keeps what it holds while it grows and moves."""

import torch

from rollgrad.adapters.transformers.kv_cache import LENGTH_STEP, KVCache


def cache() -> KVCache:
    return KVCache(layers=2, heads=3, dim=4, dtype=torch.float32, device=torch.device("cpu"))


def test_growing_keeps_what_is_stored() -> None:
    kv = cache()
    kv.reserve(2, 5)
    keys, values = kv.layer(1)
    keys[:, :, :5] = torch.randn(2, 3, 5, 4)
    values[:, :, :5] = torch.randn(2, 3, 5, 4)
    before = (keys[:, :, :5].clone(), values[:, :, :5].clone())
    kv.reserve(4, LENGTH_STEP + 1)
    keys, values = kv.layer(1)
    assert keys.shape == (4, 3, 2 * LENGTH_STEP, 4)
    assert torch.equal(keys[:2, :, :5], before[0])
    assert torch.equal(values[:2, :, :5], before[1])


def test_it_never_shrinks_and_does_not_move_without_need() -> None:
    kv = cache()
    kv.reserve(4, 100)
    address = kv.layer(0)[0].data_ptr()
    kv.reserve(1, 1)
    kv.reserve(4, 2 * LENGTH_STEP)
    assert kv.layer(0)[0].data_ptr() == address


def test_moving_copies_rows_in_every_layer() -> None:
    kv = cache()
    kv.reserve(3, 2)
    for layer in range(2):
        for part in kv.layer(layer):
            part[:] = torch.arange(3.0)[:, None, None, None]
    kv.move([2], [0])
    kv.move([], [])
    for layer in range(2):
        for part in kv.layer(layer):
            assert part[:, 0, 0, 0].tolist() == [2.0, 1.0, 2.0]


def test_release_gives_the_memory_back() -> None:
    kv = cache()
    assert kv.nbytes == 0
    kv.reserve(1, 1)
    assert kv.nbytes == 2 * 2 * 1 * 3 * LENGTH_STEP * 4 * 4
    kv.release()
    assert kv.nbytes == 0
    kv.reserve(1, 1)
    assert not kv.layer(0)[0].any()
