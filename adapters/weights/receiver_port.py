"""Port: the engine's end of a weight transfer, in values that cross processes.

One transfer calls `begin_weights`, `take_weights` for every update, `finish_weights` and `prove_weights`; or, at any
time after the first, `abandon_weights`.
"""

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from attrs import frozen

from rollgrad.domain.errors import EngineError

PROBE_TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.3}
"""Largest mean difference of a log-prob between engine and trainer, nats, by the coarser of their number formats.
Probe tokens are improbable, so their logits are large and rounded the most."""
EIGHT_BITS, FEWER_BITS = 1.5, 8.0
"""Largest such differences where vLLM quantises to as many bits. SmolLM2-135M differs by 0.5 in FP8 and by 3.4 in
MXFP4; with one layer lost by 0.7 to 6, with all layers lost by 22."""


def coarser(one: torch.dtype, other: torch.dtype) -> torch.dtype:
    """Returns the coarser of two number formats."""
    return max(one, other, key=PROBE_TOLERANCE.__getitem__)


class WeightsDifferError(EngineError):
    """An engine took the weights, but its results differ from the trainer's."""


@frozen
class EngineModel:
    """Facts about an engine's model for the trainer: the number format in which it computes, its tokens, and vLLM's
    names of how it quantises weights, or keys and values, none if it does not."""

    dtype: torch.dtype
    vocabulary: int
    quantized: tuple[str, ...] = ()

    def tolerance(self, dtype: torch.dtype) -> float:
        """Returns the largest mean difference of a log-prob that rounding explains between this model and the same
        weights in `dtype`, nats."""
        if not self.quantized:
            return PROBE_TOLERANCE[coarser(self.dtype, dtype)]
        return EIGHT_BITS if all("8" in name for name in self.quantized) else FEWER_BITS


@frozen(kw_only=True)
class Probe:
    """Tokens for a comparison, the trainer's log-probs of all but the first at `temperature`, and the coarsest number
    format of the trainer's weights."""

    tokens: list[int]
    expected: list[float]
    temperature: float
    dtype: torch.dtype

    def difference(self, actual: list[float], model: EngineModel) -> str | None:
        """Returns how an engine with that model differs; None if rounding explains the difference of `actual`."""
        mean = sum(abs(a - b) for a, b in zip(actual, self.expected, strict=True)) / len(self.expected)
        tolerance = model.tolerance(self.dtype)
        if mean <= tolerance:
            return None
        return (
            f"After a transfer of weights, vLLM's log-probs of {len(self.expected)} tokens differ from the trainer's "
            f"by {mean:.2g} nats on average, more than the {tolerance:g} that rounding explains: vLLM computes this "
            "model differently, or did not take all of its weights."
        )


class WeightReceiver(Protocol):
    """The engine's end. All methods raise `EngineError` if it fails or has died."""

    async def begin_weights(self, info: Mapping[str, Any] | None) -> EngineModel:
        """Prepares for a transfer; `info` is vLLM's init info of the backend, None if it has not changed. Nothing is
        sampled until the transfer ends.

        Raises:
            EngineError: requests are in flight and generation is not paused, or the engine sleeps; nothing has changed.
        """
        ...

    async def take_weights(self, update: Mapping[str, Any]) -> None:
        """Copies the weights of an update (vLLM's update info), which may be overwritten afterwards."""
        ...

    async def finish_weights(self, version: int) -> None:
        """Puts the new weights into effect: all tokens sampled from now on carry `version`."""
        ...

    async def prove_weights(self, probe: Probe) -> None:
        """Compares log-probs and ends the transfer; if requests are frozen, `resume` does so.

        Raises:
            WeightsDifferError: they differ by more than rounding; the engine refuses requests until the next transfer.
        """
        ...

    async def abandon_weights(self, reason: str) -> None:
        """Ends an incomplete transfer: requests fail with `reason` until the next transfer succeeds. Frozen requests
        are aborted if `resume` comes before that."""
        ...
