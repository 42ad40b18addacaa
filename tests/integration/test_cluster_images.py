"""Images in several processes: models that are divided see them as one process does, and vLLM samples from them."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import rollgrad
from rollgrad.adapters.models.ray.sharded import ShardedPolicy, divided_reward
from rollgrad.adapters.models.ray.worker_group import WorkerGroup
from rollgrad.application.settings.run import RLConfig
from rollgrad.application.settings.sections.actor import DType
from rollgrad.application.settings.sections.cluster import Strategy
from rollgrad.application.settings.sections.rollout import Engine
from tests.example_runs import logged, weights, written
from tests.fakes import cluster, images
from tests.fakes.cluster import FSDP
from tests.image_runs import Gallery
from tests.tiny_vision import picture, save_tiny_reward, save_tiny_vlm

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_vlm("qwen2_5_vl", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def expected(model: str) -> tuple[torch.Tensor, dict[str, float]]:
    """One process's log-probs after the steps, and the metrics of the last."""
    policy = images.policy(model)
    metrics = steps(policy, model)
    return policy.score(images.batch(model)).logprobs_N, metrics


def steps(policy: Any, model: str) -> dict[str, float]:
    """Takes optimizer steps on two micro-batches, of which the second has one sequence with an image."""
    batch = images.batch(model)
    metrics: dict[str, float] = {}
    for _ in range(cluster.STEPS):
        metrics = policy.update([batch.select([0, 1, 3]), batch.select([2, 4, 5])], cluster.likelihood)
    return metrics


@pytest.fixture
def group(ray: None, kept_groups: Any) -> Iterator[WorkerGroup]:
    group = kept_groups.group(2)
    yield group
    group.close()


@pytest.mark.parametrize("stage", [2, 3, FSDP])
def test_every_division_sees_images_as_one_process(
    group: WorkerGroup, model: str, expected: tuple[torch.Tensor, dict[str, float]], stage: int | str
) -> None:
    """Also where a process has no image of a pass: the tower, whose weights are divided, computes in all of them."""
    logprobs_N, metrics = expected
    group.build(images.rank_policy, model, stage)
    policy = ShardedPolicy(group)
    assert steps(policy, model) == pytest.approx(metrics, rel=1e-3)
    torch.testing.assert_close(policy.score(images.batch(model)).logprobs_N, logprobs_N, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("stage", [3, FSDP])
def test_a_divided_reward_model_judges_images_as_a_whole_one(
    group: WorkerGroup, model: str, stage: int | str, tmp_path: Path
) -> None:
    """Also where one process has replies to images, and the other to texts alone."""
    save_tiny_reward(model, tmp_path)
    path, replies = str(tmp_path), images.replies(model)
    expected = images.reward_model(path).judge(replies)
    group.build(images.rank_reward_model, path, stage)
    (judge,) = divided_reward(group)
    pictured = [(reply, verdict) for reply, verdict in zip(replies, expected, strict=True) if reply.images]
    texts = [(reply, verdict) for reply, verdict in zip(replies, expected, strict=True) if not reply.images]
    mixed = [each for pair in zip(pictured, texts, strict=True) for each in pair]  # dealt to the two in turn
    for asked in (mixed, pictured[:1]):
        judged = judge([reply for reply, _ in asked])
        assert [score for score, _ in judged] == pytest.approx([score for _, (score, _) in asked], abs=1e-3)


def test_a_run_on_vllm_in_a_cluster_learns_from_images(
    ray: None, runs_share_processes: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts with images, without, and with those that an environment answers with; the tower learns, and the second
    step's images are those of the first."""
    path = save_tiny_vlm("idefics3", tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    for name, color in {"red": (200, 0, 0), "blue": (0, 0, 200)}.items():
        Path(f"{name}.png").write_bytes(picture(color))
    rows = [
        {"prompt": "What is <image>?", "images": ["red.png"]},
        {"prompt": "Are they alike?", "images": ["blue.png", "red.png"]},
        {"prompt": "What is 1 plus 1?", "images": []},
    ]
    config = RLConfig()
    config.actor.model_name_or_path, config.actor.dtype, config.actor.adam.lr = path, DType.FLOAT32, 1e-2
    config.data.prompt_dataset, config.data.image_key = str(written(Path("prompts.jsonl"), rows)), "images"
    config.rollout.engine, config.rollout.batch_size, config.rollout.n_samples_per_prompt = Engine.VLLM, 3, 2
    config.rollout.max_new_tokens, config.rollout.stop_strings = 40, tuple("abcdefghi stuvw")
    config.train.max_steps = 2
    config.cluster.enable, config.cluster.timeout, config.actor.num_gpus_per_node = True, 300, 2
    config.cluster.strategy = Strategy.FSDP2
    config.ckpt.output_dir, config.logger.console = "out", False
    rollgrad.train(config, environment=Gallery)
    first, second = (row for row in logged(Path("out")) if "policy/loss" in row)
    assert first["reward/turns"] > 1.5
    for step in (first, second):
        assert step["policy/mismatch_abs"] < 1e-4  # the trainer scores what the engine sampled, also after a push
    before, after = weights(Path()), weights(Path("out"))
    assert any("vision" in name and not before[name].equal(after[name]) for name in before)


@pytest.mark.demo
def test_the_picture_task_is_trained_in_a_cluster(
    ray: None, runs_share_processes: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A single step of the run whose curve docs/images.md shows: vLLM sees the images as the trainer does."""
    monkeypatch.setattr(sys, "path", sys.path.copy())  # the script adds the folder of the examples
    from benchmarks.pictures_learn import Options, run

    curves = run("shapes_cluster", Options(smoke=True), tmp_path)
    assert [step for step, _ in curves.held_out] == [0, 1]
    (step,) = (row for row in logged(tmp_path / "shapes_cluster") if "policy/loss" in row)
    assert step["sync/bytes"] > 0  # weights were sent to an engine that has its own
    assert step["policy/mismatch_abs"] < 1e-4
