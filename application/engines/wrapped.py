"""An engine around another one."""

from rollgrad.domain.ports.rollout_engine import PauseMode, RolloutEngine


class WrappedEngine(RolloutEngine):
    """An engine that hands everything but `generate` on to `inner`."""

    def __init__(self, inner: RolloutEngine) -> None:
        self._inner = inner

    @property
    def max_tokens(self) -> int | None:  # type: ignore[override]
        """The inner engine's."""
        return self._inner.max_tokens

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
