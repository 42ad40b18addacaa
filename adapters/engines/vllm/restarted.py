"""A vLLM in processes of its own on this machine that starts again when they have died, as one engine of a fleet."""

import asyncio
from collections.abc import Mapping
from typing import Any

from rollgrad.adapters.engines.vllm.engine import CoreEngine, VLLMEngine
from rollgrad.application.engines.fleet_member import FleetMember


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
        """Implements `FleetMember.restart`; vLLM starts in a thread, for which the event loop need not wait."""
        await self.close()
        self._vllm = await asyncio.to_thread(VLLMEngine, **self._settings)
        self._core = self._vllm.core
        self._version, self._broken = 0, None
        self._forget_state()

    async def close(self) -> None:
        """Implements `FleetMember.close`."""
        self._vllm.close()
