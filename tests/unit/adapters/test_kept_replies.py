"""A file of an evaluation's replies, cut anywhere, keeps whole prompts, and tells of them what their replies tell."""

import json
from pathlib import Path

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from rollgrad.adapters.tracking.kept_replies import kept_results
from rollgrad.adapters.tracking.samples import ReplyWriter
from rollgrad.application.rollouts.groups import RolloutGroup
from rollgrad.application.rollouts.results import PromptResult
from rollgrad.domain.episodes.generation import StopReason
from rollgrad.domain.episodes.prompts import Prompt
from rollgrad.domain.episodes.rewards import FailureKind, RolloutFailure
from rollgrad.domain.errors import DataError
from rollgrad.testing.agent_executor import make_trajectory

SAMPLES = 2


def played(number: int, *failed: FailureKind) -> RolloutGroup:
    """Returns a group whose first sample has two branches, and whose last ones failed."""
    first, *ids = range(SAMPLES * number, SAMPLES * number + SAMPLES - len(failed))
    own = make_trajectory((1,), [7] * (1 + number), group_id=number, sample_id=first, rewards=[1 / 3])
    own = evolve(own, answer="7", feedback="wrong", metrics={"turns": 1 / 7}, reward_parts={"right": 0.1})
    more = evolve(own, answer=None, stop_reason=StopReason.LENGTH, reward_parts={"short": 0.2})
    others = [evolve(own, sample_id=sample_id, score=0.5) for sample_id in ids]
    failures = tuple(
        RolloutFailure(kind=kind, message="gone", group_id=number, sample_id=SAMPLES * number + SAMPLES - 1 - place)
        for place, kind in enumerate(failed)
    )
    prompt = Prompt(token_ids=(1,), text="a\n", datasource=f"set {number}")
    return RolloutGroup(group_id=number, prompt=prompt, trajectories=(own, more, *others), failures=failures)


GROUPS = [played(3), played(0, FailureKind.NOT_APPLICABLE), played(2, FailureKind.REWARD), played(1)]


def write(path: Path, *groups: RolloutGroup, model: str = "m") -> None:
    writer = ReplyWriter(path, lambda tokens: "text\u2028", model)
    for group in groups:
        writer(group)
    writer.close()


@given(st.floats(0, 1))
def test_a_file_that_is_cut_anywhere_keeps_whole_prompts(tmp_path_factory: pytest.TempPathFactory, cut: float) -> None:
    path = tmp_path_factory.mktemp("cut") / "replies.jsonl"
    write(path, played(0, FailureKind.REWARD), model="other")
    before = path.read_bytes()
    sizes = []
    for group in GROUPS:
        write(path, group)
        sizes.append(path.stat().st_size)
    content = path.read_bytes()
    length = len(before) + round(cut * (len(content) - len(before)))
    path.write_bytes(content[:length])
    whole = [group for group, size in zip(GROUPS, sizes, strict=True) if size <= length and group is not GROUPS[2]]
    expected = {group.group_id: PromptResult.of(group) for group in whole}
    assert {result.group_id: result for result in kept_results(path, "m", SAMPLES)} == expected
    assert path.read_bytes().startswith(before), "other models keep their lines"
    kept = path.read_bytes()
    assert [result.group_id for result in kept_results(path, "m", SAMPLES)] == [*expected]
    assert path.read_bytes() == kept
    write(path, *(group for group in GROUPS if group.group_id not in expected))
    assert sorted(path.read_bytes().splitlines()) == sorted(content.splitlines())


@pytest.mark.parametrize(
    "line", ['{"model": "m"}', "[1]", "no", json.dumps({"model": "m", "group_id": 0, "sample_id": 0})]
)
def test_lines_of_another_kind_are_refused(tmp_path: Path, line: str) -> None:
    path = tmp_path / "replies.jsonl"
    path.write_text(f"{line}\n")
    with pytest.raises(DataError, match="remove"):
        kept_results(path, "m", SAMPLES)
    assert path.read_text() == f"{line}\n"


def test_the_score_of_an_episode_of_several_roles_is_their_mean(tmp_path: Path) -> None:
    group = played(0)
    own, more, other = group.trajectories
    sides = evolve(own, role="black", score=1.0), evolve(more, role="white", score=0.0), other
    write(path := tmp_path / "replies.jsonl", group := evolve(group, trajectories=sides))
    (result,) = kept_results(path, "m", SAMPLES)
    assert result.scores == PromptResult.of(group).scores == group.scores == [0.5, other.score]
