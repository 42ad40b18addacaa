"""Rewards by a vote among the samples of a prompt, for which nobody needs to know the right answer."""

from attrs import evolve

from rollgrad.application.rollouts.groups import RolloutGroup
from rollgrad.domain.algorithms.evaluation import majority
from rollgrad.domain.episodes.trajectory import SegmentKind, Trajectory


def voted(group: RolloutGroup) -> RolloutGroup:
    """Returns a group whose samples earned 1 if they gave the answer that most of them gave, else 0 (TTRL, Zuo et al.
    2025, arXiv:2504.16084); what they had earned is replaced."""
    samples = sorted(group.samples, key=lambda sample: sample[0].sample_id)
    elected = majority([sample[0].answer for sample in samples])
    trajectories: list[Trajectory] = []
    for sample in group.samples:
        earned = float(elected is not None and sample[0].answer == elected)
        trajectories += [_worth(branch, 0.0, earned) for branch in sample[:-1]]
        trajectories.append(_worth(sample[-1], earned, earned))
    return evolve(group, trajectories=tuple(trajectories))


def _worth(branch: Trajectory, reward: float, score: float) -> Trajectory:
    """Returns a branch with the reward on its last action, and none before."""
    last = max(place for place, segment in enumerate(branch.segments) if segment.kind is SegmentKind.ACTION)
    segments = tuple(
        evolve(segment, reward=reward if place == last else 0.0) for place, segment in enumerate(branch.segments)
    )
    return evolve(branch, segments=segments, score=score, reward_parts={})
