"""A GPU's memory besides a model: states that are saved, freed blocks, and the head's logits."""

import gc
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from rollgrad.adapters.models.deepspeed.settings import DeepSpeedSettings, make_adam
from rollgrad.adapters.models.ray import rank_worker
from rollgrad.adapters.models.ray.rank_worker import RankWorker
from rollgrad.adapters.models.torch import allocator
from rollgrad.adapters.models.torch.heads import chunked_logprobs
from rollgrad.adapters.models.torch.heads.chunked_logprobs import CHUNK_BYTES, chunk_bytes, token_logprobs
from rollgrad.adapters.models.torch.heads.logits import LogitForm
from rollgrad.adapters.models.torch.optimizers.optimizer import MasterOptimizer, OptimizerSettings
from rollgrad.adapters.models.torch.optimizers.optimizer_state import MOMENTS

CUDA = torch.device("cuda", 0)
GIB = 2**30


def tensors(state: object) -> list[Tensor]:
    if isinstance(state, dict):
        return [tensor for part in state.values() for tensor in tensors(part)]
    return [state] if isinstance(state, Tensor) else []


def test_a_state_to_save_takes_no_memory_of_the_gpu() -> None:
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode():  # tensors of a GPU, without their numbers
        shapes = [(2, 3), (2,)]
        module = nn.ParameterList(nn.Parameter(torch.empty(s, device=CUDA, dtype=torch.bfloat16)) for s in shapes)
        optimizer = MasterOptimizer(module, OptimizerSettings(lr=0.1))
        for master in optimizer._masters:
            assert master.device == CUDA
            moments = {key: torch.zeros_like(master) for key in MOMENTS}
            optimizer._stepping.state[master] = {"step": torch.zeros((), device=CUDA), **moments}
        saved = tensors(optimizer.state_dict())
        assert len(saved) == 2 * (1 + 3)  # masters, steps and moments of two parameters
        assert {tensor.device.type for tensor in saved} == {"cpu"}


def test_a_state_is_a_copy() -> None:
    module = nn.Linear(3, 2)
    optimizer = MasterOptimizer(module, OptimizerSettings(lr=0.1))
    optimizer.backward(module(torch.ones(1, 3)).sum())
    optimizer.step()
    saved = optimizer.state_dict()
    before = [tensor.clone() for tensor in tensors(saved)]
    optimizer.backward(module(torch.ones(1, 3)).sum())
    optimizer.step()
    assert all(map(torch.equal, tensors(saved), before))
    optimizer.load_state_dict(saved)
    assert all(map(torch.equal, tensors(optimizer.state_dict()), before))


@pytest.mark.parametrize(
    ("method", "own_gpu", "given_back"),
    [
        ("update", False, True),
        ("score", False, True),
        ("judge", False, True),
        ("skip_weights", False, True),  # the end of a transfer, in processes that send
        ("gather_weights", False, True),  # and in those that take part
        ("gather_adapter", False, True),
        ("next_update", False, False),
        ("update", True, False),
        ("judge", True, False),
    ],
)
def test_a_process_that_shares_its_gpu_gives_memory_back_after_passes_and_transfers(
    method: str, own_gpu: bool, given_back: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    happened: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "ipc_collect", lambda: happened.append("ipc_collect"))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: happened.append("empty_cache"))
    monkeypatch.setattr(gc, "disable", lambda: None)
    monkeypatch.setattr(rank_worker, "show_gpus", lambda: None)  # Ray knows them, and there is none
    worker = RankWorker(0, 1, torch.get_num_threads(), own_gpu=own_gpu)
    worker._model = SimpleNamespace(**{method: lambda: happened.append(method)})
    worker.call(method)
    assert happened == [method, *(("ipc_collect", "empty_cache") if given_back else ())]


def test_a_process_that_never_used_a_gpu_does_not_start_to(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: pytest.fail("this makes a context of CUDA"))
    allocator.give_back_freed_memory()


@pytest.mark.parametrize(("memory", "expected"), [(80 * GIB, 80 * GIB // 64), (2 * GIB, CHUNK_BYTES)], ids=str)
def test_the_head_s_chunks_grow_with_the_gpu(memory: int, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=memory))
    assert chunk_bytes(CUDA) == expected
    assert chunk_bytes(torch.device("cpu")) == CHUNK_BYTES


def test_a_chunk_is_as_large_as_the_device_says(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, vocabulary, seen = 10, 7, list[int]()
    monkeypatch.setattr(chunked_logprobs, "chunk_bytes", lambda device: 4 * vocabulary * 3)
    plain = LogitForm.product

    def product(form: LogitForm, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        seen.append(len(hidden))
        return plain(form, hidden, weight, bias)

    monkeypatch.setattr(LogitForm, "product", product)
    hidden, weight = torch.randn(rows, 4, requires_grad=True), torch.randn(vocabulary, 4)
    sum(
        part.sum() for part in token_logprobs(hidden, weight, None, torch.zeros(rows, dtype=torch.long), 1.0)
    ).backward()
    assert seen == [3, 3, 3, 1, 3, 3, 3, 1]


def test_no_optimizer_makes_copies_of_all_it_steps() -> None:
    settings = OptimizerSettings(lr=0.1)
    groups = [{"params": [nn.Parameter(torch.zeros(2))], "lr": 0.1}]
    adam = make_adam(groups, settings=settings, division=DeepSpeedSettings())
    assert adam.defaults["fused"] is True


@pytest.mark.gpu
def test_a_run_on_a_gpu_continues_from_its_state_as_if_it_had_not_ended() -> None:
    def made() -> tuple[nn.Module, MasterOptimizer]:
        torch.manual_seed(0)
        module = nn.Linear(64, 64, device=CUDA, dtype=torch.bfloat16)
        return module, MasterOptimizer(module, OptimizerSettings(lr=0.1))

    def steps(module: nn.Module, optimizer: MasterOptimizer, count: int) -> None:
        for _ in range(count):
            optimizer.backward(module(torch.ones(2, 64, device=CUDA, dtype=torch.bfloat16)).square().sum())
            optimizer.step()

    whole, interrupted, continued = made(), made(), made()
    steps(*whole, 4)
    steps(*interrupted, 2)
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    saved = interrupted[1].state_dict()
    assert torch.cuda.memory_allocated() == held
    continued[1].load_state_dict(saved)
    steps(*continued, 2)
    for mine, theirs in zip(continued[0].parameters(), whole[0].parameters(), strict=True):
        assert torch.equal(mine, theirs)
