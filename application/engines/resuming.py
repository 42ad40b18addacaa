"""Continues requests that an engine aborts, which is "recompute" when weights change in flight.

The tokens so far become part of the prompt, so that their keys and values are computed again under the new weights;
each token keeps the log-prob and the version with which it was sampled.
"""

from collections.abc import Callable, Mapping, Sequence

from attrs import evolve

from rollgrad.application.engines.wrapped import WrappedEngine
from rollgrad.domain.episodes.generation import Generation, GenerationRequest, StopReason
from rollgrad.domain.episodes.routed import RoutedTokens, recorded
from rollgrad.domain.episodes.top_logprobs import end_to_end
from rollgrad.domain.ports.profiled import Profiled


class ContinuingEngine(WrappedEngine):
    """An engine that continues a request of `inner` that `pause(ABORT)` ends, after `resume`, and returns it whole."""

    async def generate(
        self, request: GenerationRequest, *, on_token: Callable[[int], None] | None = None
    ) -> Generation:
        """Implements `RolloutEngine.generate`; never ends with ABORTED."""
        tokens: list[int] = []
        logprobs: list[float] = []
        versions: list[int] = []
        top_logprobs: list[Sequence[Sequence[tuple[int, float]]]] = []
        routed: list[RoutedTokens] = []
        kept: int | None = None
        while True:
            part = await self._inner.generate(
                remaining(request, tokens, recorded(routed, request.known_experts)), on_token=on_token
            )
            kept = kept if tokens else part.kept
            tokens.extend(part.token_ids)
            logprobs.extend(part.logprobs)
            versions.extend(part.versions)
            top_logprobs.append(part.top_logprobs)
            routed.extend(part.routed)
            if part.stop_reason is not StopReason.ABORTED:
                return Generation(
                    token_ids=tokens,
                    logprobs=logprobs,
                    versions=versions,
                    stop_reason=part.stop_reason,
                    top_logprobs=end_to_end(top_logprobs),
                    routed=tuple(routed),
                    kept=kept,
                )

    async def begin_profile(self) -> None:
        """Implements `Profiled.begin_profile`, for an engine that is one."""
        if isinstance(self._inner, Profiled):
            await self._inner.begin_profile()

    async def end_profile(self) -> Mapping[str, bytes]:
        """Implements `Profiled.end_profile`."""
        return await self._inner.end_profile() if isinstance(self._inner, Profiled) else {}


def remaining(request: GenerationRequest, tokens: Sequence[int], known_experts: int) -> GenerationRequest:
    """Returns the rest of `request`, which follows `tokens`."""
    if not tokens:
        return request
    params = request.params
    return evolve(
        request,
        prompt_token_ids=(*request.prompt_token_ids, *tokens),
        begun=request.begun + len(tokens),
        known_experts=known_experts,
        params=evolve(
            params,
            max_new_tokens=params.max_new_tokens - len(tokens),
            min_new_tokens=max(0, params.min_new_tokens - len(tokens)),
        ),
    )
