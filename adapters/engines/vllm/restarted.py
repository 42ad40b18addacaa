"""A vLLM in processes of its own on this machine that starts again when they have died, as one engine of a fleet."""

import asyncio
import multiprocessing
from collections.abc import Mapping
from functools import partial
from multiprocessing.process import BaseProcess
from typing import Any

from rollgrad.adapters.engines.vllm.engine import CoreEngine, VLLMEngine
from rollgrad.adapters.engines.vllm.plugin import ENGINE_CORE
from rollgrad.application.engines.fleet_member import FleetMember

LOOK_SECONDS = 0.05
"""Seconds between two looks for processes of a start that is to end."""


class RestartedVLLM(CoreEngine, FleetMember):
    """A `VLLMEngine` that can be started again. Its first start blocks, like that of a `VLLMEngine`.

    Args:
        settings: arguments of `VLLMEngine`.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._settings = dict(settings)
        self._vllm = VLLMEngine(**self._settings)
        super().__init__(self._vllm.core, eos_token_ids=self._settings["eos_token_ids"])

    async def restart(self) -> None:
        """Implements `FleetMember.restart`; vLLM starts in a thread, for which the event loop need not wait. Cancelled,
        it ends that start with its processes."""
        await self.close()
        others = _cores()
        starting = asyncio.get_running_loop().run_in_executor(None, partial(VLLMEngine, **self._settings))
        try:
            self._vllm = await asyncio.shield(starting)
        except asyncio.CancelledError:
            await _end(starting, others)
            raise
        self._core = self._vllm.core
        self._version, self._broken = 0, None
        self._forget_state()

    async def close(self) -> None:
        """Implements `FleetMember.close`."""
        self._vllm.close()


def _cores() -> set[BaseProcess]:
    """Returns the processes of this one's vLLMs."""
    return {child for child in multiprocessing.active_children() if child.name.startswith(ENGINE_CORE)}


async def _end(starting: "asyncio.Future[VLLMEngine]", others: set[BaseProcess]) -> None:
    """Ends a start of vLLM, which waits for its processes and fails as soon as one dies; `others` are not its own."""
    while not starting.done():
        for core in _cores() - others:
            core.kill()
        await asyncio.wait([starting], timeout=LOOK_SECONDS)
    if starting.exception() is None:
        starting.result().close()
