"""Tests of weights on several GPUs start engines and a divided policy, also where earlier tests have left a Ray."""

import sys
from pathlib import Path
from typing import Any
from unittest.mock import create_autospec

import pytest

from rollgrad.adapters.weights.channel import FleetWeights
from tests.fakes import gpu_weights


class OneRay:
    """Refuses to begin twice, as Ray does."""

    begun = True

    def init(self, **_: Any) -> None:
        if self.begun:
            raise RuntimeError("Maybe you called ray.init twice by accident?")
        self.begun = True

    def shutdown(self) -> None:
        self.begun = False


@pytest.mark.parametrize("start", [gpu_weights.between_gpus, gpu_weights.within_two_gpus])
async def test_engines_and_a_divided_policy_start(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ray = OneRay()
    monkeypatch.setitem(sys.modules, "ray", ray)  # type: ignore[arg-type]
    for name in ("Placement", "WorkerGroup", "begin_workers", "start_engines", "ShardedPolicy", "EngineFleet"):
        monkeypatch.setattr(gpu_weights, name, create_autospec(getattr(gpu_weights, name)))
    async with start(Path("model")) as (channel, fleet, policy):
        assert isinstance(channel, FleetWeights)
        assert ray.begun
        assert gpu_weights.ShardedPolicy.return_value is policy  # type: ignore[attr-defined]
        gpu_weights.start_engines.assert_awaited_once()  # type: ignore[attr-defined]
    fleet.aclose.assert_awaited_once()
    assert not ray.begun
