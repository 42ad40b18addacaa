"""Weights of which a process loads a share: which it must not, and what it computes with. That shares train as whole
models do is in tests/integration/test_cluster_models.py."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from rollgrad.adapters.models.torch.experts.expert_parallel import join_expert_groups
from rollgrad.adapters.models.torch.loading.compatibility import joint_logits, probe_tokens
from rollgrad.adapters.models.torch.loading.loading import load_causal_lm
from rollgrad.adapters.models.torch.loading.weight_shards import (
    expert_meshes,
    is_sharded,
    make_whole,
    not_by_rows,
    own_place,
    shard_rows,
    whole_layers,
)
from tests.tiny_architectures import tiny_model

CPU = torch.device("cpu")


@pytest.fixture
def lone_group() -> Iterator[None]:
    """A process group of this process."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def test_tensors_that_are_cut_out_of_others_are_read_whole() -> None:
    """Rows of a fused tensor of the files are not the rows of what transformers makes from it."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.core_model_loading import Chunk, Concatenate, MergeModulelist, WeightConverter, WeightRenaming

    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=1))
    fused = WeightConverter(
        source_patterns=["self_attn.qkv.weight"],
        target_patterns=["self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"],
        operations=[Chunk(dim=0)],
    )
    experts = WeightConverter(
        source_patterns=["mlp.experts.*.gate_proj.weight", "mlp.experts.*.up_proj.weight"],
        target_patterns="mlp.gate_proj",
        operations=[MergeModulelist(dim=0), Concatenate(dim=1)],
    )
    layer = "model.layers.0.self_attn."
    expected = {f"{layer}{name}_proj.weight" for name in "qkv"}
    assert not_by_rows(model, [fused, experts, WeightRenaming("gamma", "weight")]) == expected
    assert not_by_rows(model, None) == set()


def test_a_matrix_of_which_a_process_would_have_no_rows_stays_whole() -> None:
    """Three processes would have 2, 2 and none of 4 experts, and none cannot be stacked."""
    with torch.device("meta"):
        model = nn.ModuleDict({str(rows): nn.Linear(2, rows, bias=False) for rows in range(1, 8)})
    distributed.init_process_group("fake", store=FakeStore(), rank=2, world_size=3)
    try:
        shard_rows(model, set())
    finally:
        distributed.destroy_process_group()
    assert [len(p) for p in model.parameters() if is_sharded(p)] == [3, 5, 6, 7]


@pytest.mark.parametrize(
    ("experts", "places"),
    [
        (8, [(0, 2), (4, 6), (2, 4), (6, 8)]),  # processes 0 and 2 have the first four
        (6, [(0, 2), (3, 5), (2, 3), (5, 6)]),
        (2, None),  # of the two processes of an expert one would have nothing
    ],
)
def test_experts_are_read_by_the_processes_that_hold_them(experts: int, places: list[tuple[int, int]] | None) -> None:
    """Four processes, of which neighbours divide the experts; of other matrices each has a quarter."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    for rank in range(4):
        with torch.device("meta"):
            model = tiny_model("mixtral", num_local_experts=experts)
        distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=4)
        try:
            join_expert_groups(2, timeout=60)
            meshes = expert_meshes(model)
            shard_rows(model, set())
            parts: list[Any] = [p for p in model.parameters() if p.ndim > 2]
            assert len(parts) == len(meshes) == 4
            assert len(model.model.layers[0].self_attn.o_proj.weight.to_local()) == 8
            for part, mesh in zip(parts, meshes.values(), strict=True):
                assert is_sharded(part) == (places is not None)
                if places is not None:
                    shape, (first, *_) = compute_local_shape_and_global_offset(part.shape, mesh, part.placements)
                    assert (first, first + shape[0]) == own_place(experts, mesh) == places[rank]
                    assert part.to_local().shape == shape
        finally:
            join_expert_groups(1, timeout=60)
            distributed.destroy_process_group()


def test_a_model_of_shares_computes_and_is_whole_again(lone_group: None, tiny_model_dir: Path) -> None:
    plain = load_causal_lm(str(tiny_model_dir), dtype=torch.float32, device=CPU, flag="model")
    model = load_causal_lm(str(tiny_model_dir), dtype=torch.float32, device=CPU, flag="model", shard=shard_rows)
    assert {name for name, p in model.named_parameters() if is_sharded(p)} == {
        name for name, p in plain.named_parameters() if p.ndim > 1
    }
    sequences = probe_tokens(plain)
    with torch.no_grad(), whole_layers(model):
        found = joint_logits(model, sequences)
    for found_TV, expected_TV in zip(found, joint_logits(plain, sequences), strict=True):
        assert torch.equal(found_TV, expected_TV)
    assert is_sharded(model.model.layers[0].mlp.up_proj.weight), "each layer is put together only while it computes"
    make_whole(model)
    wholes = dict(plain.named_parameters())
    assert all(torch.equal(parameter, wholes[name]) for name, parameter in model.named_parameters())
