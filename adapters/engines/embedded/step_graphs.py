"""Decoding steps of a GPU as CUDA graphs: a step of the same shapes as an earlier one is launched as a whole, which
spares the time in which Python starts its kernels one by one.

Shapes are padded to powers of two (`DecodeInputs.padded`), so that few graphs serve all steps. A graph computes at the
addresses with which it was captured. So inputs are copied to the addresses of its own, stored tensors never move while
they exist, and all graphs are dropped when weights have moved, or when the engine gives its memory back (`clear`). The
inputs of a step are parts of one tensor, which one copy brings there.
Does not own: what a step computes.
"""

import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any

import structlog
import torch
from attrs import frozen
from torch import Tensor

from rollgrad.adapters.engines.embedded.plans import DecodeInputs
from rollgrad.adapters.models.torch.kernels.moving import to_device
from rollgrad.adapters.models.torch.loading.compatibility import length_dependent_positions

log = structlog.get_logger(__name__)

Compute = Callable[[DecodeInputs], Tensor]
"""Function that takes a step, always in the same way, and may take it several times."""

Capture = Callable[[Compute, DecodeInputs], tuple[Tensor, Callable[[], object]]]
"""Function that captures a step: returns its result, and a function that computes that anew from what the inputs then
hold."""

WARM_UPS = 2
"""Steps before a capture, in which libraries choose kernels and make their workspaces."""


@frozen(eq=False)
class _Captured:
    """A captured step: its inputs, one after the other, its result, and what computes it."""

    inputs: Tensor
    result: Tensor
    replay: Callable[[], object]


class StepGraphs:
    """The captured decoding steps of a model, by their shapes."""

    def __init__(self, model: Any, device: torch.device, capture: Capture) -> None:
        self._weights = [*model.parameters(), *model.buffers()]
        self._device, self._capture = device, capture
        self._addresses: list[int] = []
        self._captured: dict[tuple[torch.Size, ...], _Captured] = {}

    def run(self, inputs: DecodeInputs, compute: Compute) -> Tensor:
        """Returns the result of a step whose inputs are on the CPU; the next step of these shapes overwrites it."""
        addresses = [weight.data_ptr() for weight in self._weights]
        if addresses != self._addresses:
            self.clear()
            self._addresses = addresses
        shapes = tuple(part.shape for part in inputs)
        numbers = inputs.joined()
        if shapes not in self._captured:
            own = numbers.to(self._device, copy=True)
            self._captured[shapes] = _Captured(own, *self._capturing(compute, inputs.parts(own)))
        step = self._captured[shapes]
        step.inputs.copy_(to_device(numbers, self._device))
        step.replay()
        return step.result

    def _capturing(self, compute: Compute, inputs: DecodeInputs) -> tuple[Tensor, Callable[[], object]]:
        """Captures a step; once that has failed, steps are taken one by one."""
        try:
            return self._capture(compute, inputs)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            reason = str(error).strip().split("\n")[0].rstrip(".")
            log.warning(f"The model's decoding steps cannot be captured as CUDA graphs ({reason}): they take longer.")
            self._capture = uncaptured
            return uncaptured(compute, inputs)

    def clear(self) -> None:
        """Drops all graphs, and their memory."""
        self._captured.clear()


def uncaptured(compute: Compute, inputs: DecodeInputs) -> tuple[Tensor, Callable[[], object]]:
    """Implements `Capture` without one."""
    result = compute(inputs)
    return result, lambda: result.copy_(compute(inputs))


class CudaCapture:
    """Captures by CUDA graphs, which share the memory of what they compute on the way: one runs after the other."""

    def __init__(self) -> None:
        self._latest: Callable[[], Any] = lambda: None
        """Returns the graph that was captured last, None where it was dropped: its pool of memory is then gone."""

    def __call__(self, compute: Compute, inputs: DecodeInputs) -> tuple[Tensor, Callable[[], object]]:
        """Implements `Capture`."""
        stream, beside = torch.cuda.current_stream(), _beside(torch.cuda.current_device())
        beside.wait_stream(stream)
        with torch.cuda.stream(beside):
            for _ in range(WARM_UPS):
                compute(inputs)
        stream.wait_stream(beside)
        graph, latest = torch.cuda.CUDAGraph(), self._latest()
        pool = torch.cuda.graph_pool_handle() if latest is None else latest.pool()
        try:
            # Threads that train meanwhile may allocate memory.
            with torch.cuda.graph(graph, pool=pool, stream=beside, capture_error_mode="thread_local"):
                result = compute(inputs)
        except BaseException:
            _end_capture(pool)
            raise
        finally:
            torch.cuda.set_stream(stream)  # which torch leaves behind where a capture fails
        self._latest = weakref.ref(graph)
        return result, graph.replay


@cache
def _beside(device: int) -> torch.cuda.Stream:
    """Returns the stream on which steps are warmed up and captured: cuBLAS keeps a workspace for each stream that it
    was ever used on, on Hopper of 32 MiB."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _end_capture(pool: tuple[int, int]) -> None:
    """Tells torch that a failed capture is over. Before 2.13 torch does not notice it by itself: its allocator and its
    generator of random numbers would wait for the end as long as the process lives, so that `empty_cache`
    (pytorch#180395) and `torch.randn` would fail."""
    device = torch.cuda.current_device()
    with suppress(RuntimeError):
        generator = torch.cuda.default_generators[device]
        generator.graphsafe_set_state(generator.clone_state())  # the same numbers follow
    with suppress(RuntimeError):  # it has noticed
        torch._C._cuda_endAllocateToPool(device, pool)


def step_graphs(model: Any, device: torch.device) -> StepGraphs | None:
    """Returns what captures a model's decoding steps on a GPU. None elsewhere, and where a step waits for its numbers:
    mixtures of experts whose products torch does not group in their format, and rotary embeddings whose angles depend
    on the longest sequence."""
    if device.type != "cuda" or length_dependent_positions(model):
        return None
    if model.dtype != torch.bfloat16 and any(hasattr(part, "experts") for part in model.modules()):
        return None
    return StepGraphs(model, device, CudaCapture())
