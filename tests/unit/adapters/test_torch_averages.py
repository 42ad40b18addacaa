"""Moving averages of the trained weights."""

from contextlib import suppress
from pathlib import Path

import pytest
import torch
from attrs import evolve
from torch import nn

from rollgrad.adapters.models.torch.optimizers.optimizer import MasterOptimizer, OptimizerSettings
from rollgrad.domain.errors import CheckpointError
from tests.fakes import cluster, lora

BETA = 0.8
SETTINGS = OptimizerSettings(lr=0.1, ema_beta=BETA)


def network(dtype: torch.dtype) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(4, 3, dtype=dtype)


def trained(model: nn.Linear, optimizer: MasterOptimizer, steps: int) -> None:
    for _ in range(steps):
        model(torch.ones(2, 4, dtype=model.weight.dtype)).float().square().sum().backward()
        optimizer.step()


@pytest.mark.parametrize(("dtype", "every"), [(torch.float32, 1), (torch.bfloat16, 3)])
def test_averages_follow_the_masters(dtype: torch.dtype, every: int) -> None:
    """In the second case they move after the third step alone."""
    model = network(dtype)
    optimizer = MasterOptimizer(model, evolve(SETTINGS, ema_every=every))
    expected = {name: master.double() for name, master in optimizer.masters().items()}
    for step in range(1, 5):
        trained(model, optimizer, 1)
        for name, master in optimizer.masters().items() if step % every == 0 else ():
            expected[name] = BETA * expected[name] + (1 - BETA) * master.double()
    averages = optimizer.state_dict()["averages"]
    for name, average in averages.items():
        assert average.dtype == torch.float32
        torch.testing.assert_close(average.double(), expected[name], rtol=1e-5, atol=1e-7)

    masters = {name: master.clone() for name, master in optimizer.masters().items()}
    with suppress(CheckpointError), optimizer.averaged():
        assert all(torch.equal(p.detach(), averages[name].to(dtype)) for name, p in model.named_parameters())
        raise CheckpointError("no room")
    for name, parameter in model.named_parameters():
        assert torch.equal(optimizer.masters()[name], masters[name])
        assert torch.equal(parameter.detach(), masters[name].to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_forward_pass_with_averages_copies_no_master(dtype: torch.dtype) -> None:
    """On the CPU parameters that are masters change places with their averages; others hold a rounded copy."""
    model = network(dtype)
    optimizer = MasterOptimizer(model, SETTINGS)
    trained(model, optimizer, 2)
    masters = {name: (master.data_ptr(), master.clone()) for name, master in optimizer.masters().items()}
    averages = optimizer.state_dict()["averages"]
    for _ in range(2):
        with optimizer.averaged():
            for name, master in optimizer.masters().items():
                place, kept = masters[name]
                assert (master.data_ptr() == place) == (dtype != torch.float32)
                assert torch.equal(master, averages[name] if dtype == torch.float32 else kept)
        for name, master in optimizer.masters().items():
            place, kept = masters[name]
            assert master.data_ptr() == place
            assert torch.equal(master, kept)
    assert all(torch.equal(average, averages[name]) for name, average in optimizer.state_dict()["averages"].items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_restored_averages_go_on_as_if_never_stopped(dtype: torch.dtype) -> None:
    whole, resumed = network(dtype), network(dtype)
    first, second = MasterOptimizer(whole, SETTINGS), MasterOptimizer(resumed, SETTINGS)
    trained(whole, first, 3)
    second.load_state_dict(first.state_dict())
    trained(whole, first, 2)
    trained(resumed, second, 2)
    found, wanted = second.state_dict(), first.state_dict()
    for kind in ("masters", "averages"):
        assert all(torch.equal(found[kind][name], tensor) for name, tensor in wanted[kind].items())


@pytest.mark.parametrize("kept", [False, True])
def test_a_state_with_averages_is_none_without(kept: bool) -> None:
    both = [MasterOptimizer(network(torch.float32), OptimizerSettings(lr=0.1, ema_beta=beta)) for beta in (None, BETA)]
    begun, continued = reversed(both) if kept else both
    with pytest.raises(CheckpointError, match=r"has (a|no) moving average.*--train\.enable_ema"):
        continued.load_state_dict(begun.state_dict())


@pytest.mark.parametrize("of_adapters", [False, True])
def test_they_are_saved_as_a_model(of_adapters: bool, tiny_model_dir: Path, tmp_path: Path) -> None:
    """Averages of adapters are merged into the weights."""
    policy = (lora if of_adapters else cluster).policy(str(tiny_model_dir))
    for _ in range(2):
        policy.update([cluster.batch()], cluster.likelihood)
    before = {name: tensor.clone() for name, tensor in policy.weights()}
    policy.save(tmp_path)
    assert all(torch.equal(before[name], tensor) for name, tensor in policy.weights())
    averaged = cluster.policy(str(tmp_path / "ema"))
    assert (tmp_path / "ema" / "adapter").exists() == of_adapters
    with policy._trained.averaged():
        expected = {name: tensor.clone() for name, tensor in policy.weights()}
    for name, tensor in averaged.weights():
        assert torch.equal(tensor, expected[name])
    assert any(not torch.equal(tensor, before[name]) for name, tensor in averaged.weights())
