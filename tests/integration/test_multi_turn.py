"""An episode of several turns on a real (tiny) model, and training on it."""

import asyncio
import json
import string
from pathlib import Path
from typing import Any

import pytest
import structlog
from attrs import evolve

import rollgrad
from rollgrad.adapters.chat.template_codec import TemplateCodec
from rollgrad.adapters.engines.embedded.engine import EmbeddedEngine
from rollgrad.adapters.models.torch.loading.loading import load_causal_lm, load_tokenizer
from rollgrad.application.episodes import multi_turn
from rollgrad.application.episodes.multi_turn import MultiTurnExecutor
from rollgrad.application.settings.run import RLConfig
from rollgrad.application.settings.sections.actor import DType
from rollgrad.application.settings.sections.optimizer import LRScheduler
from rollgrad.domain.episodes.generation import SamplingParams, StopReason
from rollgrad.domain.episodes.messages import Action
from rollgrad.domain.episodes.prompts import Prompt
from rollgrad.domain.episodes.rewards import FailureKind, RolloutFailure
from rollgrad.domain.episodes.trajectory import SegmentKind, Trajectory
from rollgrad.domain.ports.agent_executor import EpisodeRequest
from rollgrad.domain.ports.environment import StepResult
from rollgrad.testing.agent_executor import FakeAgentExecutor, make_trajectory
from rollgrad.testing.reward_source import FakeRewardSource
from tests.example_runs import logged


class CountDown:
    """Three turns with rewards 1, 2, 3 and a remark after each."""

    closed = 0

    def __init__(self) -> None:
        self.turns = 0

    async def reset(self, prompt: Prompt) -> str:
        return ""

    async def step(self, action: Action) -> StepResult:
        self.turns += 1
        return StepResult(observation=f" turn {self.turns} ", reward=self.turns, terminated=self.turns == 3)

    async def close(self) -> None:
        CountDown.closed += 1


class Wordy(CountDown):
    """Longer replies are worth more."""

    async def step(self, action: Action) -> StepResult:
        result = await super().step(action)
        return evolve(result, reward=float(len(action.text)))


class Broken(CountDown):
    async def step(self, action: Action) -> StepResult:
        raise ValueError("no such door")


async def play(model_dir: Path, environment: type[CountDown], max_turns: int = 8, **limits: Any) -> Any:
    import torch

    tokenizer = load_tokenizer(str(model_dir), flag="model")
    model = load_causal_lm(str(model_dir), dtype=torch.float32, device=torch.device("cpu"), flag="model")
    # No token ends a turn here; a stop string that always matches does.
    engine = EmbeddedEngine(model, eos_token_ids=[], decode=tokenizer.decode)
    executor = MultiTurnExecutor(
        engine, TemplateCodec(tokenizer), lambda params: environment(), max_turns=max_turns, **limits
    )
    params = SamplingParams(max_new_tokens=4, stop_token_ids=tuple(range(len(tokenizer))), seed=5)
    prompt = Prompt(token_ids=tuple(tokenizer("go")["input_ids"]), text="go")
    request = EpisodeRequest(prompt=prompt, params=params, group_id=0, sample_id=0)
    return await executor.run(request)


async def test_turns_keep_tokens_and_rewards_apart(tiny_model_dir: Path) -> None:
    (trajectory,) = await play(tiny_model_dir, CountDown)
    kinds = [segment.kind for segment in trajectory.segments]
    action, observation = SegmentKind.ACTION, SegmentKind.OBSERVATION
    assert kinds == [SegmentKind.PROMPT, action, observation, action, observation, action]
    assert [s.reward for s in trajectory.segments if s.kind is action] == [1, 2, 3]
    assert trajectory.stop_reason is StopReason.ENVIRONMENT
    assert trajectory.score == 6
    tokenizer = load_tokenizer(str(tiny_model_dir), flag="model")
    remarks = [trajectory.token_ids_T[s.start : s.stop].tolist() for s in trajectory.segments if s.kind is observation]
    assert [tokenizer.decode(ids) for ids in remarks] == [" turn 1 ", " turn 2 "]


async def test_the_state_of_a_turn_is_the_observation_or_what_the_environment_calls_it(tiny_model_dir: Path) -> None:
    class Named(CountDown):
        async def step(self, action: Action) -> StepResult:
            return evolve(await super().step(action), state="the same room")

    def states(trajectory: Trajectory) -> list[int | None]:
        return [s.state for s in trajectory.segments if s.kind is SegmentKind.ACTION]

    (said,), (again,), (named,) = [await play(tiny_model_dir, kind) for kind in (CountDown, CountDown, Named)]
    assert len(set(states(said))) == 3
    assert states(again) == states(said)
    assert states(named)[0] == states(said)[0]
    assert states(named)[1] == states(named)[2] not in states(said)


async def test_too_many_turns_are_a_truncation(tiny_model_dir: Path) -> None:
    (trajectory,) = await play(tiny_model_dir, CountDown, max_turns=2)
    assert trajectory.stop_reason is StopReason.TURN_LIMIT
    assert trajectory.segments[-1].kind is SegmentKind.ACTION


async def test_a_broken_environment_costs_its_own_episode_and_is_closed(tiny_model_dir: Path) -> None:
    closed = CountDown.closed
    failure = await play(tiny_model_dir, Broken)
    assert isinstance(failure, RolloutFailure)
    assert failure.kind is FailureKind.ENVIRONMENT
    assert "ValueError: no such door" in failure.message
    assert CountDown.closed == closed + 1


