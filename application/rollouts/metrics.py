"""Metrics of a rollout."""

import statistics
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress

from rollgrad.application.rollouts.groups import RolloutGroup
from rollgrad.domain.algorithms.equality import differ, reaches
from rollgrad.domain.algorithms.evaluation import MOST_SETS
from rollgrad.domain.episodes.trajectory import Trajectory


def sampled_entropy(trajectories: Sequence[Trajectory]) -> float:
    """Returns the mean of -log-prob over all sampled tokens, in nats: an unbiased estimate of the entropy."""
    return -sum(float(t.logprobs_T.sum()) for t in trajectories) / sum(t.action_length for t in trajectories)


def rollout_metrics(groups: Sequence[RolloutGroup], pass_threshold: float) -> dict[str, float]:
    """Returns the metrics of a rollout.

    - Rewards and lengths of samples, summed over their branches; lengths also of samples that passed and that failed.
    - The spread of scores in groups, and the share of groups all of whose samples passed, or failed.
    - `rollout/entropy`: `sampled_entropy`.
    - `rollout/duplicate_share`: the share of samples that repeat the tokens of an earlier one of their group.
    - `rollout/reward_length_correlation`: Pearson's correlation of reward and length over all samples; missing if one
      of them is constant.
    - `reward/NAME`: the mean of each of the reward's own metrics, unless another metric has its name.
    - Some metrics of each datasource, if there are several, as `reward/mean/NAME`; likewise of each role, each of whose
      plays counts as a sample.
    """
    groups = [part for group in groups for part in group.of_roles]
    samples = [sample for group in groups for sample in group.samples]
    trajectories = [trajectory for sample in samples for trajectory in sample]
    count = len(samples)
    rewards = [reward for group in groups for reward in group.rewards]
    lengths = [sum(t.action_length for t in sample) for sample in samples]
    scores = [group.scores for group in groups if group.trajectories]
    metrics = _summary(groups) | {
        "reward/min": min(rewards),
        "reward/max": max(rewards),
        "rollout/samples": float(count),
        "rollout/entropy": sampled_entropy(trajectories),
        "rollout/response_length_max": float(max(lengths)),
        "rollout/truncated_share": sum(any(t.stop_reason.truncated for t in s) for s in samples) / count,
        "rollout/group_std_mean": sum(statistics.pstdev(own) for own in scores) / len(scores),
        "rollout/all_passed_share": sum(reaches(min(own), pass_threshold) for own in scores) / len(scores),
        "rollout/all_failed_share": sum(not reaches(max(own), pass_threshold) for own in scores) / len(scores),
        "rollout/duplicate_share": 1 - sum(_different(group) for group in groups) / count,
    }
    if min(rewards) < max(rewards) and min(lengths) < max(lengths):
        with suppress(ArithmeticError, statistics.StatisticsError):  # squares of differences are too small or large
            metrics["rollout/reward_length_correlation"] = statistics.correlation(rewards, [float(n) for n in lengths])
    passes = [reaches(sample[0].score, pass_threshold) for sample in samples]
    for name, passed in (("passed", True), ("failed", False)):
        chosen = [length for length, own in zip(lengths, passes, strict=True) if own is passed]
        if chosen:
            metrics[f"rollout/response_length_{name}"] = sum(chosen) / len(chosen)
    metrics |= _apart(groups, lambda group: group.prompt.datasource)
    metrics |= _apart(groups, lambda group: group.trajectories[0].role)
    return metrics | own_metrics("reward", [sample[0].metrics for sample in samples], metrics)


def _summary(groups: Sequence[RolloutGroup]) -> dict[str, float]:
    """Returns the mean reward, score and length of the samples of groups, and the share of the groups that teach
    nothing."""
    samples = [sample for group in groups for sample in group.samples]
    scored = [group.scores for group in groups if group.trajectories]
    return {
        "reward/mean": sum(reward for group in groups for reward in group.rewards) / len(samples),
        "reward/score_mean": sum(sample[0].score for sample in samples) / len(samples),
        "rollout/response_length_mean": sum(t.action_length for sample in samples for t in sample) / len(samples),
        "rollout/zero_spread_share": sum(not differ(scores) for scores in scored) / len(scored),
    }


def _apart(groups: Sequence[RolloutGroup], name_of: Callable[[RolloutGroup], str]) -> dict[str, float]:
    """Returns the summary of the groups of each name; nothing if there is one name, or so many that each would have a
    group or two."""
    of_names = defaultdict[str, list[RolloutGroup]](list)
    for group in groups:
        if group.trajectories:
            of_names[name_of(group)].append(group)
    if not 1 < len(of_names) <= MOST_SETS:
        return {}
    return {f"{key}/{name}": value for name, own in sorted(of_names.items()) for key, value in _summary(own).items()}


def own_metrics(prefix: str, told: Sequence[Mapping[str, float]], taken: Collection[str]) -> dict[str, float]:
    """Returns the means of what environments, agents and rewards have `told` of samples (turns, ...), as `PREFIX/NAME`,
    each over those that have it; names that are `taken` are left out."""
    return {
        f"{prefix}/{key}": statistics.fmean(own[key] for own in told if key in own)
        for key in dict.fromkeys(key for own in told for key in own)
        if f"{prefix}/{key}" not in taken
    }


def _different(group: RolloutGroup) -> int:
    """Returns how many samples of a group differ in their tokens."""
    return len({tuple(t.token_ids_T.numpy().tobytes() for t in sample) for sample in group.samples})
