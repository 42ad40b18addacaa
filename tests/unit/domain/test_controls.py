"""The pure state machines and rules of sampling: filter, curriculum, entropy, balance."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollgrad.domain.algorithms.curriculum import Curriculum
from rollgrad.domain.algorithms.filtering import GroupFilter
from rollgrad.domain.batches.partition import balanced_partitions
from rollgrad.domain.control.entropy_weight import EntropyController


@pytest.mark.parametrize(
    ("scores", "reason"),
    [([0.0, 0.0], "too_hard"), ([1.0, 1.0], "too_easy"), ([0.0, 1.0], None), ([], "empty"), ([0.2, 0.2], None)],
)
def test_filter_by_range(scores: list[float], reason: str | None) -> None:
    assert GroupFilter(score_range=(0.0, 1.0)).rejection(scores, scores) == reason


@pytest.mark.parametrize(("wrong", "right"), [(0.0, 1.0), (-1.0, 1.0), (0.0, 10.0), (-2.0, -1.0)])
@pytest.mark.parametrize("rewards", [[0.0, 0.0, 0.0], [0.0, 1.0, 2.0]])
def test_groups_that_are_all_right_or_all_wrong_are_rejected_however_scores_are_coded(
    wrong: float, right: float, rewards: list[float]
) -> None:
    """DAPO's condition is on how many are right, whatever the number that says so, and whatever rewards are besides."""
    dapo = GroupFilter(score_spread=True, pass_threshold=right)
    assert dapo.rejection([wrong] * 3, rewards) == "too_hard"
    assert dapo.rejection([right] * 3, rewards) == "too_easy"
    assert dapo.rejection([wrong, wrong, right], rewards) is None
    assert dapo.rejection([wrong, right, right], rewards) is None


def test_filter_by_spread_looks_at_rewards() -> None:
    spread = GroupFilter(need_spread=True)
    assert spread.rejection([0.0, 1.0], [0.5, 0.5]) == "no_spread"
    assert spread.rejection([1.0, 1.0], [0.5, 0.6]) is None
    assert spread.rejection([1.0, 1.0], [0.1 + 0.2, 0.3]) == "no_spread", "as the estimators see it"
    assert spread.rejection([1.0, 1.0], [1e-7, 0.0]) is None


def test_without_rules_only_empty_groups_are_rejected() -> None:
    assert GroupFilter().rejection([1.0], [1.0]) is None
    assert GroupFilter().rejection([], []) == "empty"


def test_curriculum_skips_what_is_solved_but_comes_back() -> None:
    curriculum = Curriculum(limits=(0.1, 0.9), revisit=3)
    assert curriculum.draw("a"), "what has not been seen is played"
    curriculum.record("a", 1.0)
    curriculum.record("b", 0.5)
    assert [curriculum.draw("a") for _ in range(7)] == [False, False, True, False, False, True, False]
    assert curriculum.draw("b")
    restored = Curriculum(limits=(0.1, 0.9), revisit=3)
    restored.load_state_dict(json.loads(json.dumps(curriculum.state_dict())))
    assert restored == curriculum
    assert [restored.draw("a") for _ in range(2)] == [False, True]


def test_the_limits_of_a_curriculum_are_inside() -> None:
    curriculum = Curriculum(limits=(0.25, 0.75))
    for rate in (0.25, 0.75, 0.2, 0.8):
        curriculum.record(str(rate), rate)
    assert [curriculum.draw(str(rate)) for rate in (0.25, 0.75, 0.2, 0.8)] == [True, True, False, False]


def test_a_state_of_a_curriculum_is_small_and_no_later_step_changes_it() -> None:
    curriculum = Curriculum(limits=(0.1, 0.9))
    for number in range(100):
        curriculum.record(f"{'a long prompt ' * 1000}{number}\ud800", 1.0)
    state = curriculum.state_dict()
    assert len(json.dumps(state)) < 100 * 50
    before = json.dumps(state)
    curriculum.record("another", 0.0)
    curriculum.draw(f"{'a long prompt ' * 1000}0\ud800")
    assert json.dumps(state) == before


def test_a_curriculum_begins_anew_from_a_state_of_texts() -> None:
    curriculum = Curriculum(limits=(0.1, 0.9))
    curriculum.load_state_dict({"rates": {"a": 1.0}, "skips": {"a": 1}})
    assert curriculum.draw("a")


def test_entropy_bonus_acts_below_the_target_only() -> None:
    controller = EntropyController(coef=0.0, target=0.5, step=0.1, maximum=0.25)
    weights = []
    for entropy in (0.9, 0.4, 0.3, 0.2, 0.6, 0.5):
        controller = controller.observe(entropy)
        weights.append(controller.weight)
    assert weights == pytest.approx([0.0, 0.1, 0.2, 0.25, 0.0, 0.25])
    assert (
        EntropyController(coef=0.0, target=0.5, step=0.1, maximum=0.25).load_state_dict(controller.state_dict())
        == controller
    )


def test_a_fixed_entropy_weight_stays() -> None:
    assert EntropyController(coef=0.2).observe(5.0).weight == 0.2


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 4096), max_size=40), st.integers(1, 8))
def test_balanced_partitions(weights: list[int], parts: int) -> None:
    found = balanced_partitions(weights, parts)
    assert len(found) == parts
    assert sorted(index for part in found for index in part) == list(range(len(weights)))
    sums = [sum(weights[index] for index in part) for part in found]
    assert max(sums) - min(sums) <= max(weights, default=0)
    assert all(found) or len(weights) < parts
