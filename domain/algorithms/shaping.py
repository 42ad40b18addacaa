"""Reward shaping: changes of rewards before the estimator sees them.

All functions take a packed batch and return its `rewards_N` (each turn's reward, at its last token). A change that
depends on the whole rollout (its length, whether it was truncated) changes its outcome: the difference goes to the
rollout's last action token, and the rewards of earlier turns stay as they are.
"""

import math
from collections.abc import Mapping

import torch
from attrs import evolve, frozen
from torch import Tensor

from rollgrad.domain.algorithms.equality import SAME
from rollgrad.domain.algorithms.shaping_settings import ShapingSettings
from rollgrad.domain.batches.by_sequence import nonzero
from rollgrad.domain.batches.packed import RolloutBatch

STD_FLOOR = 1e-8
"""Standard deviation below which normalisation stops dividing by it."""


@frozen(kw_only=True, eq=False)
class _Outcomes:
    """Outcome of each rollout (R): reward, number of action tokens, whether any branch was truncated, highest score,
    and index of the last action token."""

    reward_R: Tensor
    length_R: Tensor
    truncated_R: Tensor
    score_R: Tensor
    last_R: Tensor

    @classmethod
    def of(cls, batch: RolloutBatch) -> "_Outcomes":
        rollout_S = batch.rollout_ids_S
        rollout_A = rollout_S[batch.sequence_ids_N[batch.action_mask_N]]
        count = int(rollout_S.max()) + 1
        index_A = batch.action_mask_N.nonzero()[:, 0]
        lowest = torch.full((count,), -math.inf)
        return cls(
            reward_R=outcomes(batch),
            length_R=torch.bincount(rollout_A, minlength=count),
            truncated_R=torch.zeros(count, dtype=torch.int64).index_add_(0, rollout_S, batch.truncated_S.long()) > 0,
            score_R=lowest.scatter_reduce(0, rollout_S, batch.scores_S.float(), "amax"),
            last_R=torch.zeros(count, dtype=torch.int64).scatter_reduce(
                0, rollout_A, index_A, "amax", include_self=False
            ),
        )

    def replace(self, batch: RolloutBatch, reward_R: Tensor) -> Tensor:
        """Returns `rewards_N` whose sum over each rollout is `reward_R`. Rollouts whose sum stays are left to the
        bit."""
        changed_R = (reward_R != self.reward_R) & (self.length_R > 0)
        last_R = self.last_R[changed_R]
        earlier_R = self.reward_R[changed_R] - batch.rewards_N[last_R]  # exactly 0 for a single turn
        return batch.rewards_N.index_put((last_R,), (reward_R[changed_R] - earlier_R).to(batch.rewards_N.dtype))


def clip_outcomes(batch: RolloutBatch, limits: tuple[float, float]) -> Tensor:
    """Clamps outcomes to `limits`; the difference goes to the rollout's last action token."""
    outcomes = _Outcomes.of(batch)
    return outcomes.replace(batch, outcomes.reward_R.clamp(*limits))


def overlong_penalty(batch: RolloutBatch, *, limit: int, buffer: int, factor: float) -> Tensor:
    """Applies DAPO's soft overlong punishment (Yu et al. 2025, eq. 13): from `limit - buffer` sampled tokens on a
    penalty grows in proportion, up to `factor` at `limit`. Environment tokens do not count.

    Raises:
        ValueError: `buffer` is not at least 1.
    """
    if buffer < 1:
        raise ValueError(f"The buffer of the length penalty is {buffer} tokens, but it needs at least 1.")
    outcomes = _Outcomes.of(batch)
    excess_R = (outcomes.length_R - (limit - buffer)).clamp(0, buffer)
    return outcomes.replace(batch, outcomes.reward_R - factor * excess_R / buffer)


def stop_properly(batch: RolloutBatch, coef: float) -> Tensor:
    """Lowers the outcome of a truncated rollout to `coef` x its reward (0 <= coef <= 1), or to `coef` itself if that is
    negative (ProRL, Liu et al. 2025, section 3). It never raises an outcome: half of a negative reward is more than the
    reward, and would be a bonus for truncation."""
    outcomes = _Outcomes.of(batch)
    target_R = outcomes.reward_R * coef if coef >= 0 else torch.full_like(outcomes.reward_R, coef)
    lowered_R = torch.minimum(outcomes.reward_R, target_R)
    return outcomes.replace(batch, torch.where(outcomes.truncated_R, lowered_R, outcomes.reward_R))


def cosine_length(batch: RolloutBatch, settings: ShapingSettings, *, limit: int) -> Tensor:
    """Replaces outcomes by a reward that falls or rises with the length along half a cosine, from that of an empty
    reply to that of one of `limit` tokens. Replies whose score reaches `pass_threshold` have other end points than the
    rest, and truncated ones a fixed reward (Yeo et al. 2025, "Demystifying Long Chain-of-Thought", eq. 1 and table
    1)."""
    outcomes = _Outcomes.of(batch)
    share_R = (outcomes.length_R / limit).clamp(max=1.0)
    bend_R = 0.5 * (1 + torch.cos(math.pi * share_R))
    passed, failed = (end + bend_R * (start - end) for start, end in (settings.cosine_passed, settings.cosine_failed))
    reward_R = torch.where(outcomes.score_R >= settings.pass_threshold, passed, failed)
    return outcomes.replace(batch, torch.where(outcomes.truncated_R, settings.cosine_exceeded, reward_R))


