"""A double of CUDA graphs on a CPU, as strict as they are about addresses."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from rollgrad.adapters.engines.embedded import step_graphs
from rollgrad.adapters.engines.embedded.kv_cache import KVCache
from rollgrad.adapters.engines.embedded.plans import DecodeInputs


class Recorder:
    """Captures by keeping the function. A replay refuses where a graph would compute nonsense without a word: where
    weights, inputs or what is stored lie elsewhere than at the capture. Its result lies where the captured one does."""

    def __init__(self, model: Any) -> None:
        self._weights = [*model.parameters(), *model.buffers()]
        self.cache = KVCache()
        """The cache of the decoder whose steps are captured."""
        self.captures = self.replays = 0
        self.shapes: set[tuple[int, int, int]] = set()
        """A, K and B of each capture."""

    def __call__(
        self, compute: Callable[[DecodeInputs], Tensor], inputs: DecodeInputs
    ) -> tuple[Tensor, Callable[[], object]]:
        """Implements `Capture`."""
        self.captures += 1
        rows, most = inputs.table_AK.shape
        self.shapes.add((rows, most, len(inputs.row_B)))
        result = compute(inputs)
        captured = self._places(inputs)

        def replay() -> None:
            self.replays += 1
            assert self._places(inputs) == captured, "a graph computes at the addresses of its capture"
            result.copy_(compute(inputs))

        return result, replay

    def _places(self, inputs: DecodeInputs) -> list[tuple[int, torch.Size]]:
        stored = [part for pair in self.cache._pairs for part in pair]
        return [(part.data_ptr(), part.shape) for part in (*self._weights, *inputs, *stored)]


class Cuda:
    """A double of what captures need of `torch.cuda`. It says what was done, and refuses what CUDA does: pools whose
    graphs are gone, a capture beside the stream of its warming up, and to give memory back while a capture is under
    way, which one that fails is until its end is told (torch 2.11)."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.stream: object = "own"
        self.pools: list[tuple[int, int]] = []
        """The pool of each graph."""
        self.done: list[str] = []
        self.streams = 0
        """Streams that were made."""
        self.under_way: set[tuple[int, int]] = set()
        """Pools of the captures under way."""
        self.draws = True
        """Whether the generator draws random numbers: its state knows of a capture, a clone of it does not."""
        self._live: dict[tuple[int, int], int] = {}
        cuda = self

        class Stream:
            def __init__(self, device: int = 0) -> None:
                cuda.streams += 1

            def wait_stream(self, other: object) -> None:
                cuda.done.append("wait")

        class Graph:
            def pool(self) -> tuple[int, int]:
                return self.own

            def replay(self) -> None:
                cuda.done.append("replay")

            def __del__(self) -> None:
                cuda._live[self.own] -= 1

            own = (0, 0)

        @contextmanager
        def stream(entered: object) -> Iterator[None]:
            before, cuda.stream = cuda.stream, entered
            yield
            cuda.stream = before

        @contextmanager
        def graph(made: Graph, pool: tuple[int, int], stream: Stream, capture_error_mode: str) -> Iterator[None]:
            assert capture_error_mode == "thread_local"
            assert stream is not own, "torch captures nothing on the default stream"
            assert cuda._live.get(pool) != 0, "torch asserts that another graph of a pool lives"
            made.own = pool
            cuda._live[made.own] = cuda._live.get(made.own, 0) + 1
            cuda.pools.append(made.own)
            cuda.under_way.add(pool)
            cuda.stream, cuda.draws = "capturing", False
            yield  # where the block raises, nothing follows: torch ends the capture first, which then raises
            cuda.under_way.remove(pool)
            cuda.draws = True
            cuda.stream = own

        def end(device: int, pool: tuple[int, int]) -> None:
            if pool not in cuda.under_way:
                raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
            cuda.under_way.remove(pool)

        class Generator:
            def clone_state(self) -> str:
                return "clone"

            def graphsafe_set_state(self, state: str) -> None:
                cuda.draws = state == "clone"

        own = Stream()
        monkeypatch.setattr(step_graphs, "_beside", cache(Stream))
        monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", end, raising=False)
        cuda.stream = own
        cuda._live[Graph.own] = 0
        for name, double in {
            "Stream": Stream,
            "CUDAGraph": Graph,
            "stream": stream,
            "graph": graph,
            "graph_pool_handle": lambda: (0, len(cuda._live) + 1),
            "current_device": lambda: 0,
            "default_generators": (Generator(),),
            "current_stream": lambda: cuda.stream,
            "set_stream": lambda chosen: setattr(cuda, "stream", chosen),
        }.items():
            monkeypatch.setattr(torch.cuda, name, double)
