"""Training in float16: the loss is scaled, and steps whose gradients overflow are skipped."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from attrs import evolve
from structlog.testing import capture_logs
from torch import nn

from rollgrad.adapters.models.torch.loading.loading import load_causal_lm, load_critic, load_tokenizer
from rollgrad.adapters.models.torch.optimizers.optimizer import MasterOptimizer, OptimizerSettings
from rollgrad.adapters.models.torch.rewards.value import TorchValue
from rollgrad.domain.control.loss_scale import WINDOW
from rollgrad.domain.errors import ConfigurationError, NonFiniteUpdateError
from tests.fakes import cluster

SETTINGS = OptimizerSettings(lr=1e-2, weight_decay=0.1, max_norm=0.5, scheduler="linear", total_steps=20, ema_beta=0.7)
TARGET = torch.linspace(-1, 1, 15).reshape(5, 3)


def network(dtype: torch.dtype = torch.float16) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3)).to(dtype)


def loss(model: nn.Module, seed: int, size: float = 1.0) -> torch.Tensor:
    """`size` is that of the gradient."""
    inputs = torch.randn(5, 6, generator=torch.Generator().manual_seed(seed))
    return size * (model(inputs.to(next(model.parameters()).dtype)).float() - TARGET).square().mean()


def gaps(optimizer: MasterOptimizer, reference: MasterOptimizer, start: dict[str, torch.Tensor]) -> float:
    """How far the weights are from the reference's, as a share of how far these have moved; the worst of all."""
    wanted = reference.masters()
    return max(float((m - wanted[n]).norm() / (wanted[n] - start[n]).norm()) for n, m in optimizer.masters().items())


@pytest.mark.parametrize("size", [1.0, 1e-6], ids=["plain", "gradients_below_float16s_numbers"])
def test_steps_are_those_of_float32(size: float) -> None:
    """A size of 1e-6 makes gradients that float16 would round to 0, were they not scaled."""
    settings = evolve(SETTINGS, eps=1e-16, max_norm=0.5 * size)
    half, whole = network(), network(torch.float16).float()
    optimizer, reference = MasterOptimizer(half, settings), MasterOptimizer(whole, settings)
    start = {name: master.clone() for name, master in reference.masters().items()}
    for seed in range(8):
        optimizer.backward(loss(half, seed, size))
        reference.backward(loss(whole, seed, size))
        found, wanted = optimizer.step(), reference.step()
        assert found == pytest.approx(wanted | {"loss_scale": 2.0**16, "skipped_steps": 0.0}, rel=5e-3)
        assert found["grad_norm"] > settings.max_norm, "the test must clip"
    assert gaps(optimizer, reference, start) < 0.01
    for name, parameter in half.named_parameters():
        assert torch.equal(parameter, optimizer.masters()[name].half())


def test_an_overflow_skips_the_step_and_halves_the_scale() -> None:
    model, twin = network(), network()
    optimizer, undisturbed = MasterOptimizer(model, SETTINGS), MasterOptimizer(twin, SETTINGS)
    for trained, module in ((optimizer, model), (undisturbed, twin)):
        trained.backward(loss(module, 0))
        assert trained.step()["skipped_steps"] == 0
    before, weights = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(model.state_dict())
    for attempt in range(2):
        optimizer.backward(loss(model, 1))
        optimizer.backward(loss(model, 1, 1e6))  # finite, but not in float16 when it is scaled
        with capture_logs() as logs:
            metrics = optimizer.step()
        factor = 2.0 ** (16 - attempt)
        assert metrics == {"lr": pytest.approx(SETTINGS.lr * 0.955), "loss_scale": factor, "skipped_steps": 1.0}
        assert [(entry["step"], entry["next_loss_scale"]) for entry in logs] == [(1, factor / 2)]
        assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())
    state = optimizer.state_dict()
    assert state.pop("loss_scale") == {"factor": 2.0**14, "well": 0}
    del before["loss_scale"]
    torch.testing.assert_close(state, before, rtol=0, atol=0)  # moments, averages and the schedule among them

    for trained, module in ((optimizer, model), (undisturbed, twin)):  # nothing is left of what overflowed
        trained.backward(loss(module, 2))
        assert trained.step()["lr"] == pytest.approx(SETTINGS.lr * 0.955)
    for name, master in undisturbed.masters().items():
        torch.testing.assert_close(optimizer.masters()[name], master, rtol=0, atol=1e-3 * SETTINGS.lr)


def test_the_scale_grows_again_after_a_window_of_good_steps() -> None:
    model = network()
    optimizer = MasterOptimizer(model, SETTINGS)
    optimizer.load_state_dict(optimizer.state_dict() | {"loss_scale": {"factor": 8.0, "well": WINDOW - 2}})
    scales = []
    for seed in range(4):
        optimizer.backward(loss(model, seed))
        scales.append(optimizer.step()["loss_scale"])
    assert scales == [8.0, 8.0, 16.0, 16.0]


