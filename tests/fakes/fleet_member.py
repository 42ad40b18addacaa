"""A `FleetMember` around an engine, which can be killed, frozen and kept from starting."""

import asyncio
from collections.abc import Callable
from typing import Any

from rollgrad.application.engines.fleet_member import FleetMember
from rollgrad.domain.episodes.generation import Generation, GenerationRequest
from rollgrad.domain.errors import EngineError
from rollgrad.domain.ports.rollout_engine import PauseMode
from rollgrad.testing.rollout_engine import FakeRolloutEngine


class FakeFleetMember(FleetMember):
    """`kill` ends the process: all that wait for it get an error, as does everything until `restart`. `freeze` makes it
    silent: nothing is ever answered again until `restart`. `fail_starts`: so many of the next restarts fail. `make`:
    makes its engine, also after a death."""

    def __init__(self, make: Callable[[], Any] = FakeRolloutEngine) -> None:
        self._make = make
        self.engine = make()
        self.restarts = 0
        self.pings = 0
        self.fail_starts = 0
        self.closed = False
        self.served: list[tuple[GenerationRequest, int]] = []
        """Requests it took, and the version it had."""
        self._frozen = False
        self._dead = asyncio.Event()

    @property
    def version(self) -> int:
        return self.engine.version

    def set_version(self, version: int) -> None:
        self.engine.set_version(version)

    @property
    def dead(self) -> bool:
        return self._dead.is_set()

    def kill(self) -> None:
        self._dead.set()

    def freeze(self) -> None:
        self._frozen = True

    async def _while_alive(self, work: "asyncio.Future[Generation] | asyncio.Future[None]") -> Generation | None:
        death = asyncio.ensure_future(self._dead.wait())
        try:
            await asyncio.wait([work, death], return_when=asyncio.FIRST_COMPLETED)
            if self._frozen:
                await asyncio.Event().wait()
            if self._dead.is_set():
                raise EngineError("The engine's process has died.")
            return work.result()
        finally:
            death.cancel()
            work.cancel()

    async def generate(
        self, request: GenerationRequest, *, on_token: Callable[[int], None] | None = None
    ) -> Generation:
        self.served.append((request, self.engine.version))
        answer = await self._while_alive(asyncio.ensure_future(self.engine.generate(request, on_token=on_token)))
        assert answer is not None
        return answer

    async def ping(self) -> None:
        self.pings += 1
        await self._while_alive(asyncio.ensure_future(asyncio.sleep(0)))

    async def pause(self, mode: PauseMode) -> None:
        await self._while_alive(asyncio.ensure_future(self.engine.pause(mode)))

    async def resume(self) -> None:
        await self._while_alive(asyncio.ensure_future(self.engine.resume()))

    async def sleep(self) -> None:
        await self._while_alive(asyncio.ensure_future(self.engine.sleep()))

    async def wake(self) -> None:
        await self._while_alive(asyncio.ensure_future(self.engine.wake()))

    async def restart(self) -> None:
        self.restarts += 1
        await asyncio.sleep(0)
        if self.fail_starts:
            self.fail_starts -= 1
            raise EngineError("There is no room for the engine.")
        former, self.engine = self.engine, self._make()
        if isinstance(former, FakeRolloutEngine):
            self.engine.latency = former.latency
        self._frozen = False
        self._dead = asyncio.Event()

    async def close(self) -> None:
        self.closed = True
        self.kill()
