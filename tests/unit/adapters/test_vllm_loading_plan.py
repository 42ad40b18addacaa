"""Plans of loaders that are written as vLLM's, and loaders that have none."""

from collections.abc import Iterable

import pytest
import torch
from torch import Tensor, nn

from rollgrad.adapters.engines.vllm.loading_plan import Copy, LoadingPlan
from rollgrad.adapters.weights.regions import Region

FLOAT = torch.float32


class Loaded(nn.Module):
    """Holds the second half of a fused matrix of two, of a matrix's columns, and of a padded vocabulary."""

    def __init__(self, *, collects: bool = False) -> None:
        super().__init__()
        with torch.device("meta"):
            self.fused, self.narrow, self.rows = nn.Linear(4, 6), nn.Linear(2, 3, bias=False), nn.Embedding(5, 4)
        self._collects = collects
        self.calls = 0

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        self.calls += 1
        loaded = set()
        for name, tensor in list(weights) if self._collects else weights:
            if name in ("first", "second"):
                rows = self.fused.weight.data.narrow(0, 0 if name == "first" else 3, 3)
                rows.copy_(tensor.chunk(2)[1])
                loaded.add("fused.weight")
            elif name == "wide":
                self.narrow.weight.data.copy_(tensor[:, 2:])
                loaded.add("narrow.weight")
            elif name == "rows":
                self.rows.weight.data[:3].copy_(tensor[3:])
                self.rows.weight.data[3:].fill_(0)
                loaded.add("rows.weight")
            elif name == "scaled":
                self.narrow.weight.data.copy_(tensor * 2)
            elif name == "read":
                self.narrow.weight.data.copy_(tensor if tensor.sum() > 0 else -tensor)
            elif name == "taken":
                self.narrow.weight.data = tensor
                loaded.add("narrow.weight")
            elif name == "turned":
                self.narrow.weight.data.copy_(tensor.t())
            elif name == "turned into another":
                self.narrow.weight.data.copy_(tensor.t().contiguous())
            elif name == "part of another":
                self.narrow.weight.data.copy_(tensor.t().contiguous()[:, :2])
            elif name == "changed":
                changed = tensor.clone()
                changed[0] *= 2
                self.narrow.weight.data.copy_(changed)
            elif name == "emptied":
                self.narrow.weight.data.copy_(tensor.zero_())
            elif name == "half emptied":
                tensor[1:].zero_()
                self.narrow.weight.data.copy_(tensor)
            elif name == "emptied, then another":
                self.narrow.weight.data.copy_(tensor.zero_().t().contiguous())
            elif name in ("kept", "half kept"):
                self.kept = tensor if name == "kept" else tensor[1:]
            elif name == "added":
                self.narrow.weight.data.add_(tensor)
            elif name == "caught":
                try:
                    self.narrow.weight.data.mul_(2.0)
                finally:
                    self.narrow.weight.data.copy_(tensor)
        return loaded


SHAPES = {
    "first": (6, 4),
    "second": (6, 4),
    "wide": (3, 4),
    "rows": (6, 4),
    "elsewhere": (9,),
    "turned": (2, 3),
    "turned into another": (2, 3),
    "part of another": (4, 3),
    "emptied, then another": (2, 3),
}


def kinds(*names: str) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
    return [(name, FLOAT, SHAPES.get(name, (3, 2))) for name in names]


@pytest.mark.parametrize("collects", [False, True])
def test_a_plan_has_the_parts_that_are_copied_and_where_they_go(collects: bool) -> None:
    model = Loaded(collects=collects)
    plan = LoadingPlan(model)
    plan.learn(kinds("first", "wide", "elsewhere", "second", "turned", "wide"))
    assert model.calls == 1, "all are noted together"
    assert plan.unknown(kinds("second", "rows", "first")) == kinds("rows")

    def found(name: str) -> tuple[list[Copy], set[str]]:
        loading = plan.loading(name, SHAPES[name])
        assert loading.copies is not None
        assert loading.loaded is not None
        return list(loading.copies), set(loading.loaded)

    half = Region(12, (3, 4), (4, 1))
    fused, narrow = (model.fused, "weight"), (model.narrow, "weight")
    assert found("first") == ([Copy(fused, Region(0, (3, 4), (4, 1)), half)], {"fused.weight"})
    assert found("second") == ([Copy(fused, Region(12, (3, 4), (4, 1)), half)], {"fused.weight"})
    assert found("wide") == ([Copy(narrow, Region(0, (3, 2), (2, 1)), Region(2, (3, 2), (4, 1)))], {"narrow.weight"})
    assert found("turned") == ([Copy(narrow, Region(0, (3, 2), (2, 1)), Region(0, (3, 2), (1, 3)))], {"narrow.weight"})
    assert found("elsewhere") == ([], set())


