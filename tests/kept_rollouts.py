"""Runs whose rollouts the real writer wrote, without a model."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from attrs import evolve

from rollgrad.adapters.tracking.trajectories import ParquetTrajectories
from rollgrad.application.rollouts.groups import RolloutGroup
from rollgrad.domain.batches.packed import RolloutBatch, pack
from rollgrad.domain.episodes.generation import StopReason
from rollgrad.domain.episodes.prompts import Prompt
from rollgrad.domain.episodes.rewards import FailureKind, RolloutFailure
from rollgrad.testing.agent_executor import make_trajectory
from rollgrad.testing.chat_codec import EOS, FakeChatCodec

CODEC = FakeChatCodec()
FAILURE = RolloutFailure(kind=FailureKind.REWARD, message="It hung.", group_id=0, sample_id=9)


def group(
    number: int,
    replies: Mapping[str, float],
    *,
    prompt: str = "How much? ",
    failures: Sequence[RolloutFailure] = (),
    first_sample: int | None = None,
    stop_reason: StopReason = StopReason.STOP,
) -> RolloutGroup:
    """Returns the replies to one prompt, each with its reward."""
    tokens = CODEC.encode(prompt)
    start = 10 * number if first_sample is None else first_sample
    played = tuple(
        make_trajectory(
            tokens,
            [*CODEC.encode(reply), EOS],
            group_id=number,
            sample_id=start + index,
            rewards=[reward],
            reward_parts={"format": reward / 2},
            stop_reason=stop_reason,
        )
        for index, (reply, reward) in enumerate(replies.items())
    )
    return RolloutGroup(
        group_id=number,
        prompt=Prompt(token_ids=tuple(tokens), text=prompt, label="7", datasource=f"source {number}"),
        trajectories=played,
        failures=tuple(failures),
    )


def learned(groups: Sequence[RolloutGroup]) -> RolloutBatch:
    """Returns the batch of an update: advantages are rewards less their group's mean, weights a mean over tokens."""
    rewards = [torch.tensor([trajectory.reward for trajectory in group.trajectories]) for group in groups]
    advantages_S = torch.cat([rewards_G - rewards_G.mean() for rewards_G in rewards])
    batch = pack([trajectory for group in groups for trajectory in group.trajectories])
    mask = batch.action_mask_N
    return evolve(
        batch,
        advantages_N=torch.where(mask, advantages_S[batch.sequence_ids_N], 0.0),
        loss_weights_N=mask / mask.sum(),
    )


def write_rollouts(
    run: Path,
    updates: Mapping[int, Sequence[RolloutGroup]],
    evaluations: Mapping[int, Sequence[RolloutGroup]] | None = None,
) -> Path:
    """Writes the rollouts of updates and evaluations by step, and the loss of each update; returns the directory."""
    run.mkdir(parents=True, exist_ok=True)
    store = ParquetTrajectories(run / "trajectories", CODEC, max_gib=1.0)
    lines: list[dict[str, Any]] = []
    for step, groups in updates.items():
        batch = learned(groups)
        store.update(step, groups, batch)
        assert batch.loss_weights_N is not None
        assert batch.advantages_N is not None
        loss = -float((batch.loss_weights_N * batch.advantages_N).sum())
        lines.append({"step": step, "reward/mean": float(batch.scores_S.mean()), "policy/policy_loss": loss})
    for step, groups in (evaluations or {}).items():
        store.evaluation(step, groups)
    store.close()
    with (run / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
    return run


def usual_run(run: Path) -> Path:
    """Writes two updates of two groups, one of which has no spread, a failed episode, and two evaluations."""
    first = [
        group(0, {"seven": 1.0, "I am sorry": 0.0, "7": 1.0}, failures=[FAILURE]),
        group(1, {"no": 0.0, "never": 0.0}, prompt="And then? ", stop_reason=StopReason.LENGTH),
    ]
    second = [group(2, {"Seven!": 1.0, "eight": 0.0}), group(3, {"yes": 0.5, "No.": 0.0}, prompt="And then? ")]
    asked = {step: [group(0, {f"at {step}": step / 2}, prompt="Held out? ")] for step in (0, 2)}
    return write_rollouts(run, {1: first, 2: second}, asked)
