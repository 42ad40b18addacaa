"""An evaluation writes its replies to a file, from which it continues if all that results depend on is the same."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve
from structlog.testing import capture_logs

import rollgrad
from rollgrad.domain.episodes.generation import StopReason
from rollgrad.domain.episodes.rewards import FailureKind, RolloutFailure
from rollgrad.domain.episodes.trajectory import Trajectory
from rollgrad.domain.errors import CheckpointError, EngineError
from rollgrad.domain.ports.agent_executor import EpisodeRequest
from rollgrad.testing import FakeAgentExecutor
from rollgrad.testing.agent_executor import make_trajectory

ROWS = [{"question": f"What is {n} plus 1?", "answer": str(n + 1)} for n in range(4)]
REWARD = "def reward_func(queries, prompts, labels):\n    return [1.0] * len(labels)\n"


def play(request: EpisodeRequest) -> list[Trajectory]:
    place = {"group_id": request.group_id, "sample_id": request.sample_id}
    return [make_trajectory(request.prompt.token_ids, [7], rewards=[request.group_id / 7], **place)]


def ends_at(group_id: int) -> Callable[[EpisodeRequest], list[Trajectory] | RolloutFailure]:
    def some(request: EpisodeRequest) -> list[Trajectory] | RolloutFailure:
        if request.group_id == group_id:
            return request.failure(FailureKind.ENVIRONMENT, "the board is gone")
        return play(request)

    return some


@pytest.fixture
def config(tiny_model_dir: Path, tmp_path: Path) -> rollgrad.RLConfig:
    """Evaluates four prompts one by one, two replies to each, and tolerates no failure."""
    (tmp_path / "reward.py").write_text(REWARD)
    config = rollgrad.RLConfig()
    config.actor.model_name_or_path, config.reward.function_path = str(tiny_model_dir), str(tmp_path / "reward.py")
    config.rollout.max_concurrent, config.rollout.max_failures, config.rollout.max_new_tokens = 1, 0, 4
    config.eval.n_samples_per_prompt, config.eval.temperature = 2, 1.0
    return config


def evaluated(config: rollgrad.RLConfig, out: Path, executor: Any, rows: Any = None) -> dict[str, float]:
    return rollgrad.evaluate(config, output=out, prompts=rows or ROWS, executor=executor)


def test_an_evaluation_that_ended_early_is_continued(config: rollgrad.RLConfig, tmp_path: Path) -> None:
    whole = evaluated(config, tmp_path / "whole.jsonl", FakeAgentExecutor(play))
    part = tmp_path / "part.jsonl"
    with capture_logs() as logs, pytest.raises(EngineError):
        evaluated(config, part, FakeAgentExecutor(ends_at(2)))
    assert logs[-1]["event"] == "what has been played is kept: the same command continues the evaluation"
    again = FakeAgentExecutor(play)
    assert evaluated(config, part, again) == whole
    assert {request.group_id for request in again.requests} == {2, 3}
    assert sorted(part.read_text().splitlines()) == sorted((tmp_path / "whole.jsonl").read_text().splitlines())
    nothing = FakeAgentExecutor(play)
    assert evaluated(config, part, nothing) == whole
    assert nothing.requests == []


@pytest.mark.parametrize(("cut_off", "bound", "told"), [(3, 4, True), (3, 1, False), (0, 4, False)])
def test_replies_that_were_cut_off_are_told(
    config: rollgrad.RLConfig, tmp_path: Path, cut_off: int, bound: int, told: bool
) -> None:
    """A score of replies that had no room to end says little of a model, unless one token is all that is asked for."""

    def some(request: EpisodeRequest) -> list[Trajectory]:
        (played,) = play(request)
        return [evolve(played, stop_reason=StopReason.LENGTH)] if request.sample_id < cut_off else [played]

    config.eval.max_new_tokens = bound
    with capture_logs() as logs:
        evaluated(config, tmp_path / "replies.jsonl", FakeAgentExecutor(some))
    words = "38% of the replies to eval.dataset were cut off, and are judged as they are: raise --eval.max_new_tokens"
    assert [words in log["event"] for log in logs if "cut off" in log["event"]] == [True] * told


def test_what_results_depend_on_must_be_the_same(config: rollgrad.RLConfig, tmp_path: Path) -> None:
    """Settings that only bound the work may differ, and other models may be added."""
    out, executor = tmp_path / "replies.jsonl", FakeAgentExecutor(play)
    evaluated(config, out, executor)
    before = out.read_bytes()

    def refused(*names: str) -> None:
        with pytest.raises(CheckpointError, match=".*".join(f"{name} \\(" for name in names)):
            evaluated(config, out, executor)

    config.eval.temperature, config.train.seed = 0.5, 7
    refused("train.seed", "eval.temperature")
    config.eval.temperature, config.train.seed = 1.0, rollgrad.RLConfig().train.seed
    with pytest.raises(CheckpointError, match=r"differ in prompts \("):
        evaluated(config, out, executor, [*ROWS[:3], {**ROWS[3], "answer": "5"}])
    (tmp_path / "reward.py").write_text(REWARD.replace("1.0", "0.5"))
    refused("content of reward.function_path")
    (tmp_path / "reward.py").write_text(REWARD)
    weights = tmp_path / "model"
    weights.mkdir()
    for file in Path(config.actor.model_name_or_path).iterdir():
        (weights / file.name).write_bytes(file.read_bytes())
    assert out.read_bytes() == before
    config.actor.model_name_or_path = str(weights)
    evaluated(config, out, executor)
    (weights / "config.json").write_text((weights / "config.json").read_text() + "\n")
    refused(f"weights of {weights}")
    models = [json.loads(line)["model"] for line in out.read_text().splitlines()]
    assert (models.count(str(weights)), len(models)) == (8, 16)
    config.rollout.max_concurrent, config.rollout.batch_size, config.eval.steps = 4, 3, 5
    config.actor.model_name_or_path = models[0]
    asked = len(executor.requests)
    evaluated(config, out, executor)
    assert len(executor.requests) == asked
