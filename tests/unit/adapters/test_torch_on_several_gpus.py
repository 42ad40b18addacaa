"""Processes on GPUs of their own that share sequences or experts: what they send each other is what NCCL takes, and the
numbers are those of one process. Processes are threads here, and GPUs are pretended."""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from attrs import evolve
from torch import Tensor, distributed, nn

from rollgrad.adapters.models.deepspeed.tensor_parallel import gradient_norm
from rollgrad.adapters.models.torch import forward
from rollgrad.adapters.models.torch.experts import expert_parallel
from rollgrad.adapters.models.torch.experts.expert_parallel import divided_stacks, exchange_tokens
from rollgrad.adapters.models.torch.forward import PackedLM, scattered
from rollgrad.adapters.models.torch.layers import sequence_parallel
from rollgrad.adapters.models.torch.layers.sequence_parallel import SequenceGroup, sequence_group
from rollgrad.adapters.models.torch.loading.loading import load_causal_lm
from tests.fakes import cluster
from tests.pretended_gpu import CUDA, OnGPU, pretended_gpu
from tests.tiny_architectures import tiny_model

CPU = torch.device("cpu")
SECONDS = 60.0
TAKEN = frozenset(
    {
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
        *(torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool),
    }
)
"""Number formats that torch hands to NCCL (`ncclDataType` in `torch/csrc/distributed/c10d/NCCLUtils.cpp`), but for
those of 8 bits with a point."""


def numbers_for_nccl(tensor: Tensor) -> Tensor:
    """Fails where NCCL refuses a tensor."""
    assert isinstance(tensor, OnGPU), "NCCL sends what is on a GPU alone"
    assert tensor.dtype in TAKEN
    assert tensor.numbers.is_contiguous()
    return tensor.numbers


class Processes:
    """Threads in the place of processes of one group, in each of which `rank` is its number."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._local = threading.local()
        self._barrier = threading.Barrier(size, timeout=SECONDS)
        self._given: list[Any] = [None] * size

    @property
    def rank(self) -> int:
        return int(self._local.rank)

    def all(self, work: Callable[[int], Any]) -> list[Any]:
        """Results of `work` in each process."""

        def as_process(rank: int) -> Any:
            self._local.rank = rank
            try:
                return work(rank)
            except BaseException:
                self._barrier.abort()
                raise

        with ThreadPoolExecutor(self.size) as pool:
            return [each.result() for each in [pool.submit(as_process, rank) for rank in range(self.size)]]

    def _of_all(self, mine: Any) -> list[Any]:
        self._given[self.rank] = mine
        self._barrier.wait()
        found = list(self._given)
        self._barrier.wait()
        return found

    def all_reduce(self, tensor: Tensor, op: Any = distributed.ReduceOp.SUM, group: Any = None) -> None:
        assert op == distributed.ReduceOp.SUM
        own = numbers_for_nccl(tensor)
        own.copy_(torch.stack(self._of_all(own.clone())).sum(0))

    def all_to_all_single(
        self,
        received: Tensor,
        sent: Tensor,
        received_counts: Sequence[int] | None = None,
        counts: Sequence[int] | None = None,
        group: Any = None,
    ) -> None:
        own = numbers_for_nccl(received)
        equal = [len(sent) // self.size] * self.size
        parts = self._of_all([part.clone() for part in numbers_for_nccl(sent).split(list(counts or equal))])
        mine = [part[self.rank] for part in parts]
        assert [len(part) for part in mine] == list(received_counts or equal)
        own.copy_(torch.cat(mine))


@pytest.fixture
def processes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Processes]:
    made = Processes(request.param)
    monkeypatch.setattr(distributed, "all_reduce", made.all_reduce)
    monkeypatch.setattr(distributed, "all_to_all_single", made.all_to_all_single)
    with pretended_gpu():
        yield made


def passed(path: Path, device: torch.device, prepare: Callable[[Any], object] = lambda model: None) -> tuple[Any, Any]:
    """Columns of the action tokens, and the gradients of the sum of their squares by parameter."""
    model = load_causal_lm(str(path), dtype=torch.float32, device=device, flag=cluster.FLAG)
    prepare(model)
    columns_KN = torch.stack(scattered(PackedLM(model)(cluster.batch()), cluster.batch()))
    columns_KN.square().sum().backward()  # type: ignore[no-untyped-call]
    gradients = {name: p.grad.to(CPU) for name, p in model.named_parameters() if p.grad is not None}
    return columns_KN.detach(), gradients


def saved(kind: str, tokenizer: Any, path: Path) -> Path:
    tiny_model(kind, vocab_size=len(tokenizer)).save_pretrained(path)
    return path


@pytest.mark.parametrize(
    ("kind", "processes"), [("llama", 4), ("qwen3_5_text", 2)], indirect=["processes"], ids=["keys", "states"]
)
def test_sequences_go_over_nccl(
    kind: str, processes: Processes, tiny_tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four processes make two teams, because there are two heads of keys."""
    path = saved(kind, tiny_tokenizer, tmp_path)
    expected, wanted = passed(path, CPU)
    monkeypatch.setattr(sequence_parallel, "_joined", SequenceGroup(size=processes.size, group="all"))
    monkeypatch.setattr(forward, "sequence_group", lambda *m: evolve(sequence_group(*m), rank=processes.rank))
    found = processes.all(lambda rank: passed(path, CUDA))
    for columns_KN, _ in found:
        torch.testing.assert_close(columns_KN, expected, rtol=1e-4, atol=1e-5)
    for name, gradient in wanted.items():
        shares = [gradients[name] for _, gradients in found if name in gradients]
        assert (sum(shares) - gradient).norm() <= 1e-5 * gradient.norm()


@pytest.mark.parametrize("processes", [2], indirect=True)
def test_tokens_go_to_experts_over_nccl(
    processes: Processes, tiny_tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = saved("gpt_oss", tiny_tokenizer, tmp_path)
    expected, wanted = passed(path, CPU)
    group = SimpleNamespace(size=processes.size, required=True, own=SimpleNamespace(size=lambda: processes.size))
    monkeypatch.setattr(expert_parallel, "_joined", group)

    def keep_own_experts(model: Any) -> None:
        for stack in divided_stacks(model):
            for name, parameter in list(stack.named_parameters()):
                setattr(stack, name, nn.Parameter(parameter.detach().chunk(processes.size)[processes.rank].clone()))
            exchange_tokens(stack)

    found = processes.all(lambda rank: passed(path, CUDA, keep_own_experts))
    for columns_KN, gradients in found:
        torch.testing.assert_close(columns_KN, expected, rtol=1e-4, atol=1e-5)
        assert gradients.keys() == wanted.keys()
    for name in (each for each in wanted if ".experts." in each):  # both processes have the same sequences
        gradient = torch.cat([gradients[name] for _, gradients in found]) / processes.size
        assert (gradient - wanted[name]).norm() <= 1e-5 * wanted[name].norm()


@pytest.mark.parametrize("processes", [1], indirect=True)
def test_the_norm_of_gradients_goes_over_nccl_where_none_is_divided(
    processes: Processes, monkeypatch: pytest.MonkeyPatch
) -> None:
    from deepspeed.utils import groups

    monkeypatch.setattr(groups, "get_tensor_model_parallel_group", lambda: "all")
    share, whole = (nn.Parameter(torch.ones(2, device=CUDA)) for _ in range(2))
    share.gather_params = None  # type: ignore[attr-defined]  # by which DeepSpeed's are known
    whole.grad = torch.tensor([3.0, 4.0], device=CUDA)
    assert processes.all(lambda rank: gradient_norm([share, whole])) == [5.0]
