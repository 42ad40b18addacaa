"""An engine over vLLM when weights do not arrive, with a core that is no vLLM."""

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from attrs import evolve

from rollgrad.adapters.engines.vllm import async_llm
from rollgrad.adapters.engines.vllm.async_llm import LocalCore, _top_logprobs
from rollgrad.adapters.engines.vllm.comparison import STEPS
from rollgrad.adapters.engines.vllm.core import Core
from rollgrad.adapters.engines.vllm.engine import CoreEngine
from rollgrad.adapters.models.torch.allocator import FreedGPUMemory
from rollgrad.adapters.weights.receiver_port import EngineModel, Probe, WeightsDifferError
from rollgrad.application.settings.run import RLConfig
from rollgrad.application.settings.sections.actor import LoraSync
from rollgrad.application.settings.sections.rollout import Engine
from rollgrad.domain.episodes.generation import Generation, GenerationRequest, SamplingParams, StopReason
from rollgrad.domain.errors import DataError, EngineError
from rollgrad.domain.ports.rollout_engine import PauseMode
from rollgrad.entrypoints.composition.engines import resting, sleep_level

CUT = StopReason.LENGTH
REQUEST = GenerationRequest(prompt_token_ids=(1,), params=SamplingParams(max_new_tokens=8))


class EndlessCore(Core):
    """Its requests end when they are aborted, after one token, but those of a comparison by themselves."""

    max_tokens = 64
    model = EngineModel(torch.float32, 100)
    reply = (0.0,) * STEPS
    """Log-probs of a comparison's reply."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.ends: dict[str, asyncio.Event] = {}

    async def sample(self, name: str, request: GenerationRequest, *_: Any) -> Generation:
        if request.params.max_new_tokens == STEPS:
            return Generation(token_ids=[7] * STEPS, logprobs=self.reply, versions=[0] * STEPS, stop_reason=CUT)
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


async def test_a_stop_token_that_the_model_lacks_never_reaches_vllm() -> None:
    params = SamplingParams(max_new_tokens=8, stop_token_ids=(3, 100))
    with pytest.raises(DataError, match="token id 100, but those of the model end at 99"):
        await CoreEngine(EndlessCore(), eos_token_ids=()).generate(
            GenerationRequest(prompt_token_ids=(1,), params=params)
        )


async def test_what_a_pause_froze_ends_before_it_could_go_on_with_half_a_model() -> None:
    core = EndlessCore()
    engine, frozen = await frozen_with_half_a_model(core)
    await engine.resume()
    assert (await frozen).stop_reason is StopReason.ABORTED
    assert core.calls == ["abort", "thaw"]
    with pytest.raises(EngineError, match="Half a model"):
        await engine.generate(REQUEST)


async def test_what_a_pause_froze_goes_on_when_the_next_transfer_comes_through() -> None:
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


async def test_a_transfer_whose_comparison_never_came_does_not_hold_up_the_next() -> None:
    engine = CoreEngine(EndlessCore(), eos_token_ids=())
    for version in (1, 2):
        async with asyncio.timeout(5):
            await engine.begin_weights({})
        await engine.finish_weights(version)
    begun = asyncio.create_task(engine.begin_weights({}))
    await engine.prove_weights(Probe(tokens=[1, 2], expected=[0.0], temperature=1.0, dtype=torch.float32))
    await begun
    assert engine.version == 2


@pytest.mark.parametrize(
    ("quantized", "gap", "differs"),
    [
        ((), 0.0009, False),
        ((), 0.0012, True),
        (("fp8_per_channel",), 1.4, False),
        (("fp8_per_channel", "fp8_e5m2"), 1.6, True),
        (("mxfp4", "fp8"), 7.9, False),
        (("nvfp4_per_token",), 8.1, True),
    ],
)
async def test_replies_that_differ_from_prompts_are_of_other_weights(
    quantized: tuple[str, ...], gap: float, differs: bool
) -> None:
    """The first token of a reply is computed with its prompt, and counts for nothing."""
    core = EndlessCore()
    core.model = evolve(core.model, quantized=quantized)
    core.reply = (-5.0, gap, -gap, gap)
    engine = CoreEngine(core, eos_token_ids=())
    await engine.begin_weights({})
    await engine.finish_weights(1)
    proof = engine.prove_weights(Probe(tokens=[1, 2], expected=[0.0], temperature=1.0, dtype=torch.float32))
    if not differs:
        await proof
        return
    with pytest.raises(WeightsDifferError, match=rf"3 tokens that it sampled .* differ .* by {gap}"):
        await proof
    with pytest.raises(EngineError, match="it samples with other weights than it was given"):
        await engine.generate(REQUEST)


class MortalCore(EndlessCore):
    """It answers as long as it is `alive`."""

    alive = True

    async def ping(self) -> None:
        if not self.alive:
            raise EngineError("vLLM's processes have died.")


async def test_it_says_when_it_can_serve_nothing() -> None:
    core = MortalCore()
    engine = CoreEngine(core, eos_token_ids=())
    await engine.check()
    assert engine.broken is None
    await engine.begin_weights({})
    await engine.abandon_weights("Half a model came.")
    with pytest.raises(EngineError, match="Half a model"):
        await engine.check()
    assert engine.broken == "Half a model came."
    await engine.begin_weights({})
    await engine.finish_weights(1)
    await engine.check()
    core.alive = False
    with pytest.raises(EngineError, match="have died"):
        await engine.check()


@pytest.mark.parametrize("mode", [PauseMode.ABORT, PauseMode.WAIT])
async def test_with_nothing_frozen_all_keys_and_values_are_dropped(mode: PauseMode) -> None:
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


class SleepingCore(EndlessCore):
    """It gives its weights up where it is told to."""

    def __init__(self, *, keeps_weights: bool) -> None:
        super().__init__()
        self.keeps_weights = keeps_weights

    async def sleep(self) -> None:
        self.calls.append("sleep")

    async def wake(self, part: str) -> None:
        self.calls.append(f"wake {part}")

    async def sample(self, *_: Any) -> Generation:
        return Generation(token_ids=[7], logprobs=[-1.0], versions=[0], stop_reason=StopReason.STOP)


@pytest.mark.parametrize("keeps_weights", [True, False], ids=str)
async def test_no_reply_is_of_weights_that_were_given_up(keeps_weights: bool) -> None:
    core = SleepingCore(keeps_weights=keeps_weights)
    engine = CoreEngine(core, eos_token_ids=())
    await engine.sleep()
    await engine.wake()
    if keeps_weights:
        await engine.generate(REQUEST)
    else:
        with pytest.raises(EngineError, match="push them again"):
            await engine.generate(REQUEST)
    await engine.begin_weights({})
    await engine.finish_weights(1)
    await engine.prove_weights(Probe(tokens=[1, 2], expected=[0.0], temperature=1.0, dtype=torch.float32))
    await engine.generate(REQUEST)
    assert core.calls[:3] == ["sleep", "wake weights", "wake kv_cache"]


class SleepCalls:
    """vLLM as far as sleep goes, with its own signatures."""

    model_config = SimpleNamespace(max_model_len=64, dtype=torch.float32, get_vocab_size=lambda: 100, quantization=None)
    cache = SimpleNamespace(enable_prefix_caching=True, cache_dtype="auto")
    vllm_config = SimpleNamespace(cache_config=cache, speculative_config=None)
    errored = False

    def __init__(self) -> None:
        self.levels: list[int] = []

    async def sleep(self, level: int = 1, mode: str = "abort") -> None:
        self.levels.append(level)


@pytest.mark.parametrize(("level", "keeps_weights"), [(0, True), (1, True), (2, False)])
async def test_vllm_sleeps_as_deep_as_it_is_told(level: int, keeps_weights: bool) -> None:
    llm = SleepCalls()
    core = LocalCore(llm, sleep_level=level)
    assert core.keeps_weights is keeps_weights
    await core.sleep()
    assert llm.levels == [level]


class BusyVLLM(SleepCalls):
    """Its core answers nothing while it sleeps."""

    def __init__(self) -> None:
        super().__init__()
        self.slept = asyncio.Event()

    async def sleep(self, level: int = 1, mode: str = "abort") -> None:
        await self.slept.wait()

    async def is_sleeping(self) -> bool:
        await self.slept.wait()
        return False


async def test_vllm_that_pins_memory_or_joins_a_group_is_not_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """It does so for longer than silence may last, and within a deadline of its own."""
    monkeypatch.setattr(async_llm, "LIVENESS_SECONDS", 0.01)
    llm = BusyVLLM()
    core = LocalCore(llm, sleep_level=1)
    asked_before = asyncio.create_task(core.ping())
    await asyncio.sleep(0)
    assert not asked_before.done()
    falling_asleep = asyncio.create_task(core.sleep())
    async with asyncio.timeout(30):
        await asked_before
        await core.ping()
        llm.errored = True
        with pytest.raises(EngineError, match="died"):
            await core.ping()
        with pytest.raises(EngineError, match="died"):
            await falling_asleep
    llm.errored = False
    silent = asyncio.create_task(core.ping())
    await asyncio.sleep(0.05)
    assert not silent.done(), "which does nothing that takes so long"
    llm.slept.set()
    async with asyncio.timeout(30):
        await silent


@pytest.mark.parametrize(
    ("cluster", "together", "sync", "level"),
    [
        (True, False, LoraSync.MERGED, 0),
        (True, True, LoraSync.MERGED, 2),
        (True, True, LoraSync.ADAPTER, 1),
        (True, False, LoraSync.ADAPTER, 0),
        (False, False, LoraSync.MERGED, 2),
        (False, False, LoraSync.ADAPTER, 1),
    ],
)
def test_engines_sleep_where_models_take_turns_and_keep_what_no_push_brings(
    cluster: bool, together: bool, sync: LoraSync, level: int
) -> None:
    config = RLConfig()
    config.rollout.engine, config.cluster.enable = Engine.VLLM, cluster
    config.train.colocate_all, config.actor.lora.sync = together, sync
    assert sleep_level(config) == level


@pytest.mark.parametrize(
    ("cluster", "engine", "given_back"),
    [(False, Engine.VLLM, True), (False, Engine.EMBEDDED, False), (True, Engine.VLLM, False)],
)
def test_a_process_leaves_what_it_has_freed_to_the_engine_on_its_gpu(
    cluster: bool, engine: Engine, given_back: bool
) -> None:
    config = RLConfig()
    config.rollout.engine, config.cluster.enable, config.train.colocate_all = engine, cluster, cluster
    assert [type(memory) for memory in resting(config, object(), None)] == [FreedGPUMemory] * given_back
    config.train.optimizer_sleeps = True
    assert len(resting(config, object(), None)) == 1 + given_back


def test_likely_tokens_of_outputs_that_vllm_put_together_are_the_most_likely_in_order() -> None:
    """Together each token is there once: the second place's sampled one, the likeliest but one, stands in front."""
    apart = SimpleNamespace(token_ids=[9, 3, 5, 5, 3, 5], logprobs=[-4.0, -1.0, -2.0, -2.0, -1.0, -2.0])
    together = SimpleNamespace(token_ids=[9, 3, 5, 5, 3], logprobs=[-4.0, -1.0, -2.0, -2.0, -1.0])
    for given in (apart, together):
        given.start_indices = [0, 3]
        found = _top_logprobs(given, 2)
        assert found.ids_RK.tolist() == [[3, 5], [3, 5]]
        assert found.logprobs_RK.tolist() == [[-1.0, -2.0], [-1.0, -2.0]]
