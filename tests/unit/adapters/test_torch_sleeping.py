"""Masters and moments sleep in the CPU's memory, with the same numbers, until a backward pass."""

import pytest
import torch
from torch import Tensor, nn

from rollgrad.adapters.models.torch.muon import MuonSettings
from rollgrad.adapters.models.torch.optimizer import MasterOptimizer, OptimizerSettings

CUDA = torch.device("cuda", 0)
ADAM = OptimizerSettings(lr=0.1, ema_beta=0.5)
MUON = OptimizerSettings(lr=0.1, muon=MuonSettings(lr=0.2))


def optimized(settings: OptimizerSettings, dtype: torch.dtype) -> MasterOptimizer:
    torch.manual_seed(0)
    return MasterOptimizer(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)).to(dtype), settings)


def step(optimizer: MasterOptimizer) -> dict[str, float]:
    dtype = optimizer._params[0].dtype
    optimizer.backward(optimizer(torch.linspace(-1, 1, 12, dtype=dtype).view(3, 4)).float().square().sum())
    return optimizer.step()


def kept(optimizer: MasterOptimizer) -> list[Tensor]:
    state = optimizer.state_dict()
    moments = [value for moments in state["moments"].values() for value in moments.values()]
    return [*state["masters"].values(), *state.get("averages", {}).values(), *moments]


def moved(optimizer: MasterOptimizer) -> list[int]:
    """Addresses of what sleeps."""
    return [tensor.data_ptr() for tensor in optimizer._sleepers()]


@pytest.mark.parametrize("settings", [ADAM, MUON])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sleep_changes_no_number(settings: OptimizerSettings, dtype: torch.dtype) -> None:
    resting, awake, early = (optimized(settings, dtype) for _ in range(3))
    early.sleep()  # before there are moments
    assert step(resting) == step(awake) == step(early)
    places = moved(resting)
    assert len(places) == (8 if dtype is torch.float32 else 12) - (2 if settings is MUON else 0)
    resting.sleep()
    assert all(place != now for place, now in zip(places, moved(resting), strict=True))
    assert all(map(torch.equal, kept(resting), kept(awake)))
    resting.sleep()
    assert step(resting) == step(awake)
    assert all(map(torch.equal, kept(resting), kept(awake)))


def test_a_state_is_loaded_into_what_sleeps() -> None:
    begun, continued = optimized(ADAM, torch.bfloat16), optimized(ADAM, torch.bfloat16)
    step(begun)
    continued.sleep()
    continued.load_state_dict(begun.state_dict())
    assert continued._sleeping.asleep
    assert step(continued) == step(begun)
    assert all(map(torch.equal, kept(continued), kept(begun)))


@pytest.mark.gpu
def test_a_gpu_gets_the_memory_back() -> None:
    module = nn.Linear(4096, 4096, bias=False, device=CUDA, dtype=torch.bfloat16)
    optimizer = MasterOptimizer(module, OptimizerSettings(lr=0.1))

    def update() -> None:
        optimizer.backward(optimizer(torch.ones(1, 4096, device=CUDA, dtype=torch.bfloat16)).float().sum())
        optimizer.step()

    update()
    state = kept(optimizer)
    awake = torch.cuda.memory_allocated()
    optimizer.sleep()
    assert awake - torch.cuda.memory_allocated() == 3 * 4 * 4096**2, "master and moments"
    assert all(map(torch.equal, kept(optimizer), state))
    update()
    assert torch.cuda.memory_allocated() == awake


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])  # masters that stay, as FSDP2's do, and that sleep
def test_a_state_is_loaded_into_what_sleeps_beside_a_gpu(dtype: torch.dtype) -> None:
    def made() -> MasterOptimizer:
        return MasterOptimizer(nn.Linear(4, 4, device=CUDA, dtype=dtype), OptimizerSettings(lr=0.1))

    def update(optimizer: MasterOptimizer) -> None:
        optimizer.backward(optimizer(torch.ones(1, 4, device=CUDA, dtype=dtype)).float().sum())
        optimizer.step()

    begun, continued = made(), made()
    update(begun)
    continued.sleep()
    continued.load_state_dict(begun.state_dict())
    for optimizer in (begun, continued):
        update(optimizer)
    assert all(map(torch.equal, kept(continued), kept(begun)))
    devices = {value.device for state in continued._stepping.state.values() for value in state.values()}
    assert devices == {CUDA}
