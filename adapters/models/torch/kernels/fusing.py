"""Functions of tensors that a GPU computes in one go: `torch.compile` joins what they compute of each element, so that
it is read and written once and not by each operation. Tells the time that torch takes to compile anything.

Does not own: the layers of a model (`compiling.py`).
"""

import time
from collections.abc import Callable
from functools import cache, cached_property
from typing import Any

import structlog
import torch
from torch import Tensor

from rollgrad.adapters.models.torch.kernels.determinism import are_deterministic
from rollgrad.adapters.system.waiting import AFTER_SECONDS

log = structlog.get_logger(__name__)

GRAPHS = 32
"""Graphs of one function at most, after which torch computes it without."""

Function = Callable[..., Tensor]


@cache
def fused(function: Function) -> Function:
    """Returns what computes the same, fused, as a function whose first argument is a tensor that it may overwrite; for
    devices where that is worth while (`is_fused`)."""
    return _Fused(function)


def is_fused(device: torch.device) -> bool:
    """Returns whether functions are fused on a device: on a GPU, unless kernels are to be deterministic, which the
    choice of fused ones is not."""
    return device.type == "cuda" and not are_deterministic()


class _Fused:
    def __init__(self, function: Function) -> None:
        self._plain = function
        self._works = True

    @cached_property
    def _compiled(self) -> Function:
        """The function, made when it is first called: torch's compiler takes a second to import."""
        tell_time("output head")
        return compiled(self._on_a_copy)

    def _on_a_copy(self, first: Tensor, *others: Any) -> Tensor:
        """Spares the compiled function from writing what is overwritten, which nobody reads; the copy is not made."""
        return self._plain(first.clone(), *others)

    def __call__(self, first: Tensor, *others: Any) -> Tensor:
        """Computes the function; without fusing once that has failed."""
        if not self._works:
            return self._plain(first, *others)
        try:
            return self._compiled(first, *others)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # of torch, of Triton, or of the compiler that is not there
            log.warning(f"torch.compile fails on this machine ({reason(error)}): updates take longer.")
            self._works = False
            return self._plain(first, *others)


def reason(error: Exception) -> str:
    """Returns in words why torch could not compile."""
    cause = getattr(error, "inner_exception", error)
    return (str(cause).strip() or type(cause).__name__).split("\n")[0].rstrip(".:")


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function compiled by `torch.compile`, with sizes that are variables, at its first calls."""
    if torch.__version__ >= "2.12":  # the argument that its annotations have forgotten
        return torch.compile(function, dynamic=True, recompile_limit=GRAPHS)  # type: ignore[call-overload, no-any-return]
    # settings of all threads
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, GRAPHS)
    return torch.compile(function, dynamic=True)


def tell_time(cause: str) -> None:
    """Has the time that compiling takes in this process logged, from now on, with what it is compiled for."""
    _time().causes[cause] = None


@cache
def _time() -> "_CompileTime":
    from torch._dynamo.callback import on_compile_end, on_compile_start

    told = _CompileTime()
    on_compile_start(told.begin)
    on_compile_end(told.end)
    return told


class _CompileTime:
    """Logs the seconds that compiling has taken in this process, whenever some more have passed."""

    def __init__(self) -> None:
        self.causes: dict[str, None] = {}
        self._seconds = self._told = self._begun = 0.0

    def begin(self, _: Any) -> None:
        """Notes that torch begins to compile."""
        self._begun = time.monotonic()

    def end(self, _: Any) -> None:
        """Notes that it has ended."""
        self._seconds += time.monotonic() - self._begun
        if self._seconds >= self._told + AFTER_SECONDS:
            self._told = self._seconds
            log.info(f"torch.compile has taken {self._seconds:.0f} s so far ({', '.join(self.causes)})")
