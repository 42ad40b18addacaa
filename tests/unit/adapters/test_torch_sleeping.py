"""Masters and moments sleep in the CPU's memory, with the same numbers, until a backward pass."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from rollgrad.adapters.models.torch.optimizers import sleeping
from rollgrad.adapters.models.torch.optimizers.muon import MuonSettings
from rollgrad.adapters.models.torch.optimizers.optimizer import MasterOptimizer, OptimizerSettings

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


@given(st.lists(st.integers(0, 3000), max_size=30))
def test_tensors_that_share_slabs_lie_apart(sizes: list[int]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sleeping, "SLAB", 1024)
        slabs, places = sleeping.packed(sizes)
    assert all(size.bit_count() == 1 for size in slabs), "torch would round it up"
    taken: set[tuple[int, int]] = set()
    for size, (slab, first) in zip(sizes, places, strict=True):
        own = {(slab, byte) for byte in range(first, first + size)}
        assert first % sleeping.STEP == 0
        assert first + size <= slabs[slab]
        assert taken.isdisjoint(own)
        taken |= own


def test_slabs_take_little_more_than_a_model_needs() -> None:
    """Masters and moments of Qwen3-0.6B."""
    layer = (2**21, 2**20, 2**20, 2**21, *[3 * 2**20] * 3, 128, 128, 1024, 1024)
    sizes = [4 * numbers for numbers in (151936 * 1024, *layer * 28, 1024) for _ in range(3)]
    slabs, _ = sleeping.packed(sizes)
    assert sum(1 << (size - 1).bit_length() for size in sizes) > 1.3 * sum(sizes), "each alone"
    assert sum(slabs) < 1.06 * sum(sizes)


def test_what_sleeps_beside_a_gpu_shares_slabs_and_no_storage(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files refuse tensors that share a storage, which has what each says it has."""
    made, locked = torch.empty, list[int]()

    def empty(size: int, *, dtype: torch.dtype, pin_memory: bool) -> Tensor:
        assert pin_memory
        locked.append(size)
        return made(size, dtype=dtype)

    monkeypatch.setattr(torch, "empty", empty)
    tensors = [torch.randn(5, 7), torch.randn(3, 4).t(), torch.randn(0), torch.randn(9)]
    before = [tensor.clone() for tensor in tensors]
    sleeping.SleepingTensors(lambda: tensors, CUDA).sleep()
    assert len(locked) == 1
    assert all(map(torch.equal, tensors, before))
    assert [tensor.stride() for tensor in tensors] == [tensor.stride() for tensor in before]
    assert [tensor.untyped_storage().nbytes() for tensor in tensors] == [tensor.nbytes for tensor in before]


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
