"""Models that FSDP2 divides in a group of one process; several are in tests/integration/test_cluster_models.py."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from attrs import evolve
from torch import distributed, nn

from rollgrad.adapters.models.fsdp.division import divide
from rollgrad.adapters.models.fsdp.module import FSDPTrainedModule
from rollgrad.adapters.models.torch.forward import PackedLM
from rollgrad.adapters.models.torch.kernels import row_widths
from rollgrad.adapters.models.torch.loading.loading import load_causal_lm
from rollgrad.adapters.models.torch.optimizers.optimizer import MasterOptimizer
from rollgrad.adapters.models.torch.optimizers.own_optimizer import OwnOptimizer
from rollgrad.domain.batches.packed import pack
from rollgrad.domain.episodes.rewards import RewardInput
from rollgrad.domain.errors import ConfigurationError
from rollgrad.testing.agent_executor import make_trajectory
from tests.fakes import cluster
from tests.tiny_architectures import tiny_model


@pytest.fixture
def alone() -> Iterator[None]:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_masters_are_float32_and_what_is_saved_has_the_format_it_computes_in(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    settings = evolve(cluster.SETTINGS, ema_beta=None)
    lone = cluster.policy(str(tiny_model_dir), settings=settings, dtype=torch.bfloat16)
    policy = cluster.policy(str(tiny_model_dir), FSDPTrainedModule, settings=settings, dtype=torch.bfloat16)
    assert cluster.trained(policy) == pytest.approx(cluster.trained(lone), rel=1e-2)
    found = cluster.weights(policy)
    for name, tensor in lone.weights():
        torch.testing.assert_close(found[name], tensor, rtol=0.01, atol=2e-3)  # the norm is rounded unlike
    masters = policy.state_dict()["masters"]
    for name, master in lone.state_dict()["masters"].items():
        torch.testing.assert_close(masters[name], master, rtol=0, atol=2e-3)
        assert not torch.equal(masters[name], masters[name].bfloat16().float())
    policy.save(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.usefixtures("alone")
def test_an_optimizer_of_ones_own_steps_rows_as_it_does_whole_matrices(tiny_model_dir: Path) -> None:
    own = OwnOptimizer(lambda groups: torch.optim.SGD(groups, momentum=0.9), "--actor.optim_path mine.py")
    settings = evolve(cluster.SETTINGS, ema_beta=None, own=own, factors=(1.0, 0.5))
    lone = cluster.policy(str(tiny_model_dir), settings=settings)
    policy = cluster.policy(str(tiny_model_dir), FSDPTrainedModule, settings=settings)
    assert cluster.trained(policy) == pytest.approx(cluster.trained(lone), rel=1e-5)
    found, wanted = policy.state_dict(), lone.state_dict()
    for name, moments in wanted["moments"].items():
        torch.testing.assert_close(found["moments"][name], moments)
        torch.testing.assert_close(found["masters"][name], wanted["masters"][name])


@pytest.mark.usefixtures("alone")
def test_a_scalar_head_computes_in_the_float32_that_it_had(tiny_model_dir: Path) -> None:
    lone, critic = (
        cluster.value(str(tiny_model_dir), optimize, dtype=torch.bfloat16)
        for optimize in (MasterOptimizer, FSDPTrainedModule)
    )
    assert cluster.fitted(critic) == pytest.approx(cluster.fitted(lone), rel=1e-2)
    values_N, wanted_N = (model.values(cluster.batch()) for model in (critic, lone))
    torch.testing.assert_close(values_N, wanted_N, rtol=1e-2, atol=1e-2)
    assert not torch.equal(values_N, values_N.bfloat16().float())


@pytest.mark.usefixtures("alone")
def test_a_lone_process_of_a_reward_model_scores_as_without_division(reward_model_dir: Path) -> None:
    replies = [RewardInput(text=text) for text in ("7 7 7", "What?", "What is 1 plus 2?")]
    found = cluster.rank_reward_model(str(reward_model_dir), cluster.FSDP, offload=False).judge(replies)
    wanted = cluster.reward_model(str(reward_model_dir)).judge(replies)
    assert [score for score, _ in found] == pytest.approx([score for score, _ in wanted], abs=1e-5)


@pytest.mark.usefixtures("alone")
def test_what_rests_in_the_cpu_s_memory_is_not_moved_while_it_is_divided(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`from_local` moves what it is given to the GPU of the mesh, if it has one; there may be no room for all."""
    from torch.distributed.tensor import DTensor

    model = load_causal_lm(str(tiny_model_dir), dtype=torch.float32, device=torch.device("cpu"), flag=cluster.FLAG)
    monkeypatch.delattr(DTensor, "from_local")
    divided = divide(model, offload=True)
    assert {parameter.device.type for parameter in divided.formats} == {"cpu"}


@pytest.mark.usefixtures("alone")
def test_a_padded_model_makes_one_pass_of_a_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes gather the layers together, and one that made fewer passes would keep the others waiting."""
    tiny_model("bloom").save_pretrained(tmp_path)
    monkeypatch.setattr(row_widths, "SMALL_PASS", 0)
    batch = pack([make_trajectory([5, 6], [7] * length) for length in (2, 40)])
    module = PackedLM(load_causal_lm(str(tmp_path), dtype=torch.float32, device=torch.device("cpu"), flag=cluster.FLAG))
    passes: list[int] = []
    module.model.transformer.h[0].register_forward_hook(lambda *_: passes.append(1))
    with torch.no_grad():
        expected_A = module(batch)[0]
        assert len(passes) == 2
        torch.testing.assert_close(divide(module)(batch)[0], expected_A)
    assert len(passes) == 3


@pytest.mark.usefixtures("alone")
def test_what_cannot_be_divided_is_refused_by_name(tiny_model_dir: Path) -> None:
    def model() -> nn.Module:
        loaded: nn.Module = load_causal_lm(
            str(tiny_model_dir), dtype=torch.bfloat16, device=torch.device("cpu"), flag=cluster.FLAG
        )
        return loaded

    scaled = model()
    scaled.scale = nn.Parameter(torch.ones(()))
    with pytest.raises(
        ConfigurationError, match=r"scale of the model is a single number.*--cluster\.strategy deepspeed"
    ):
        divide(scaled)
    mixed = model()
    mixed.get_submodule("model.layers.0.mlp").bias = nn.Parameter(torch.ones(4))
    with pytest.raises(ConfigurationError, match=r"LlamaMLP of the model has parameters in bfloat16 and float32"):
        divide(mixed)


@pytest.mark.usefixtures("alone")
def test_a_torch_that_may_forget_the_gradients_of_experts_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.fsdp import FSDPModule

    monkeypatch.delattr(FSDPModule, "set_reduce_scatter_unused_params", raising=False)  # as torch 2.11 and 2.12 are
    with pytest.raises(ConfigurationError, match=r"may use nothing in a step, .*: install torch 2\.13"):
        divide(tiny_model("qwen3_moe"))
