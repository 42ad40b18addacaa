"""Replies that reward models of this process judge."""

from collections.abc import Sequence

import pytest

from rollgrad.adapters.models.torch.rewards.reward_model import RewardModel
from rollgrad.domain.episodes.rewards import RewardInput


def judged_replies(monkeypatch: pytest.MonkeyPatch) -> list[tuple[RewardInput, float]]:
    """Gets each reply that is judged from now on, with its score."""
    judged: list[tuple[RewardInput, float]] = []
    judge = RewardModel.judge

    def noted(self: RewardModel, replies: Sequence[RewardInput]) -> list[tuple[float, bool]]:
        found = judge(self, replies)
        judged.extend((reply, score) for reply, (score, _) in zip(replies, found, strict=True))
        return found

    monkeypatch.setattr(RewardModel, "judge", noted)
    return judged