def test_what_overflows_without_a_scale_ends_the_run() -> None:
    model = network()
    optimizer = MasterOptimizer(model, SETTINGS)
    before = copy.deepcopy(model.state_dict())
    for _ in range(16):
        optimizer.backward(loss(model, 0, 1e12))
        assert optimizer.step()["skipped_steps"] == 1.0
    optimizer.backward(loss(model, 0, 1e12))
    with pytest.raises(NonFiniteUpdateError, match=r"step 0 is .*without a loss scale.*--actor\.dtype bfloat16"):
        optimizer.step()
    assert optimizer.state_dict()["loss_scale"]["factor"] == 1.0
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_a_restored_optimizer_goes_on_as_if_never_stopped() -> None:
    """With the scale, whose overflows come at other steps otherwise."""
    sizes = [1.0, 1e6, 1e6, 1.0, 4e4, 1.0]

    def run(optimizer: MasterOptimizer, model: nn.Module, steps: range) -> list[dict[str, float]]:
        rows = []
        for seed in steps:
            optimizer.backward(loss(model, seed, sizes[seed]))
            rows.append(optimizer.step())
        return rows

    whole = network()
    optimizer = MasterOptimizer(whole, SETTINGS)
    run(optimizer, whole, range(3))
    saved = copy.deepcopy(optimizer.state_dict())
    wanted = run(optimizer, whole, range(3, 6))
    assert [row["skipped_steps"] for row in wanted].count(1.0) == 1

    resumed = network()
    second = MasterOptimizer(resumed, SETTINGS)
    second.load_state_dict(saved)
    assert run(second, resumed, range(3, 6)) == wanted
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), resumed.parameters(), strict=True))


def test_a_state_of_another_number_format_leaves_the_scale() -> None:
    half, whole = network(), network(torch.float32)
    optimizer, other = MasterOptimizer(half, SETTINGS), MasterOptimizer(whole, SETTINGS)
    optimizer.load_state_dict(other.state_dict())
    other.load_state_dict(optimizer.state_dict())
    optimizer.backward(loss(half, 0))
    other.backward(loss(whole, 0))
    assert optimizer.step()["loss_scale"] == 2.0**16
    assert "loss_scale" not in other.step()


@pytest.mark.parametrize("rank", [0, 4], ids=["all_weights", "lora"])
def test_a_policy_trains_nearer_to_float32_than_in_bfloat16(
    tiny_model_dir: Path, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After three steps on two micro-batches each, whose gradients are clipped. The share is of how far weights moved;
    the scale is one at which no step is skipped."""
    if rank:
        monkeypatch.setattr(cluster, "load_causal_lm", _with_adapters(rank))
    wanted = cluster.policy(str(tiny_model_dir))
    start = wanted.state_dict()["masters"]
    cluster.trained(wanted)
    share = {}
    for dtype in (torch.float16, torch.bfloat16):
        found = cluster.policy(str(tiny_model_dir), dtype=dtype)
        found.load_state_dict(found.state_dict() | {"loss_scale": {"factor": 2.0**12, "well": 0}})
        metrics = cluster.trained(found)
        assert metrics.get("skipped_steps", 0.0) == 0.0
        assert all(tensor.dtype == dtype for _, tensor in found.weights())
        squared = [0.0, 0.0]
        for name, master in wanted.state_dict()["masters"].items():
            squared[0] += float((found.state_dict()["masters"][name] - master).square().sum())
            squared[1] += float((master - start[name]).square().sum())
        share[dtype] = (squared[0] / squared[1]) ** 0.5
        assert ("loss_scale" in metrics) == (dtype == torch.float16)
    assert share[torch.float16] < 0.05
    assert share[torch.float16] < share[torch.bfloat16] / 2


def _with_adapters(rank: int) -> Any:
    from rollgrad.adapters.models.torch.loading.lora import add_lora
    from rollgrad.application.settings.sections.actor import LoraConfig

    def load(*arguments: Any, **keywords: Any) -> Any:
        model = load_causal_lm(*arguments, **keywords)
        add_lora(model, LoraConfig(rank=rank), seed=0)
        return model

    return load


def test_a_policys_loss_that_is_not_finite_ends_the_run(tiny_model_dir: Path) -> None:
    trained = cluster.policy(str(tiny_model_dir), dtype=torch.float16)
    with pytest.raises(NonFiniteUpdateError, match="The loss is inf"):
        trained.update([cluster.batch()], cluster.broken)
    assert trained.state_dict()["loss_scale"]["factor"] == 2.0**16
    metrics = trained.update([cluster.batch()], cluster.steep)  # a finite one, whose gradient is not
    assert metrics["skipped_steps"] == 1.0
    assert "grad_norm" not in metrics


def test_a_critic_trains_as_in_float32(tiny_model_dir: Path) -> None:
    """Its head is float32."""
    values = {}
    for dtype in (torch.float16, torch.float32):
        model, head = load_critic(str(tiny_model_dir), dtype=dtype, device=torch.device("cpu"), flag=cluster.FLAG)
        critic = TorchValue(model, load_tokenizer(str(tiny_model_dir), flag=cluster.FLAG), cluster.SETTINGS, head=head)
        metrics = cluster.fitted(critic)
        values[dtype] = critic.values(cluster.batch())
        assert ("loss_scale" in metrics) == (dtype == torch.float16)
    assert values[torch.float32].abs().max() > 0.01
    torch.testing.assert_close(values[torch.float16], values[torch.float32], rtol=0.02, atol=2e-3)


def test_a_model_whose_activations_exceed_float16_is_refused(tiny_model_dir: Path, tmp_path: Path) -> None:
    model = load_causal_lm(str(tiny_model_dir), dtype=torch.float32, device=torch.device("cpu"), flag=cluster.FLAG)
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.mul_(1e7)
    model.save_pretrained(tmp_path)
    load_causal_lm(str(tmp_path), dtype=torch.bfloat16, device=torch.device("cpu"), flag=cluster.FLAG)
    with pytest.raises(ConfigurationError, match=r"65504.*--actor\.dtype bfloat16"):
        load_causal_lm(str(tmp_path), dtype=torch.float16, device=torch.device("cpu"), flag=cluster.FLAG)
