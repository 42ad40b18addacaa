"""Port: samples token ids that continue token ids."""

from collections.abc import Callable
from enum import StrEnum
from typing import Protocol, runtime_checkable

from rollgrad.domain.episodes.generation import Generation, GenerationRequest


class PauseMode(StrEnum):
    """Treatment of requests in flight when generation pauses."""

    ABORT = "abort"
    """They return at once, with StopReason.ABORTED and the tokens so far."""
    WAIT = "wait"
    """Requests that have begun finish first; `pause` returns after the last of them. Others wait for `resume`."""
    KEEP = "keep"
    """They are frozen and continue after `resume`, with the weights of that moment."""


@runtime_checkable
class SampleListener(Protocol):
    """An `on_token` that wants to know how each token was sampled; engines that can tell do so before each token."""

    def __call__(self, token: int) -> None:
        """Hears a token."""
        ...

    def sampled(self, logprob: float, version: int, last: bool) -> None:
        """Hears of the token that comes next: its log-prob, the version of the policy that sampled it, and whether it
        is the reply's last."""
        ...


def tell(on_token: Callable[[int], None], token: int, logprob: float, version: int, *, last: bool) -> None:
    """Tells a listener a token, and how it was sampled if it wants to know."""
    if isinstance(on_token, SampleListener):
        on_token.sampled(logprob, version, last)
    on_token(token)


@runtime_checkable
class RolloutEngine(Protocol):
    """Samples from the policy.

    Promises: a request's tokens depend on its own seed, prompt and the weights, not on its neighbours (up to
    floating-point rounding of batched products). Log-probs are exact under the sampling distribution that was used.
    Every token carries the policy version that sampled it. Concurrent `generate` calls are batched.

    Errors: `EngineError` when generation fails. Cancelling a `generate` call frees its place.
    """

    max_tokens: int | None = None
    """Tokens of a prompt and its reply at most; None where nothing is known of a limit."""

    async def generate(
        self, request: GenerationRequest, *, on_token: Callable[[int], None] | None = None
    ) -> Generation:
        """Completes one request. `on_token` is called with each token as it is sampled, in the caller's event loop; it
        must not block."""
        ...

    async def pause(self, mode: PauseMode) -> None:
        """Stops generation so that weights may change; idempotent."""
        ...

    async def resume(self) -> None:
        """Continues after `pause`; idempotent."""
        ...

    async def sleep(self) -> None:
        """Releases memory that can be rebuilt (caches); refuses while requests are in flight; those
        that come meanwhile wait for `wake`; idempotent."""
        ...

    async def wake(self) -> None:
        """Allocates again what `sleep` released; idempotent."""
        ...
