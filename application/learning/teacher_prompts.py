"""Prompts that a teacher which is told more reads in the place of each rollout's own."""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial

import torch
from attrs import frozen

from rollgrad.application.rollouts.groups import RolloutGroup
from rollgrad.domain.algorithms.equality import reaches
from rollgrad.domain.episodes.prompts import Prompt
from rollgrad.domain.episodes.trajectory import SegmentKind, Trajectory

TeacherPrompts = Mapping[tuple[int, int], tuple[int, ...]]
"""Tokens by group id and sample id; a rollout that is not in it is not taught."""

TellsTeacher = Callable[[Sequence[RolloutGroup]], TeacherPrompts | None]
"""Function from the groups of a rollout to what the teacher reads; None where it reads what the policy does."""


def told_by_rows(groups: Sequence[RolloutGroup]) -> TeacherPrompts | None:
    """Returns what prompts say that their teacher reads, for each of their rollouts."""
    if not any(group.prompt.teacher_token_ids for group in groups):
        return None
    return {
        (group.group_id, trajectory.sample_id): group.prompt.teacher_token_ids or group.prompt.token_ids
        for group in groups
        for trajectory in group.trajectories
    }


@frozen(kw_only=True)
class ToldOfReplies:
    """Tells the teacher of each rollout another one of its group that passed, the first by sample id. Where the rollout
    itself did not pass, the teacher is also told what the reward said of it (SDPO, Huebotter et al. 2026,
    arXiv:2601.20802)."""

    tell: Callable[[Prompt, str | None, str | None], tuple[int, ...] | None]
    """Function from a prompt, a reply that passed and feedback (each None if not known) to what the teacher reads; None
    if the teacher then teaches nothing."""
    decode: Callable[[Sequence[int]], str]
    """Function from sampled tokens to their text."""
    pass_threshold: float
    """Score from which a rollout passes."""

    def __call__(self, groups: Sequence[RolloutGroup]) -> TeacherPrompts:
        """Returns what the teacher reads of each rollout that is taught."""
        told: dict[tuple[int, int], tuple[int, ...]] = {}
        for group in groups:
            samples = sorted((sample[0] for sample in group.samples), key=lambda sample: sample.sample_id)
            passed = [sample for sample in samples if reaches(sample.score, self.pass_threshold)]
            replies = [(sample, self.decode(_reply(sample))) for sample in passed[:2]]
            tell = lru_cache(partial(self.tell, group.prompt))  # a group without feedback has two texts
            for sample in samples:
                other = next((text for each, text in replies if each is not sample), None)
                text = tell(other, None if sample in passed else sample.feedback)
                if text is not None:
                    told[group.group_id, sample.sample_id] = text
        return told


def _reply(sample: Trajectory) -> list[int]:
    """Returns the tokens that the policy sampled."""
    actions = [segment for segment in sample.segments if segment.kind is SegmentKind.ACTION]
    sampled: list[int] = torch.cat([sample.token_ids_T[segment.start : segment.stop] for segment in actions]).tolist()
    return sampled
