"""Weights that a process has a run of, and those that have to be put together before they are sent."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from attrs import frozen
from torch import Tensor, distributed, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from rollgrad.adapters.engines.embedded.engine import EmbeddedEngine
from rollgrad.adapters.models.deepspeed.partition import own_run
from rollgrad.adapters.models.fsdp.module import FSDPTrainedModule
from rollgrad.adapters.models.torch.loading.compatibility import install_and_compare
from rollgrad.adapters.models.torch.loading.lora import NamedWeight, add_lora, plain_weights
from rollgrad.adapters.models.torch.models import TorchPolicy
from rollgrad.adapters.models.torch.optimizers.optimizer import OptimizerSettings
from rollgrad.adapters.models.torch.optimizers.trained_module import TrainedModule
from rollgrad.adapters.models.torch.sent_names import sent_buffers
from rollgrad.adapters.models.torch.weight_parts import weight_parts
from rollgrad.application.settings.sections.actor import LoraConfig
from tests.fakes import cluster
from tests.tiny_architectures import tiny_model as architecture
from tests.tiny_models import make_tiny_tokenizer, tiny_model


@frozen
class Halves:
    """The second of two processes, each of which has a half of every parameter but of those `without`."""

    without: frozenset[int] = frozenset()
    first: bool = False

    def part(self, parameter: nn.Parameter) -> tuple[int, Tensor] | None:
        half = parameter.numel() // 2
        return None if id(parameter) in self.without else (half, parameter.detach().reshape(-1)[half:])


def of(weights: list[NamedWeight], trained: Halves) -> Any:
    return weight_parts(weights, {}, cast(TrainedModule, trained))


def test_a_run_says_where_in_which_tensor_it_is() -> None:
    model = tiny_model("LlamaForCausalLM", make_tiny_tokenizer())
    weights = plain_weights(model)
    runs = list(of(weights, Halves()))
    assert [run.name for run in runs] == [name for name, _ in model.named_parameters()]
    for run, (_, parameter) in zip(runs, model.named_parameters(), strict=True):
        assert run.shape == parameter.shape
        assert run.begin == parameter.numel() // 2
        assert torch.equal(run.elements, parameter.flatten()[run.begin :])


def test_the_first_process_has_the_numbers_that_are_no_parameters() -> None:
    buffers = sent_buffers(architecture("glm4_moe"))
    assert [*buffers] == ["model.layers.1.mlp.gate.e_score_correction_bias"]
    for first in (True, False):
        (run,) = list(weight_parts([], buffers, cast(TrainedModule, Halves(first=first))) or [])
        (buffer,) = buffers.values()
        assert (run.name, run.shape) == (*buffers, buffer.shape)
        assert run.begin + run.elements.numel() == buffer.numel()
        assert torch.equal(run.elements, buffer if first else buffer[:0])


async def test_a_copy_of_the_model_takes_them() -> None:
    trained, copied = (architecture("glm4_moe") for _ in range(2))
    for model in (trained, copied):
        install_and_compare(model)
    policy = TorchPolicy(trained, None, OptimizerSettings(lr=0.0))
    trained.model.layers[1].mlp.gate.e_score_correction_bias += 1.0
    await EmbeddedEngine(copied, eos_token_ids=()).load_weights(policy.weights(), 1)
    assert all(torch.equal(tensor, copied.state_dict()[name]) for name, tensor in trained.state_dict().items())


def test_merged_adapters_and_other_divisions_have_no_parts() -> None:
    model = tiny_model("LlamaForCausalLM", make_tiny_tokenizer())
    norm = model.model.norm.weight
    assert of(plain_weights(model), Halves(frozenset({id(norm)}))) is None
    add_lora(model, LoraConfig(rank=2), seed=0)
    assert of(plain_weights(model), Halves()) is None


@pytest.mark.parametrize("rank", range(3))
def test_a_process_of_fsdp_has_its_rows(tiny_model_dir: Path, rank: int) -> None:
    whole = dict(cluster.policy(str(tiny_model_dir), dtype=torch.bfloat16).weights())
    distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=3)
    try:
        policy = cluster.policy(str(tiny_model_dir), FSDPTrainedModule, dtype=torch.bfloat16)
        runs = list(policy.own_parts() or ())
    finally:
        distributed.destroy_process_group()
    assert [run.name for run in runs] == list(whole)
    for run in runs:
        tensor = whole[run.name]
        most = -(-len(tensor) // 3)
        assert run.shape == tensor.shape
        assert run.begin == min(rank * most, len(tensor)) * tensor[0].numel()
        assert run.elements.dtype == torch.bfloat16
        assert torch.equal(run.elements, tensor[rank * most : (rank + 1) * most].flatten())


@pytest.mark.parametrize("rank", range(3))
def test_of_a_parameter_that_all_processes_have_each_has_an_equal_run(rank: int) -> None:
    parameter = nn.Parameter(torch.arange(10.0).reshape(5, 2))
    distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=3)
    try:
        part = own_run(parameter)
    finally:
        distributed.destroy_process_group()
    assert part is not None
    assert part[0] == 4 * rank
    assert part[1].tolist() == [float(index) for index in range(4 * rank, min(4 * rank + 4, 10))]


@pytest.mark.parametrize("rank", range(4))
def test_what_zero_keeps_of_a_parameter_is_a_run_without_its_padding(rank: int) -> None:
    """ZeRO-3 has parts of one size, the last of which end with memory that is no part of the parameter."""
    flat = torch.cat([torch.arange(9.0), torch.full((3,), float("nan"))])
    parameter = SimpleNamespace(
        ds_tensor=flat[3 * rank : 3 * rank + 3], ds_numel=9, ds_zero_partition_rank=rank, ds_zero_partition_world_size=4
    )
    distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=4)
    try:
        part = own_run(parameter)
        parameter.ds_zero_partition_world_size = 2
        assert own_run(parameter) is None, "two processes have the same"
    finally:
        distributed.destroy_process_group()
    assert part is not None
    assert part[0] == 3 * rank
    assert part[1].tolist() == list(range(3 * rank, min(3 * rank + 3, 9)))
