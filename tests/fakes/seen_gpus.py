"""Processes of a cluster that tell which machine and which GPUs they see. A cluster's GPUs may be pretended."""

import os
import sys
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from rollgrad.adapters.engines.ray_vllm import EngineHost
from rollgrad.adapters.models.ray.rank_worker import RankWorker

Seen = tuple[str, str | None]
"""Machine, and CUDA_VISIBLE_DEVICES."""


def seen() -> Seen:
    import ray

    return ray.get_runtime_context().get_node_id(), os.environ.get("CUDA_VISIBLE_DEVICES")


class SeeingWorker(RankWorker):
    """Tells what a model in its process would see."""

    def seen(self) -> Seen:
        return seen()


class SeeingEngine:
    """In the place of a `VLLMEngine`, tells what vLLM's processes would be given."""

    max_tokens = 100

    def __init__(self, **_: Any) -> None:
        self._seen = seen()

    async def seen(self) -> Seen:
        return self._seen

    def close(self) -> None:
        pass


class SeeingHost(EngineHost):
    """Has a `SeeingEngine`."""

    async def start(self, settings: Mapping[str, Any], devices: Sequence[str]) -> int | None:
        sys.modules["rollgrad.adapters.engines.vllm.engine"] = SimpleNamespace(VLLMEngine=SeeingEngine)  # type: ignore[assignment]
        return await super().start(settings, devices)
