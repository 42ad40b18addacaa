"""A policy with adapters that is divided over processes by Ray and DeepSpeed is that of one process."""

import asyncio
import json
from pathlib import Path

import pytest
import torch

import rollgrad
from rollgrad.adapters.engines.ray_vllm import start_engines
from rollgrad.adapters.models.ray.sharded import ShardedPolicy
from rollgrad.adapters.models.ray.worker_group import WorkerGroup
from rollgrad.adapters.weights.channel import FleetWeights
from rollgrad.adapters.weights.shared_memory import shared_memory_adapter
from rollgrad.application.engines.fleet import EngineFleet
from rollgrad.application.settings.run import RLConfig
from rollgrad.application.settings.sections.actor import LoraConfig
from rollgrad.domain.batches.packed import pack
from rollgrad.domain.control.engine_health import FleetBounds
from rollgrad.domain.episodes.generation import GenerationRequest, SamplingParams
from rollgrad.domain.errors import CheckpointError, NonFiniteUpdateError
from rollgrad.testing.agent_executor import make_trajectory
from rollgrad.testing.reward_source import FakeRewardSource
from tests.example_runs import logged
from tests.fakes import cluster, lora

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

TOLERANCE = 1e-4
"""Largest difference of a weight after steps of 1e-2: sums are taken in another order, and AdamW divides small
gradients by their size."""

BFLOAT16_TOLERANCE = 0.02
"""Largest difference of a weight of size 0.3: adapters of size 0.1 are rounded to 8 bits, and their product counts
twice."""


@pytest.mark.parametrize(
    ("stage", "adapters"),
    [
        pytest.param(0, lora.LORA, marks=pytest.mark.wide),
        pytest.param(2, lora.LORA, marks=pytest.mark.wide),
        (3, lora.LORA),
        pytest.param(cluster.FSDP, lora.LORA, marks=pytest.mark.wide),
        (2, lora.QLORA),
    ],
)
def test_every_division_trains_the_adapters_of_one_process(
    group: WorkerGroup, stage: int | str, adapters: LoraConfig, tiny_model_dir: Path, tmp_path: Path
) -> None:
    from safetensors.torch import load_file

    lone = lora.policy(str(tiny_model_dir), lora=adapters)
    start = cluster.weights(lone)
    group.build(lora.rank_policy, str(tiny_model_dir), stage, torch.float32, adapters)
    policy = ShardedPolicy(group)
    assert all(torch.equal(start[name], tensor) for name, tensor in policy.weights())
    with pytest.raises(NonFiniteUpdateError):
        policy.update([cluster.batch()], cluster.steep)
    assert all(torch.equal(start[name], tensor) for name, tensor in policy.weights())

    expected = cluster.trained(lone)
    assert cluster.trained(policy) == pytest.approx(expected, rel=1e-4)
    assert expected["grad_norm"] > cluster.SETTINGS.max_norm, "the test must clip"
    after, wanted = cluster.weights(policy), cluster.weights(lone)
    assert list(after) == list(wanted) == list(start)
    for name, tensor in wanted.items():
        torch.testing.assert_close(after[name], tensor, rtol=0, atol=TOLERANCE)
        moves = "proj" in name
        assert torch.equal(after[name], start[name]) != moves, name
    torch.testing.assert_close(
        policy.score(cluster.batch()).logprobs_N, lone.score(cluster.batch()).logprobs_N, rtol=1e-3, atol=1e-3
    )

    policy.save(tmp_path / "ours")
    lone.save(tmp_path / "theirs")
    saved = cluster.weights(cluster.policy(str(tmp_path / "ours")))
    assert all(torch.equal(saved[name], tensor) for name, tensor in after.items())
    ours, theirs = (load_file(tmp_path / name / "adapter" / "adapter_model.safetensors") for name in ("ours", "theirs"))
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, rtol=0, atol=TOLERANCE)
    assert (tmp_path / "ours" / "adapter" / "adapter_config.json").exists()


@pytest.mark.parametrize("stage", [pytest.param(2, marks=pytest.mark.wide), 3])
def test_a_state_continues_in_any_division(group: WorkerGroup, stage: int, tiny_model_dir: Path) -> None:
    """From one process to two, and back; a state of all weights is refused."""
    whole, begun = lora.policy(str(tiny_model_dir)), lora.policy(str(tiny_model_dir))
    cluster.trained(whole, 3)
    cluster.trained(begun, 1)
    group.build(lora.rank_policy, str(tiny_model_dir), stage)
    policy = ShardedPolicy(group)
    policy.load_state_dict(begun.state_dict())
    cluster.trained(policy, 1)
    state = policy.state_dict()
    assert all(".lora_" in name for name in state["masters"])
    ended = lora.policy(str(tiny_model_dir))
    ended.load_state_dict(state)
    cluster.trained(ended, 1)
    expected = cluster.weights(whole)
    for name, tensor in ended.weights():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=TOLERANCE)
    with pytest.raises(CheckpointError, match=r"--actor\.lora\.rank"):
        policy.load_state_dict(cluster.policy(str(tiny_model_dir)).state_dict())