class NotClosed(CountDown):
    async def close(self) -> None:
        raise OSError("The container is still in use.")


class NeverClosed(CountDown):
    async def close(self) -> None:
        await asyncio.Event().wait()


@pytest.mark.parametrize(
    ("environment", "reason"), [(NotClosed, "still in use"), (NeverClosed, "it takes more than 0.01 s")], ids=str
)
async def test_what_was_played_counts_though_the_environment_cannot_be_closed(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch, environment: type[CountDown], reason: str
) -> None:
    monkeypatch.setattr(multi_turn, "CLOSE_SECONDS", 0.01)
    with structlog.testing.capture_logs() as logs:
        (trajectory,) = await play(tiny_model_dir, environment)
    assert trajectory.score == 6
    (told,) = (log for log in logs if log["event"] == "environment_not_closed")
    assert reason in told["reason"]


@pytest.mark.parametrize("estimator", ["gae", "group_norm", "turn_gae", "turn_group_norm", "gigpo"])
def test_training_in_an_environment(tiny_model_dir: Path, tmp_path: Path, estimator: str) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"input": f"go {i}"}) + "\n" for i in range(4)))
    config = RLConfig()
    config.actor.model_name_or_path, config.actor.dtype = str(tiny_model_dir), DType.FLOAT32
    config.algo.advantage.estimator = estimator
    config.data.prompt_dataset = str(data)
    config.rollout.batch_size, config.rollout.n_samples_per_prompt = 2, 2
    config.rollout.max_new_tokens = 8
    config.rollout.stop_strings = ("\ufffd", *string.printable)  # a random model seldom ends a turn by itself
    config.train.max_steps = 1
    config.ckpt.output_dir = str(tmp_path / "out")
    config.logger.console = False
    result = rollgrad.train(config, environment=Wordy)
    assert result.steps == 1
    (row,) = logged(tmp_path / "out")
    assert ("advantage/same_state_share" in row) == (estimator == "gigpo")
    shares = [value for key, value in row.items() if key.startswith("policy/gradient_share_turn_")]
    assert len(shares) > 1
    assert sum(shares) == pytest.approx(1.0)
    assert (result.model / "model.safetensors").exists()


def test_an_environment_s_episodes_are_penalised_by_their_sampled_tokens(tiny_model_dir: Path, tmp_path: Path) -> None:
    """With a buffer as long as the limit every sampled token costs the same share; the environment's cost nothing."""
    (tmp_path / "data.jsonl").write_text("".join(json.dumps({"input": f"go {i}"}) + "\n" for i in range(4)))
    config = RLConfig()
    config.actor.model_name_or_path, config.actor.dtype = str(tiny_model_dir), DType.FLOAT32
    config.algo.advantage.estimator = "reinforce"
    config.data.prompt_dataset = str(tmp_path / "data.jsonl")
    config.rollout.batch_size, config.rollout.max_new_tokens = 4, 8
    config.rollout.stop_strings = ("\ufffd", *string.printable)
    config.rollout.max_episode_tokens = config.reward.overlong_buffer_len = 200
    config.reward.overlong_penalty_factor = 10.0
    config.train.max_steps = 1
    config.ckpt.output_dir, config.logger.console = str(tmp_path / "out"), False
    played: list[Trajectory] = []
    rollgrad.train(
        config,
        environment=CountDown,
        sample_log=lambda step, groups: played.extend(t for group in groups for t in group.trajectories),
    )
    (row,) = logged(tmp_path / "out")
    expected = [6 - 10 * t.action_length / 200 for t in played]
    assert all(t.action_length >= 3 for t in played)
    assert row["reward/shaped_mean"] == pytest.approx(sum(expected) / len(expected))


def test_rollouts_that_branch_take_the_optimizer_steps_that_were_planned(tiny_model_dir: Path, tmp_path: Path) -> None:
    """Four rollouts of three branches with a batch of four: a step each, and the schedule ends with the run."""
    (tmp_path / "data.jsonl").write_text("".join(json.dumps({"input": f"go {i}"}) + "\n" for i in range(4)))

    def branches(request: EpisodeRequest) -> list[Trajectory]:
        return [
            make_trajectory(
                request.prompt.token_ids,
                [10 + branch, 20 + request.sample_id],
                group_id=request.group_id,
                sample_id=request.sample_id,
                rewards=[float(request.sample_id % 2)] if branch == 2 else [],
            )
            for branch in range(3)
        ]

    config = RLConfig()
    config.actor.model_name_or_path, config.actor.dtype = str(tiny_model_dir), DType.FLOAT32
    config.actor.lr_scheduler, config.actor.min_lr_ratio, config.actor.adam.lr = LRScheduler.LINEAR, 0.0, 1e-3
    config.algo.advantage.estimator = "reinforce"
    config.data.prompt_dataset = str(tmp_path / "data.jsonl")
    config.rollout.batch_size = config.train.batch_size = 4
    config.rollout.max_new_tokens = 64
    config.train.max_steps = 4
    config.ckpt.output_dir, config.logger.console = str(tmp_path / "out"), False
    rollgrad.train(config, executor=FakeAgentExecutor(branches), reward=FakeRewardSource(lambda request: 0.0))
    rows = logged(tmp_path / "out")
    assert [row["policy/lr"] for row in rows] == pytest.approx([1e-3, 0.75e-3, 0.5e-3, 0.25e-3])
    assert [row["policy/trained_share"] for row in rows] == [1.0] * 4
