"""Transfers of changed weights: what is sent builds, bit for bit, what all weights would."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from rollgrad.adapters.weights import delta
from rollgrad.adapters.weights.delta import MOST_CHANGED, POSITIONS, VALUES, changes, distances_of, positions_of

Weights = dict[str, Tensor]


@pytest.fixture(autouse=True)
def without_a_copy() -> Iterator[None]:
    delta._copy.key, delta._copy.weights = None, {}
    yield
    delta._copy.key, delta._copy.weights = None, {}


def applied(weights: Weights, sent: list[tuple[str, Tensor]]) -> Weights:
    """Returns weights with what was sent of changes."""
    found, positions = {name: tensor.clone() for name, tensor in weights.items()}, torch.empty(0)
    for name, tensor in sent:
        if name.startswith(POSITIONS):
            positions = positions_of(tensor)
        elif name.startswith(VALUES):
            found[name.removeprefix(VALUES)].view(-1)[positions] = tensor
        else:
            found[name] = tensor.clone()
    return found


def same(one: Weights, other: Weights) -> bool:
    """Whether all bits are the same, those of zeros and of what is no number too."""
    bits = (
        {name: (t.dtype, t.shape, t.contiguous().view(-1).view(torch.uint8).tolist()) for name, t in w.items()}
        for w in (one, other)
    )
    return next(bits) == next(bits)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn], ids=str)
def test_changes_build_the_weights_that_were_sent(dtype: torch.dtype) -> None:
    chance = torch.Generator().manual_seed(0)
    weights = {
        name: torch.randn(shape, generator=chance).to(dtype)
        for name, shape in {"a": (30, 40), "turned": (40, 30), "scalar": (), "empty": (0, 3), "same": (7,)}.items()
    }
    weights["turned"] = weights["turned"].T
    there = applied({}, list(changes(iter(weights.items()), None, "0")))
    for number, share in enumerate((0.01, 0.0, MOST_CHANGED / 2, 2 * MOST_CHANGED, 0.01), 1):
        for name, tensor in weights.items():
            changed = torch.rand(tensor.shape, generator=chance) < share
            new = torch.randn(tensor.shape, generator=chance).to(dtype)
            weights[name] = tensor.clone() if name == "same" else torch.where(changed, new, tensor)
        sent = list(changes(iter(weights.items()), str(number - 1), str(number)))
        names = [name for name, _ in sent]
        assert "same" not in " ".join(names)
        assert (POSITIONS + "a" in names) is (0 < share < MOST_CHANGED)
        assert ("a" in names) is (share > MOST_CHANGED)
        there = applied(there, sent)
        assert same(there, weights)


def test_bits_are_compared_not_numbers() -> None:
    weights = {"a": torch.tensor([0.0, float("nan"), 1.0, 2.0, 3.0], dtype=torch.bfloat16)}
    list(changes(iter(weights.items()), None, "0"))
    assert list(changes(iter(weights.items()), "0", "1")) == [], "what is no number is the same as before"
    weights["a"][0] = -0.0
    ((_, distances), (_, values)) = changes(iter(weights.items()), "1", "2")
    assert (positions_of(distances).tolist(), values.signbit().tolist()) == ([0], [True])


def test_a_tensor_of_another_format_or_shape_is_sent_whole() -> None:
    weights = {"a": torch.ones(10, dtype=torch.bfloat16), "b": torch.ones(4)}
    list(changes(iter(weights.items()), None, "0"))
    weights = {"a": torch.ones(10, dtype=torch.float16), "b": torch.ones(8), "new": torch.ones(2)}
    assert same(dict(changes(iter(weights.items()), "0", "1")), weights)


@pytest.mark.parametrize("base", [None, "another"])
def test_all_weights_go_where_it_is_not_known_what_is_there(base: str | None) -> None:
    weights = {"a": torch.ones(10), "b": torch.ones(4)}
    list(changes(iter(weights.items()), None, "0"))
    assert same(dict(changes(iter(weights.items()), base, "1")), weights)
    assert list(changes(iter(weights.items()), "1", "2")) == []


def test_a_transfer_that_breaks_off_leaves_nothing_to_build_on() -> None:
    weights = {"a": torch.ones(10), "b": torch.ones(4)}
    list(changes(iter(weights.items()), None, "0"))
    weights["a"][0] = 2
    weights["b"] = torch.zeros(4)
    broken = changes(iter(weights.items()), "0", "1")
    assert next(broken)[0] == POSITIONS + "a"
    broken.close()  # type: ignore[attr-defined]
    for base in ("0", "1"):
        assert same(dict(changes(iter(weights.items()), base, "2")), weights)


@pytest.mark.parametrize(
    "positions",
    [[0], [65535], [65536], [0, 3 * 65536], [5, 6, 2 * 65535 + 6, 2 * 65535 + 7, 10**7], [1, 2**31 + 5]],
    ids=str,
)
def test_distances_lead_to_all_positions(positions: list[int]) -> None:
    distances, stops = distances_of(torch.tensor(positions))
    assert torch.equal(positions_of(distances), stops)
    assert {*positions} <= {*stops.tolist()}
    assert (stops[1:] > stops[:-1]).all()
    assert len(stops) <= len(positions) + positions[-1] // 65535


def test_the_copy_is_freed_with_the_backend_that_sent_it() -> None:
    one, other = (delta.Changes(lambda *_: pytest.fail("nothing is sent")) for _ in range(2))
    list(changes(iter({"a": torch.ones(10)}.items()), None, f"{one._name}.1"))
    del other
    assert delta._copy.weights
    del one
    assert not delta._copy.weights
