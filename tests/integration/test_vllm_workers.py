"""Workers of vLLM whose calls fail, by vLLM's own code between an engine and them, without its processes."""

from collections import deque
from collections.abc import Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rollgrad.adapters.engines.vllm.async_llm import LocalCore
from rollgrad.adapters.engines.vllm.engine import CoreEngine
from rollgrad.adapters.engines.vllm.plugin import register
from rollgrad.adapters.engines.vllm.weight_receiver import _GPUReceiver
from rollgrad.domain.errors import EngineError

pytestmark = pytest.mark.slow


class Replies(deque[Any]):
    """Stands for a queue in shared memory, in which the answers of a worker lie."""

    def dequeue(self, timeout: float | None = None) -> Any:
        if not self and timeout is not None:
            raise TimeoutError
        return self.popleft()

    enqueue = deque.append


class Requests:
    """Stands for the one from which all workers read what they are asked; they answer at once."""

    def __init__(self, workers: Sequence[Any]) -> None:
        self._workers = workers

    def enqueue(self, request: Any) -> None:
        for worker in self._workers:
            worker._execute_worker_rpc(request)


@cache
def settings() -> Any:
    from vllm.config import VllmConfig

    return VllmConfig()


class LLM:
    """An `AsyncLLM` whose workers are in this process."""

    model_config = SimpleNamespace(max_model_len=64, dtype=torch.float32, get_vocab_size=lambda: 100, quantization=None)
    cache = SimpleNamespace(enable_prefix_caching=True, cache_dtype="auto")
    vllm_config = SimpleNamespace(cache_config=cache, speculative_config=None)
    errored = False

    def __init__(self, ends: Sequence[Any]) -> None:
        from vllm.v1.executor.multiproc_executor import MultiprocExecutor, WorkerProc
        from vllm.v1.worker.gpu_worker import Worker
        from vllm.v1.worker.worker_base import WorkerWrapperBase

        register()
        self.replies = [Replies() for _ in ends]
        procs = []
        for rank, (end, replies) in enumerate(zip(ends, self.replies, strict=True)):
            proc, wrapper, worker = (object.__new__(kind) for kind in (WorkerProc, WorkerWrapperBase, Worker))
            vars(worker).update(
                weight_transfer_engine=end,
                vllm_config=settings(),
                model_runner=SimpleNamespace(reset_lora_state=lambda: None),
                _weight_update_active=False,
                _weight_update_is_draft=False,
            )
            wrapper.worker = worker
            vars(proc).update(worker=wrapper, rank=rank, use_async_scheduling=False, worker_response_mq=replies)
            procs.append(proc)
        self._executor = object.__new__(MultiprocExecutor)
        vars(self._executor).update(
            rpc_broadcast_mq=Requests(procs),
            response_mqs=self.replies,
            is_failed=False,
            futures_queue=deque(),
            vllm_config=settings(),
        )

    async def collective_rpc(self, method: str, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        return self._executor.collective_rpc(method, args=args, kwargs=kwargs)

    async def init_weight_transfer_engine(self, request: Any) -> None:
        await self.collective_rpc("init_weight_transfer_engine", kwargs={"init_info": request.init_info})

    async def shutdown_weight_transfer_engine(self) -> None:
        await self.collective_rpc("shutdown_weight_transfer_engine")

    async def start_weight_update(self) -> None:
        await self.collective_rpc("start_weight_update")

    async def update_weights(self, request: Any) -> None:
        await self.collective_rpc("update_weights", kwargs={"update_info": request.update_info})

    async def finish_weight_update(self) -> None:
        await self.collective_rpc("finish_weight_update")


class End(_GPUReceiver):
    """The end of a way of weights by GPUs in a worker to which no weight comes."""

    def __init__(self) -> None:
        self.joined = 0

    def parse_init_info(self, info: Any) -> Any:
        return info

    def init_transfer_engine(self, info: Any) -> None:
        self.joined += 1

    def shutdown(self) -> None:
        pass

    def start_weight_update(self) -> None:
        self._begun, self._complete = True, False

    def update_weights(self, update: Any) -> None:
        raise ValueError("the trainer has no bucket on this GPU")

    def reset_weight_update_target(self) -> None:
        pass

    def _check(self) -> None:
        raise ValueError("these parameters did not come from the trainer")

    def _end(self) -> None:
        self._begun = False

    def _bucket(self, update_info: Any, size: int) -> torch.Tensor:
        raise AssertionError


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("taken", [False, True], ids=["begun", "failed"])
async def test_workers_take_the_next_transfer_after_one_that_broke_off(workers: int, taken: bool) -> None:
    ends = [End() for _ in range(workers)]
    llm = LLM(ends)
    engine = CoreEngine(LocalCore(llm), eos_token_ids=())
    for number in (1, 2):
        await engine.begin_weights({"packed": True})
        assert [end.joined for end in ends] == [number] * workers
        if taken:
            with pytest.raises(EngineError, match="the trainer has no bucket on this GPU"):
                await engine.take_weights({})
        await engine.abandon_weights("An engine died.")
        assert not any(llm.replies), "answers to this transfer would be taken for those to the next"


@pytest.mark.parametrize("workers", [1, 2])
async def test_a_transfer_without_all_weights_says_so_and_may_be_abandoned(workers: int) -> None:
    llm = LLM([End() for _ in range(workers)])
    engine = CoreEngine(LocalCore(llm), eos_token_ids=())
    for _ in range(2):
        await engine.begin_weights(None)
        with pytest.raises(EngineError, match="these parameters did not come"):
            await engine.finish_weights(1)
        await engine.abandon_weights("Weights were lacking.")
        assert not any(llm.replies)


async def test_a_worker_that_waits_for_one_which_has_failed_holds_its_error_up_for_a_while_only() -> None:
    """As in a broadcast that the failed one does not take part in."""
    llm = LLM([End(), End()])
    engine = CoreEngine(LocalCore(llm), eos_token_ids=())
    await engine.begin_weights(None)
    llm.replies[1].enqueue = lambda _: None  # type: ignore[method-assign, assignment]
    with pytest.raises(EngineError, match="the trainer has no bucket on this GPU"):
        await engine.take_weights({})
    with pytest.raises(EngineError, match="Executor failed"):
        await engine.take_weights({})


def make_end() -> None:
    """Does what vLLM's workers do of a channel's end, by the plugin."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    register()
    config = SimpleNamespace(backend="rollgrad")
    WeightTransferEngineFactory.create_engine(config, settings(), torch.device("cpu"), torch.nn.Linear(1, 1))


@pytest.mark.parametrize("words", ["Memory usage increased after sleeping.", "no memory to copy the weights to"])
def test_memory_that_another_process_takes_meanwhile_does_not_keep_a_worker_awake(
    words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its memory is given up by then, and is not taken back unless vLLM knows so. Nothing else is passed over."""
    from vllm.v1.worker.gpu_worker import Worker

    make_end()
    free = iter([8, 6])
    worker, slept = object.__new__(Worker), list[int]()

    def suspend(level: int) -> None:
        assert "increased" in words, words
        slept.append(level)

    config = SimpleNamespace(model_config=SimpleNamespace(enable_nccl_comm_suspend=False))
    vars(worker).update(vllm_config=config, _sleep_mode_backend=SimpleNamespace(suspend=suspend))
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda: (next(free), 10))
    if "increased" in words:
        worker.sleep(1)
        assert slept == [1]
    else:
        with pytest.raises(AssertionError, match=words):
            worker.sleep(1)