@pytest.mark.wide
@pytest.mark.parametrize(
    ("stage", "adapters"),
    [
        (2, lora.LORA),
        (3, lora.LORA),
        (2, lora.QLORA),
    ],
)
def test_in_bfloat16_too(group: WorkerGroup, stage: int, adapters: LoraConfig, tiny_model_dir: Path) -> None:
    lone = lora.policy(str(tiny_model_dir), dtype=torch.bfloat16, lora=adapters)
    group.build(lora.rank_policy, str(tiny_model_dir), stage, torch.bfloat16, adapters)
    policy = ShardedPolicy(group)
    expected = cluster.trained(lone)
    assert cluster.trained(policy)["loss"] == pytest.approx(expected["loss"], rel=0.02)
    wanted = cluster.weights(lone)
    for name, tensor in policy.weights():
        assert tensor.dtype == torch.bfloat16
        torch.testing.assert_close(tensor, wanted[name], rtol=0, atol=BFLOAT16_TOLERANCE)


def run_of(path: Path, output: Path, *, processes: int) -> list[dict[str, float]]:
    """Trains a whole run, in which letters are rewarded; returns the metrics of each step."""
    output.mkdir()
    rows = [{"input": f"What is {a} plus {b}?", "label": str(a + b)} for a in range(1, 4) for b in range(1, 4)]
    (output / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    config = RLConfig()
    config.actor.model_name_or_path, config.actor.dtype = str(path), "float32"  # type: ignore[assignment]
    config.actor.adam.lr, config.actor.lora.rank = 1e-3, 4
    config.algo.advantage.estimator, config.algo.kl.init_coef = "group_norm", 0.01
    config.data.prompt_dataset, config.data.label_key = str(output / "prompts.jsonl"), "label"
    config.rollout.batch_size, config.rollout.n_samples_per_prompt, config.rollout.max_new_tokens = 2, 4, 8
    config.train.max_steps, config.train.seed = 2, 5
    config.ckpt.output_dir, config.logger.console = str(output), False
    if processes > 1:
        config.cluster.enable, config.cluster.timeout = True, 300
        config.actor.num_gpus_per_node, config.ds.zero_stage = processes, 3
    letters = FakeRewardSource(lambda r: sum(c.isalpha() for c in r.response) / (1 + len(r.response)))
    rollgrad.train(config, reward=letters)
    return logged(output)


@pytest.mark.usefixtures("runs_share_processes")
def test_a_whole_run_in_two_processes_is_the_run_in_one(tiny_model_dir: Path, tmp_path: Path) -> None:
    """In one process the reference is the actor without adapters, in the cluster a model of its own."""
    expected = run_of(tiny_model_dir, tmp_path / "lone", processes=1)
    found = run_of(tiny_model_dir, tmp_path / "divided", processes=2)
    for one, other in zip(expected, found, strict=True):
        for key in ("reward/mean", "policy/loss", "policy/grad_norm", "policy/ref_kl"):
            assert other[key] == pytest.approx(one[key], rel=1e-3, abs=1e-5)
    assert found[1]["policy/ref_kl"] != 0
    lone, divided = (cluster.weights(cluster.policy(str(tmp_path / name / "model"))) for name in ("lone", "divided"))
    for name, tensor in lone.items():
        torch.testing.assert_close(divided[name], tensor, rtol=0, atol=1e-3)
    assert (tmp_path / "divided" / "model" / "adapter" / "adapter_model.safetensors").exists()


async def test_adapters_reach_vllm_without_weights_from_every_division_and_an_engine_that_is_replaced(
    group: WorkerGroup, wide_headed_model_dir: Path
) -> None:
    """One engine serves all divisions: adapters are all that they leave in it."""
    path = str(wide_headed_model_dir)
    settings = {"model": path, "eos_token_ids": (), "dtype": "float32", "max_batch_size": 8, "lora": lora.LORA}
    prompt = (65, 66, 67)
    size = sum(tensor.nbytes for _, tensor in lora.policy(path).adapter())

    async def agrees(fleet: EngineFleet, policy: ShardedPolicy, version: int) -> None:
        request = GenerationRequest(prompt_token_ids=prompt, params=SamplingParams(max_new_tokens=24, seed=version))
        generation = await fleet.generate(request)
        scores = policy.score(pack([make_trajectory(prompt, generation.token_ids)])).logprobs_N[len(prompt) :]
        assert list(generation.logprobs) == pytest.approx(scores.tolist(), abs=TOLERANCE)
        assert set(generation.versions) == {version}

    async def scenario() -> None:
        members = await start_engines(1, settings, seconds=600)
        bounds = FleetBounds(suspect_after=60, dead_after=300, max_restarts=1)
        fleet = EngineFleet(members, bounds=bounds, ping_seconds=0.5)
        channel = FleetWeights(fleet, backend=shared_memory_adapter)
        policy = None
        for version, stage in enumerate((0, 2, 3), 1):
            group.build(lora.rank_policy, path, stage)
            policy = ShardedPolicy(group)
            cluster.trained(policy, version)
            assert (await channel.push(policy, version))["bytes"] == size
            await agrees(fleet, policy, version)
        assert policy is not None
        await members[0].close()  # the next ping finds it dead
        while fleet.health.deaths.total() == 0 or fleet.health.serving != [0]:
            assert fleet.health.failure is None
            await asyncio.sleep(0.1)
        await agrees(fleet, policy, 3)
        await fleet.aclose()

    async with asyncio.timeout(1200):
        await scenario()
