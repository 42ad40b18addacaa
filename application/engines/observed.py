"""An engine whose answers tell how much of earlier turns it has kept."""

from collections.abc import Callable

from rollgrad.domain.control.admission import Admission
from rollgrad.domain.episodes.generation import Generation, GenerationRequest
from rollgrad.domain.ports.rollout_engine import PauseMode, RolloutEngine


class ObservedEngine(RolloutEngine):
    """An engine whose answers to later turns of episodes `admission` hears of."""

    def __init__(self, inner: RolloutEngine, admission: Admission) -> None:
        self._inner = inner
        self._admission = admission

    @property
    def max_tokens(self) -> int | None:  # type: ignore[override]
        """The inner engine's."""
        return self._inner.max_tokens

    async def generate(
        self, request: GenerationRequest, *, on_token: Callable[[int], None] | None = None
    ) -> Generation:
        """Implements `RolloutEngine.generate`."""
        answer = await self._inner.generate(request, on_token=on_token)
        # Of other weights' keys and values none are kept.
        same = bool(answer.versions) and answer.versions[0] == request.continues_version
        if request.continues and answer.kept is not None and same:
            self._admission.answered(request.continues, answer.kept)
        return answer

    async def pause(self, mode: PauseMode) -> None:
        """Implements `RolloutEngine.pause`."""
        await self._inner.pause(mode)

    async def resume(self) -> None:
        """Implements `RolloutEngine.resume`."""
        await self._inner.resume()

    async def sleep(self) -> None:
        """Implements `RolloutEngine.sleep`."""
        await self._inner.sleep()

    async def wake(self) -> None:
        """Implements `RolloutEngine.wake`."""
        await self._inner.wake()
