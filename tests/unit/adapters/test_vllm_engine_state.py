"""An engine over vLLM when weights do not arrive, with a core that is no vLLM."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from rollgrad.adapters.engines.vllm.core import Core
from rollgrad.adapters.engines.vllm.engine import CoreEngine
from rollgrad.adapters.weights.receiver_port import EngineModel, Probe
from rollgrad.domain.episodes.generation import Generation, GenerationRequest, SamplingParams, StopReason
from rollgrad.domain.errors import EngineError
from rollgrad.domain.ports.rollout_engine import PauseMode

REQUEST = GenerationRequest(prompt_token_ids=(1,), params=SamplingParams(max_new_tokens=8))


class EndlessCore(Core):
    """Its requests end when they are aborted, after one token."""

    max_tokens = 64
    model = EngineModel(torch.float32, 100)

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.ends: dict[str, asyncio.Event] = {}

    async def sample(self, name: str, *_: Any) -> Generation:
        await self.ends.setdefault(name, asyncio.Event()).wait()
        return Generation(token_ids=[7], logprobs=[-1.0], versions=[0], stop_reason=StopReason.ABORTED)

    async def abort(self, names: Sequence[str]) -> None:
        self.calls.append("abort")
        for name in names:
            self.ends[name].set()

    async def next_logprob(self, *_: Any) -> float:
        return 0.0

    async def thaw(self) -> None:
        self.calls.append("thaw")

    async def forget(self) -> None:
        self.calls.append("forget")

    def set_apart(self) -> None:
        self.calls.append("set apart")


async def frozen_with_half_a_model(core: EndlessCore) -> tuple[CoreEngine, asyncio.Task[Generation]]:
    """An engine whose transfer broke off while a pause had frozen the reply that the task waits for."""
    engine = CoreEngine(core, eos_token_ids=())
    frozen = asyncio.create_task(engine.generate(REQUEST))
    while not core.ends:
        await asyncio.sleep(0)
    await engine.pause(PauseMode.KEEP)
    await engine.begin_weights({})
    await engine.abandon_weights("Half a model came.")
    return engine, frozen


def test_what_a_pause_froze_ends_before_it_could_go_on_with_half_a_model() -> None:
    async def scenario() -> None:
        core = EndlessCore()
        engine, frozen = await frozen_with_half_a_model(core)
        await engine.resume()
        assert (await frozen).stop_reason is StopReason.ABORTED
        assert core.calls == ["abort", "thaw"]
        with pytest.raises(EngineError, match="Half a model"):
            await engine.generate(REQUEST)

    asyncio.run(scenario())


def test_what_a_pause_froze_goes_on_when_the_next_transfer_comes_through() -> None:
    async def scenario() -> None:
        core = EndlessCore()
        engine, frozen = await frozen_with_half_a_model(core)
        await engine.begin_weights({})
        await engine.finish_weights(1)
        await engine.prove_weights(Probe(tokens=[1, 2], expected=[0.0], temperature=1.0, dtype=torch.float32))
        await engine.resume()
        assert core.calls == ["set apart", "thaw"], "what is frozen keeps its keys and values"
        assert not frozen.done()
        await engine.pause(PauseMode.ABORT)
        await frozen

    asyncio.run(scenario())


@pytest.mark.parametrize("mode", [PauseMode.ABORT, PauseMode.WAIT])
def test_with_nothing_frozen_all_keys_and_values_are_dropped(mode: PauseMode) -> None:
    async def scenario() -> None:
        core = EndlessCore()
        engine = CoreEngine(core, eos_token_ids=())
        if mode is PauseMode.ABORT:
            ended = asyncio.create_task(engine.generate(REQUEST))
            while not core.ends:
                await asyncio.sleep(0)
            await engine.pause(mode)
            await ended
        else:
            await engine.pause(mode)
        await engine.begin_weights({})
        await engine.finish_weights(1)
        assert "set apart" not in core.calls
        assert core.calls[-1] == "forget"

    asyncio.run(scenario())
