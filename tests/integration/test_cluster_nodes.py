"""A job on a cluster of two nodes, which here share one machine."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import rollgrad
from rollgrad.adapters.engines.ray_vllm import start_engines
from rollgrad.adapters.models.ray.rank_worker import RankWorker
from rollgrad.adapters.models.ray.worker_group import WorkerGroup
from rollgrad.adapters.ray.session import RaySession
from rollgrad.adapters.weights.channel import FleetWeights
from rollgrad.application.engines.fleet import EngineFleet
from rollgrad.application.settings.run import RLConfig
from rollgrad.domain.batches.packed import pack
from rollgrad.domain.episodes.generation import Generation, GenerationRequest, SamplingParams, StopReason
from rollgrad.domain.episodes.rewards import RewardRequest
from rollgrad.domain.episodes.trajectory import TrajectoryBuilder
from rollgrad.domain.errors import ConfigurationError, WorkerError
from rollgrad.testing.reward_source import FakeRewardSource
from tests.fakes import cluster as cluster_models

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.fixture(autouse=True)
def _no_other_ray(kept_groups: Any) -> Iterator[None]:
    """A process is in one Ray cluster at a time."""
    import ray

    kept_groups.close()
    ray.shutdown()
    yield
    ray.shutdown()  # which a test that failed has not done


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Two nodes of one CPU each: two training processes have to be apart."""
    from ray.cluster_utils import Cluster

    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    nodes.add_node(num_cpus=1)
    yield nodes
    nodes.shutdown()


class NodesSeen(FakeRewardSource):
    """Looks, while the run is under way, which nodes its training processes belong to."""

    def __init__(self) -> None:
        super().__init__(self._judge)
        self.seen: set[str] = set()

    def _judge(self, request: RewardRequest) -> float:
        from ray._private.state import actors

        workers = (actor for actor in actors().values() if actor["ActorClassName"] == RankWorker.__name__)
        self.seen |= {worker["Address"]["NodeID"] for worker in workers}
        return float(len(request.response))


def test_a_job_trains_on_two_nodes(
    cluster: Any, tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tiny_model_dir.parent)  # the nodes, and their processes, were started elsewhere
    (tmp_path / "prompts.jsonl").write_text("\n".join(json.dumps({"input": f"Say {i}"}) for i in range(4)))
    config = RLConfig()
    config.actor.model_name_or_path, config.actor.num_nodes = f"./{tiny_model_dir.name}", 2
    config.algo.advantage.estimator = "group_norm"
    config.data.prompt_dataset = str(tmp_path / "prompts.jsonl")
    config.rollout.batch_size, config.rollout.n_samples_per_prompt, config.rollout.max_new_tokens = 2, 2, 8
    config.train.max_steps, config.ckpt.output_dir, config.logger.console = 2, str(tmp_path / "run"), False
    config.cluster.enable, config.cluster.address, config.cluster.timeout = True, cluster.address, 300
    config.ds.zero_stage = 3
    reward = NodesSeen()
    assert rollgrad.train(config, reward=reward).steps == 2
    assert len(reward.seen) == 2

    config.actor.num_gpus_per_node, config.cluster.timeout, config.ckpt.overwrite = 2, 5, True
    with pytest.raises(ConfigurationError, match="found no room for the 4 processes of actor"):
        rollgrad.train(config, reward=reward)


async def test_weights_reach_an_engine_on_another_machine(cluster: Any, wide_headed_model_dir: Path) -> None:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    path = str(wide_headed_model_dir)
    session = RaySession(cluster.address, cpus=0)
    here = ray.get_runtime_context().get_node_id()
    (other,) = (node["NodeID"] for node in ray.nodes() if node["NodeID"] != here)
    options = {"scheduling_strategy": NodeAffinitySchedulingStrategy(other, soft=False)}
    policy = cluster_models.policy(path)
    policy.update([cluster_models.batch()], cluster_models.likelihood)
    request = GenerationRequest(prompt_token_ids=(5, 6, 7), params=SamplingParams(max_new_tokens=16))

    async def scenario() -> Generation:
        settings = {"model": path, "eos_token_ids": (), "dtype": "float32", "max_batch_size": 8}
        fleet = EngineFleet(await start_engines(1, settings, options=[options], seconds=400))
        try:
            moved = await FleetWeights(fleet).push(policy, 1)
            assert moved["bytes"] == sum(tensor.nbytes for _, tensor in policy.weights())
            return await fleet.generate(request)
        finally:
            await fleet.aclose()

    generation = await scenario()
    session.close()
    trajectory = TrajectoryBuilder([5, 6, 7], group_id=0, sample_id=0)
    trajectory.add_action(generation)
    scored = policy.score(pack([trajectory.build(stop_reason=StopReason.LENGTH)]))
    assert scored.logprobs_N[3:].tolist() == pytest.approx(list(generation.logprobs), abs=1e-4)
    assert set(generation.versions) == {1}


def build_until_killed(group: WorkerGroup, model_dir: Path) -> None:
    """Ray looks at the memory ten times a second; a fork has made its model sooner."""
    for _ in range(100):
        group.build(cluster_models.rank_policy, str(model_dir), 2)


@pytest.mark.chaos
def test_a_process_that_ran_out_of_memory_is_told(tiny_model_dir: Path) -> None:
    from ray.cluster_utils import Cluster

    full = {"memory_usage_threshold": 0.01, "memory_monitor_refresh_ms": 100}
    nodes = Cluster(initialize_head=True, head_node_args={"include_dashboard": False, "_system_config": full})
    session = RaySession(nodes.address, cpus=0)
    try:
        with (
            pytest.raises(WorkerError, match=r"rank 0 died .*out of memory: lower --train\.max_tokens_per_micro_batch"),
            cluster_models.worker_group(1) as group,
        ):
            build_until_killed(group, tiny_model_dir)
    finally:
        session.close()
        nodes.shutdown()


def test_a_cluster_that_does_not_answer_is_told(tiny_model_dir: Path, tmp_path: Path) -> None:
    config = RLConfig()
    config.actor.model_name_or_path, config.algo.advantage.estimator = str(tiny_model_dir), "reinforce"
    config.data.prompt_dataset = "reasoning_gym:basic_arithmetic"
    config.ckpt.output_dir, config.rollout.max_new_tokens = str(tmp_path), 16
    config.cluster.enable, config.cluster.address = True, "127.0.0.1:1"
    with pytest.raises(ConfigurationError, match="where no Ray cluster answers"):
        rollgrad.train(config)