def group_length(batch: RolloutBatch, *, coef: float, pass_threshold: float) -> Tensor:
    """Adds `coef` x the length reward of Kimi k1.5 (Kimi Team 2025, arXiv:2501.12599, section 2.3.3) to outcomes: from
    1/2 for the shortest rollout of a group to -1/2 for the longest, by sampled tokens. Rollouts whose score is below
    `pass_threshold` get at most 0; in a group of one length all get 0."""
    outcomes = _Outcomes.of(batch)
    _, group_S = torch.unique(batch.group_ids_S, return_inverse=True)
    length_R = outcomes.length_R.double()
    group_R = torch.zeros_like(outcomes.length_R).index_put_((batch.rollout_ids_S,), group_S)
    low_R, high_R = (
        torch.zeros_like(length_R).scatter_reduce(0, group_R, length_R, reduce, include_self=False)[group_R]
        for reduce in ("amin", "amax")
    )
    shorter_R = 0.5 - (length_R - low_R) / (high_R - low_R).clamp(min=1)
    earned_R = torch.where(outcomes.score_R >= pass_threshold, shorter_R, shorter_R.clamp(max=0.0))
    added_R = torch.where(high_R > low_R, coef * earned_R, 0.0)
    return outcomes.replace(batch, (outcomes.reward_R.double() + added_R).to(outcomes.reward_R.dtype))


def normalise(batch: RolloutBatch, *, mean: float, std: float) -> Tensor:
    """Subtracts `mean` from outcomes and divides them by `std`; rewards of single turns are divided, too."""
    outcomes = _Outcomes.of(batch)
    scaled_N = batch.rewards_N / max(std, STD_FLOOR)
    return scaled_N.index_add(0, outcomes.last_R, torch.full_like(outcomes.reward_R, -mean / max(std, STD_FLOOR)))


def normalise_running(
    batch: RolloutBatch, moments: Mapping[str, "RunningMoments"]
) -> tuple[Tensor, dict[str, "RunningMoments"]]:
    """Normalises outcomes by the moments of the same role's outcomes so far, these included; returns the moments, too.
    Without roles all are of the role ""."""
    roles_S = batch.roles_S or ("",) * len(batch.lengths_S)
    rewards_N, reward_R, found = batch.rewards_N, outcomes(batch), dict(moments)
    for role in sorted(set(roles_S)):
        mine_S = torch.tensor([own == role for own in roles_S])
        mine_R = torch.zeros(len(reward_R), dtype=torch.bool).index_fill_(0, batch.rollout_ids_S[mine_S], value=True)
        found[role] = found.get(role, RunningMoments()).update(reward_R[mine_R])
        normalised_N = normalise(batch, mean=found[role].mean, std=found[role].std)
        own_N = mine_S.repeat_interleave(batch.lengths_S)
        rewards_N = normalised_N if bool(mine_S.all()) else torch.where(own_N, normalised_N, rewards_N)
    return rewards_N, found


def outcomes(batch: RolloutBatch) -> Tensor:
    """Returns the summed reward of each rollout, [R]."""
    rollout_S = batch.rollout_ids_S
    index, sequences = nonzero(batch.rewards_N, batch.lengths_S, batch.action_mask_N)
    reward_R = batch.rewards_N.new_zeros(int(rollout_S.max()) + 1)
    return reward_R.index_add_(0, rollout_S[sequences], batch.rewards_N[index])


@frozen(kw_only=True)
class RunningMoments:
    """Mean and spread of all rewards seen so far (Chan et al. 1983's parallel update); a pure state machine."""

    count: float = 0.0
    mean: float = 0.0
    squares: float = 0.0

    @property
    def std(self) -> float:
        """Population standard deviation; 1 while rewards differ by rounding alone, which would become as large as
        differences that mean something."""
        deviation = math.sqrt(self.squares / self.count) if self.count else 0.0
        return deviation if deviation > SAME * abs(self.mean) else 1.0

    def update(self, values: Tensor) -> "RunningMoments":
        """Returns the moments with `values` included; unchanged if there are none."""
        if len(values) == 0:
            return self
        count, values = len(values), values.double()
        mean = float(values.mean())
        total = self.count + count
        gap = mean - self.mean
        return evolve(
            self,
            count=total,
            mean=self.mean + gap * count / total,
            squares=self.squares + float((values - mean).square().sum()) + gap**2 * self.count * count / total,
        )

    def state_dict(self) -> dict[str, float]:
        """Returns the three numbers."""
        return {"count": self.count, "mean": self.mean, "squares": self.squares}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, float]) -> "RunningMoments":
        """Returns the moments that `state_dict` described."""
        return cls(count=state["count"], mean=state["mean"], squares=state["squares"])
