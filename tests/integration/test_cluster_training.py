"""Whole runs in several processes: Ray places, vLLM samples, DeepSpeed trains; and what comes of it when one dies."""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import rollgrad
from rollgrad.adapters.ray.session import RaySession
from rollgrad.application.choices import CorrectionLevel, Engine
from rollgrad.application.config import RLConfig
from rollgrad.application.train_config import PartialRollout
from rollgrad.domain.errors import WorkerError
from rollgrad.domain.ports.metric_sink import MetricSink
from rollgrad.domain.rewards import RewardRequest
from tests.fakes import cluster
from tests.fakes.reward_source import FakeRewardSource

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

STEPS = 3


@pytest.fixture(scope="module", autouse=True)
def session() -> Iterator[RaySession]:
    """One Ray for all runs, which they find and leave."""
    session = RaySession(None, cpus=8)
    yield session
    session.close()


def letters(request: RewardRequest) -> float:
    return sum(character.isalpha() for character in request.response) / (1 + len(request.response))


@pytest.fixture
def make(wide_headed_model_dir: Path, tmp_path: Path) -> Callable[..., RLConfig]:
    rows = [{"input": f"What is {a} plus {b}?", "label": str(a + b)} for a in range(1, 4) for b in range(1, 4)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))

    def config(name: str, *, vllm: bool = False, **cluster_settings: Any) -> RLConfig:
        made = RLConfig()
        made.actor.model_name_or_path, made.actor.dtype = str(wide_headed_model_dir), "float32"  # type: ignore[assignment]
        made.actor.adam.lr = 1e-3
        made.algo.advantage.estimator = "group_norm"
        made.data.prompt_dataset, made.data.label_key = str(tmp_path / "prompts.jsonl"), "label"
        made.rollout.batch_size, made.rollout.n_samples_per_prompt, made.rollout.max_new_tokens = 2, 4, 12
        made.rollout.engine = Engine.VLLM if vllm else Engine.EMBEDDED
        made.train.max_steps, made.train.seed = STEPS, 5
        made.ckpt.output_dir, made.logger.console = str(tmp_path / name), False
        made.cluster.timeout = 300
        made.cluster.enable, made.actor.num_gpus_per_node = True, 2
        return made

    return config


def train(config: RLConfig, **adapters: Any) -> list[dict[str, float]]:
    """The metrics of each step."""
    rollgrad.train(config, reward=FakeRewardSource(letters), **adapters)
    return steps(config)


def steps(config: RLConfig) -> list[dict[str, float]]:
    lines = (Path(config.ckpt.output_dir) / "metrics.jsonl").read_text().splitlines()
    return [line for line in map(json.loads, lines) if "reward/mean" in line]


def model(config: RLConfig) -> dict[str, torch.Tensor]:
    policy = cluster.policy(str(Path(config.ckpt.output_dir) / "model"))
    return {name: tensor.clone() for name, tensor in policy.weights()}


def without_cluster(config: RLConfig) -> RLConfig:
    config.cluster.enable, config.cluster.timeout, config.actor.num_gpus_per_node = False, 1800.0, 1
    return config


def test_a_run_in_several_processes_is_the_run_in_one(make: Callable[..., RLConfig]) -> None:
    lone, divided = without_cluster(make("lone")), make("divided")
    divided.ds.zero_stage = 3
    expected, found = train(lone), train(divided)
    for one, other in zip(expected, found, strict=True):
        for key in ("reward/mean", "rollout/entropy", "policy/loss", "policy/grad_norm"):
            assert other[key] == pytest.approx(one[key], rel=1e-3, abs=1e-5)
    for name, tensor in model(lone).items():
        torch.testing.assert_close(model(divided)[name], tensor, rtol=0, atol=1e-3)


def colocated(config: RLConfig) -> None:
    config.train.colocate_all = True
    config.ds.zero_stage = 3


def asynchronous(config: RLConfig) -> None:
    config.train.async_enable = True


def partial_rollout(config: RLConfig) -> None:
    config.train.async_enable, config.train.max_staleness = True, 2
    config.train.partial_rollout = PartialRollout.KEEP
    config.algo.correction.level = CorrectionLevel.TOKEN


def ppo(config: RLConfig) -> None:
    """Critic and reference beside the actor."""
    config.algo.advantage.estimator = "gae"
    config.algo.kl.init_coef = 0.01
    config.critic.num_gpus_per_node = config.ref.num_gpus_per_node = 1
    config.train.colocate_actor_ref = True


@pytest.mark.parametrize("arrange", [colocated, asynchronous, partial_rollout, ppo])
def test_every_pipeline_trains_with_vllm(make: Callable[..., RLConfig], arrange: Callable[[RLConfig], None]) -> None:
    config = make(arrange.__name__, vllm=True)
    arrange(config)
    lines = train(config)
    assert len(lines) == STEPS
    fresh = [line for line in lines if line.get("staleness/max", 0.0) == 0]
    assert all(line["policy/mismatch_kl"] < 1e-5 for line in fresh), "engine and trainer agree on what they sample"
    assert (Path(config.ckpt.output_dir) / "model" / "model.safetensors").exists()
    if arrange is ppo:
        assert all(line["critic/loss"] > 0 for line in lines)
    assert not cluster.processes("ray::RankWorker")
    assert not cluster.processes("ray::EngineHost")


class Killer(MetricSink):
    """Kills training processes when a step is reported: whatever is called next finds them dead."""

    def __init__(self, rank: int, step: int) -> None:
        self.rank, self.step = rank, step

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if step == self.step and "reward/mean" in metrics:
            cluster.kill([cluster.processes("ray::RankWorker")[self.rank]])


@pytest.mark.chaos
@pytest.mark.parametrize("rank", [0, 1])
def test_a_lost_rank_ends_the_run_which_continues(make: Callable[..., RLConfig], rank: int) -> None:
    """In bounded time, with an error that names it, and with a state from which the run goes on as if nothing was."""
    whole, broken = make("whole"), make("broken")
    whole.ckpt.state_steps = broken.ckpt.state_steps = broken.ckpt.save_steps = 1
    train(whole)
    with pytest.raises(WorkerError, match=r"training processes of actor, rank \d died while"):
        train(broken, sink=Killer(rank, step=2))
    assert not cluster.processes("ray::RankWorker")
    cluster.policy(str(Path(broken.ckpt.output_dir) / "step_1"))  # loads
    broken.ckpt.resume = True
    train(broken)
    for name, tensor in model(whole).items():
        torch.testing.assert_close(model(broken)[name], tensor, rtol=0, atol=1e-6)


@pytest.mark.chaos
def test_a_lost_engine_is_replaced_and_its_replies_are_played_again(make: Callable[..., RLConfig]) -> None:
    config = make("engines", vllm=True)
    config.vllm.num_engines = 2

    class EngineKiller(Killer):
        def log(self, step: int, metrics: Mapping[str, float]) -> None:
            if step == self.step and "reward/mean" in metrics:
                cluster.kill([cluster.processes("ray::EngineHost")[self.rank]])

    rollgrad.train(config, reward=FakeRewardSource(letters), sink=EngineKiller(0, step=1))
    assert (Path(config.ckpt.output_dir) / "model" / "model.safetensors").exists()
