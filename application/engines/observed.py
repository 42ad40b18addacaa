"""An engine whose answers tell how much of earlier turns it has kept."""

from collections.abc import Callable

from rollgrad.application.engines.wrapped import WrappedEngine
from rollgrad.domain.control.admission import Admission
from rollgrad.domain.episodes.generation import Generation, GenerationRequest
from rollgrad.domain.ports.rollout_engine import RolloutEngine


class ObservedEngine(WrappedEngine):
    """An engine whose answers to later turns of episodes `admission` hears of."""

    def __init__(self, inner: RolloutEngine, admission: Admission) -> None:
        super().__init__(inner)
        self._admission = admission

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