@pytest.mark.parametrize("collects", [False, True])
def test_rows_that_pad_a_vocabulary_are_set(collects: bool) -> None:
    model = Loaded(collects=collects)
    plan = LoadingPlan(model)
    plan.learn(kinds("rows", "wide"))
    copies = plan.loading("rows", SHAPES["rows"]).copies
    place = (model.rows, "weight")
    assert copies == [
        Copy(place, Region(0, (3, 4), (4, 1)), Region(12, (3, 4), (4, 1))),
        Copy(place, Region(12, (2, 4), (4, 1)), None, 0.0),
    ]


def test_tensors_that_a_loader_makes_of_another_are_followed() -> None:
    model = Loaded()
    plan = LoadingPlan(model)
    plan.learn(kinds("turned into another"))
    plan.learn(kinds("emptied"))
    place = (model.narrow, "weight")
    whole = Region(0, (3, 2), (2, 1))
    assert plan.loading("turned into another", (2, 3)).copies == [Copy(place, whole, Region(0, (3, 2), (1, 3)))]
    assert plan.loading("emptied", (3, 2)).copies == [Copy(place, whole, None, 0.0)]


@pytest.mark.parametrize("common", [False, True])
def test_a_tensor_of_several_layers_has_a_plan_where_it_may_be_common(common: bool) -> None:
    """Each layer of tied embeddings has to be repacked; a router and its experts read the same corrections."""
    model = Loaded()
    model.other = nn.Linear(2, 3, bias=False, device="meta")
    model.other.weight = model.narrow.weight
    plan = LoadingPlan(model, common=("weight",) if common else ())
    plan.learn(kinds("wide"))
    copies = plan.loading("wide", SHAPES["wide"]).copies
    assert (copies is not None) == common
    assert all(copy.place == (model.narrow, "weight") for copy in copies or ())


@pytest.mark.parametrize(
    "name",
    [
        *("scaled", "read", "taken", "added", "caught", "kept", "half kept"),
        *("part of another", "changed", "half emptied", "emptied, then another"),
    ],
)
def test_what_is_more_than_a_copy_has_no_plan_and_what_comes_with_it_has(name: str) -> None:
    plan = LoadingPlan(Loaded())
    plan.learn(kinds("first", name, "wide"))
    assert plan.loading(name, SHAPES.get(name, (3, 2))).copies is None
    assert plan.loading("first", SHAPES["first"]).copies
    assert plan.loading("wide", SHAPES["wide"]).copies


def test_a_layer_that_vllm_loads_by_itself_has_no_plan() -> None:
    model = Loaded()
    plan = LoadingPlan(model, lambda layer: layer is model.narrow)
    plan.learn(kinds("first", "wide"))
    assert plan.loading("wide", SHAPES["wide"]).copies is None
    assert plan.loading("first", SHAPES["first"]).copies


def test_parameters_in_the_same_memory_have_no_plan() -> None:
    model = Loaded()
    model.other = nn.Linear(2, 3, bias=False)
    model.other.weight = nn.Parameter(model.narrow.weight.data)
    plan = LoadingPlan(model)
    plan.learn(kinds("first", "wide"))
    assert plan.loading("wide", SHAPES["wide"]).copies is None


def test_a_tensor_of_another_shape_is_learned_anew() -> None:
    model = Loaded()
    plan = LoadingPlan(model)
    plan.learn(kinds("wide"))
    other = [("wide", FLOAT, (3, 5))]
    assert plan.unknown(other) == other
    plan.learn(other)
    assert plan.loading("wide", (3, 5)).copies is None
    assert plan.loading("wide", (3, 4)).copies


def test_a_model_that_names_nothing_is_planned_without_names() -> None:
    class Nameless(Loaded):
        def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:  # type: ignore[override]
            super().load_weights(weights)

    plan = LoadingPlan(Nameless())
    plan.learn(kinds("wide"))
    loading = plan.loading("wide", SHAPES["wide"])
    assert loading.copies
    assert loading.loaded is None
