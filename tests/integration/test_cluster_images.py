"""Images in several processes: models that are divided see them as one process does, and vLLM samples from them."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import rollgrad
from rollgrad.adapters.models.ray.sharded import ShardedPolicy, divided_reward
from rollgrad.adapters.models.ray.worker_group import WorkerGroup
from rollgrad.application.settings.run import RLConfig
from rollgrad.application.settings.sections.actor import DType, LoraSync
from rollgrad.application.settings.sections.cluster import Strategy
from rollgrad.application.settings.sections.rollout import Engine
from tests.example_runs import logged, small, weights, written
from tests.fakes import cluster, images
from tests.fakes.cluster import FSDP
from tests.image_runs import Gallery, enter_picture_folder
from tests.tiny_vision import save_tiny_reward, save_tiny_vlm

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


@pytest.mark.parametrize(
    ("stage", "width"),
    [
        (2, 1),
        *(pytest.param(stage, 1, marks=pytest.mark.wide) for stage in (3, FSDP)),
        (3, 2),
        pytest.param(FSDP, 2, marks=pytest.mark.wide),
    ],
)
def test_every_division_sees_images_as_one_process(
    group: WorkerGroup, model: str, expected: tuple[torch.Tensor, dict[str, float]], stage: int | str, width: int
) -> None:
    """Also where a process has no image of a pass: the tower, whose weights are divided, computes in all of them; and
    where both share the sequences."""
    logprobs_N, metrics = expected
    group.build(images.rank_policy, model, stage, width)
    policy = ShardedPolicy(group, width=width)
    assert steps(policy, model) == pytest.approx(metrics, rel=1e-3)
    torch.testing.assert_close(policy.score(images.batch(model)).logprobs_N, logprobs_N, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("stage", [pytest.param(3, marks=pytest.mark.wide), FSDP])
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


PAIRS = [
    {"prompt": "What is <image>?", "images": ["red.png"], "chosen": "red", "rejected": "blue"},
    {"prompt": "What is 1 plus 1, if not three or four?", "images": [], "chosen": "2", "rejected": "3"},
    {"prompt": "Are they alike?", "images": ["blue.png", "red.png"], "chosen": "no", "rejected": "yes"},
    {"prompt": "And 2 plus 2?", "images": [], "chosen": "It is four.", "rejected": "5"},
    {"prompt": "Is <image> red?", "images": ["blue.png"], "chosen": "no", "rejected": "yes"},
]
"""Pairs of which a process may have those without images alone."""
REWARD_METRICS = ("train/loss", "train/grad_norm", "train/accuracy", "eval/loss", "eval/score_std")


@pytest.mark.wide
@pytest.mark.parametrize(
    "division",
    [
        {"ds.zero_stage": 3},
        {"cluster.strategy": Strategy.FSDP2},
        {"cluster.strategy": Strategy.FSDP2, "ds.sequence_parallel_size": 2},
    ],
    ids=["zero3", "fsdp2", "sequences"],
)
def test_a_reward_model_learns_from_images_in_processes_as_in_one(
    runs_share_processes: None,
    model: str,
    division: Mapping[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    enter_picture_folder(tmp_path, monkeypatch)
    rows = written(Path("pairs.jsonl"), PAIRS)
    runs = []
    for output in (Path("one"), Path("two")):
        run = small(rollgrad.RMRun(), Path(model), rows, output, lr=1e-3, batch_size=3)
        run.data.image_key, run.eval.dataset = "images", str(rows)
        if output.name == "two":
            run.cluster.enable, run.cluster.timeout, run.actor.num_gpus_per_node = True, 300, 2
            for setting, value in division.items():
                section, _, name = setting.partition(".")
                setattr(getattr(run, section), name, value)
        rollgrad.train_rm(run)
        runs.append((logged(output), weights(output)))
    (alone, one), (shared, two) = runs
    for step, other in zip(alone, shared, strict=True):
        wanted = {name: value for name, value in step.items() if name in REWARD_METRICS}
        assert {name: other[name] for name in wanted} == pytest.approx(wanted, rel=1e-3, abs=1e-5)
    before = load_file(Path(model) / "model.safetensors")
    assert one.keys() == two.keys()
    for name, weight in one.items():
        torch.testing.assert_close(two[name], weight, rtol=0, atol=1e-3, msg=name)
    tower = [name for name in before if "visual" in name]
    assert max(float((one[f"model.{name}"] - before[name]).abs().max()) for name in tower) > 1e-3  # it learns


@pytest.mark.wide
@pytest.mark.parametrize("learns", ["model", "adapters"])
def test_a_run_on_vllm_in_a_cluster_learns_from_images(
    ray: None, runs_share_processes: None, learns: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts with images, without, and with those that an environment answers with; the tower learns, or adapters of
    the language model alone, which vLLM gets without weights; and the second step's images are those of the first."""
    path = save_tiny_vlm("idefics3", tmp_path / "model")
    enter_picture_folder(tmp_path, monkeypatch)
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
    if learns == "adapters":
        config.actor.lora.rank, config.actor.lora.sync = 4, LoraSync.ADAPTER
    config.cluster.enable, config.cluster.timeout, config.actor.num_gpus_per_node = True, 300, 2
    config.cluster.strategy = Strategy.FSDP2
    config.ckpt.output_dir, config.logger.console = "out", False
    rollgrad.train(config, environment=Gallery)
    first, second = (row for row in logged(Path("out")) if "policy/loss" in row)
    assert first["reward/turns"] > 1.5
    for step in (first, second):
        assert step["policy/mismatch_abs"] < 1e-4  # the trainer scores what the engine sampled, also after a push
    before, after = weights(Path()), weights(Path("out"))
    changed = [name for name in before if not before[name].equal(after[name])]
    assert any("text_model" in name for name in changed)
    assert any("vision" in name for name in changed) == (learns == "model")


@pytest.mark.demo
@pytest.mark.wide
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
