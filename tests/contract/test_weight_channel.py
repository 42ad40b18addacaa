"""What every weight channel promises."""

import asyncio
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from rollgrad.adapters.torch.loading import load_causal_lm, load_tokenizer
from rollgrad.adapters.torch.models import TorchPolicy
from rollgrad.adapters.torch.optimizer import OptimizerSettings
from rollgrad.adapters.transformers.engine import EmbeddedEngine
from rollgrad.adapters.transformers.weights import CopiedWeights, SharedWeights
from rollgrad.domain.batch import PackedBatch
from rollgrad.domain.errors import EngineError
from rollgrad.domain.ports.models import LossOutput, PolicyModel, TokenScores
from rollgrad.domain.ports.rollout_engine import PauseMode
from rollgrad.domain.ports.weight_channel import WeightChannel
from rollgrad.domain.sampling import GenerationRequest, SamplingParams
from tests.event_loop import run
from tests.fakes.models import FakePolicy
from tests.fakes.rollout_engine import FakeRolloutEngine
from tests.fakes.weight_channel import FakeWeightChannel

FLAG = "--actor.model-name-or-path"
VLLM = [pytest.param("vllm", marks=pytest.mark.slow)] if importlib.util.find_spec("vllm") else []
REQUEST = GenerationRequest(prompt_token_ids=(65, 66), params=SamplingParams(max_new_tokens=100))


@pytest.fixture(params=["fake", "shared", "copied", *VLLM])
def parts(request: pytest.FixtureRequest, tiny_model_dir: Path) -> tuple[WeightChannel, Any, PolicyModel]:
    """(channel, engine, policy)."""
    if request.param == "fake":
        engine = FakeRolloutEngine()
        return FakeWeightChannel(engine), engine, FakePolicy()
    if request.param == "vllm":
        tiny_model_dir = request.getfixturevalue("wide_headed_model_dir")
    model = load_causal_lm(str(tiny_model_dir), dtype=torch.float32, device=torch.device("cpu"), flag=FLAG)
    policy = TorchPolicy(model, load_tokenizer(str(tiny_model_dir), flag=FLAG), OptimizerSettings(lr=0.1))
    if request.param == "copied":
        model = load_causal_lm(str(tiny_model_dir), dtype=torch.float32, device=torch.device("cpu"), flag=FLAG)
    if request.param == "vllm":
        from rollgrad.adapters.vllm.weights import SharedMemoryWeights

        vllm = request.getfixturevalue("vllm_engine")
        return SharedMemoryWeights(vllm), vllm, policy
    embedded = EmbeddedEngine(model, eos_token_ids=())
    channel = CopiedWeights(embedded) if request.param == "copied" else SharedWeights(embedded)
    return channel, embedded, policy


def test_tokens_after_a_push_carry_its_version(parts: tuple[WeightChannel, Any, PolicyModel]) -> None:
    channel, engine, policy = parts

    async def scenario() -> None:
        assert isinstance(channel, WeightChannel)
        for version in (1, 2, 5):
            moved = await channel.push(policy, version)
            assert moved.keys() == {"seconds", "bytes"}
            assert all(value >= 0 for value in moved.values())
            assert set((await engine.generate(REQUEST)).versions) == {version}

    run(scenario())


def test_an_engine_that_is_sampling_refuses_unless_paused(parts: tuple[WeightChannel, Any, PolicyModel]) -> None:
    channel, engine, policy = parts

    async def scenario() -> None:
        task = asyncio.create_task(engine.generate(REQUEST))
        await asyncio.sleep(0)
        with pytest.raises(EngineError):
            await channel.push(policy, 1)
        await engine.pause(PauseMode.KEEP)
        await channel.push(policy, 1)
        await engine.resume()
        assert set((await task).versions) <= {0, 1}

    run(scenario())


@pytest.mark.parametrize("own", [False, True], ids=["shared", "copied"])
def test_the_engine_samples_from_the_updated_weights(tiny_model_dir: Path, own: bool) -> None:
    from rollgrad.domain.batch import pack
    from tests.fakes.agent_executor import make_trajectory

    model = load_causal_lm(str(tiny_model_dir), dtype=torch.float32, device=torch.device("cpu"), flag=FLAG)
    policy = TorchPolicy(model, load_tokenizer(str(tiny_model_dir), flag=FLAG), OptimizerSettings(lr=0.05))
    sampled = load_causal_lm(str(tiny_model_dir), dtype=torch.float32, device=torch.device("cpu"), flag=FLAG)
    engine = EmbeddedEngine(sampled if own else model, eos_token_ids=())
    channel = CopiedWeights(engine) if own else SharedWeights(engine)
    greedy = GenerationRequest(prompt_token_ids=(65, 66), params=SamplingParams(temperature=0.0, max_new_tokens=1))
    wanted = 123
    batch = pack([make_trajectory([65, 66], [wanted])])

    def likelihood(scores: TokenScores, part: PackedBatch) -> LossOutput:
        return LossOutput(loss=-scores.logprobs_N.sum())

    async def scenario() -> None:
        assert (await engine.generate(greedy)).token_ids != [wanted]
        for _ in range(10):
            policy.update([batch], likelihood)
        moved = await channel.push(policy, 1)
        assert (await engine.generate(greedy)).token_ids == [wanted]
        assert moved["bytes"] == (sum(tensor.nbytes for _, tensor in policy.weights()) if own else 0)

    run(scenario())
