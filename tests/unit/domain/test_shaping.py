"""Reward shaping by hand, and for rollouts with several turns and branches."""

import math
from random import Random

import pytest
import torch
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from rollgrad.domain.algorithms import shaping
from rollgrad.domain.algorithms.shaping_settings import ShapingSettings
from rollgrad.domain.batches.packed import PackedBatch, pack
from rollgrad.testing.agent_executor import make_trajectory

rewards_of_turns = st.floats(-100, 100, width=32)


def batch(rewards: list[float], lengths: list[int], *, truncated: tuple[int, ...] = ()) -> PackedBatch:
    packed = pack(
        [
            make_trajectory([1], [5] * length, group_id=0, sample_id=index, rewards=[reward])
            for index, (reward, length) in enumerate(zip(rewards, lengths, strict=True))
        ]
    )
    return evolve(packed, truncated_S=torch.tensor([index in truncated for index in range(len(rewards))]))


def outcomes(packed: PackedBatch, rewards_N: torch.Tensor) -> list[float]:
    return shaping.outcomes(evolve(packed, rewards_N=rewards_N)).tolist()


def test_overlong_penalty_grows_over_the_buffer() -> None:
    packed = batch([1.0] * 6, [5, 6, 7, 8, 10, 13])
    found = outcomes(packed, shaping.overlong_penalty(packed, limit=10, buffer=4, factor=2.0))
    assert found == pytest.approx([1.0, 1.0, 0.5, 0.0, -1.0, -1.0])
    found = outcomes(packed, shaping.overlong_penalty(packed, limit=8, buffer=1, factor=2.0))
    assert found == pytest.approx([1.0, 1.0, 1.0, -1.0, -1.0, -1.0])


@pytest.mark.parametrize("buffer", [0, -1])
def test_a_penalty_without_a_buffer_is_refused(buffer: int) -> None:
    with pytest.raises(ValueError, match="needs at least 1"):
        shaping.overlong_penalty(batch([1.0], [5]), limit=10, buffer=buffer, factor=1.0)


def test_moments_of_nothing_stay() -> None:
    seen = shaping.RunningMoments().update(torch.tensor([1.0, 3.0]))
    assert seen.update(torch.tensor([])) == seen
    assert shaping.RunningMoments().update(torch.tensor([])).std == 1.0


def test_overlong_counts_sampled_tokens_only() -> None:
    packed = pack([make_trajectory([1], [5, 5], [9] * 50, [5, 5], rewards=[0.25, 0.5])])
    assert torch.equal(shaping.overlong_penalty(packed, limit=10, buffer=4, factor=1.0), packed.rewards_N)


@pytest.mark.parametrize(
    ("coef", "wanted"), [(0.5, [2.0, -4.0, 4.0]), (0.0, [0.0, -4.0, 4.0]), (-0.5, [-0.5, -4.0, 4.0]), (1.0, [4, -4, 4])]
)
def test_stop_properly_by_hand(coef: float, wanted: list[float]) -> None:
    packed = batch([4.0, -4.0, 4.0], [3, 3, 3], truncated=(0, 1))
    assert outcomes(packed, shaping.stop_properly(packed, coef)) == pytest.approx(wanted)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(-5, 5), min_size=1, max_size=6), st.floats(-5, 1))
def test_stop_properly_never_rewards_truncation(rewards: list[float], coef: float) -> None:
    packed = batch(rewards, [2] * len(rewards), truncated=tuple(range(len(rewards))))
    found = torch.tensor(outcomes(packed, shaping.stop_properly(packed, coef)))
    assert (found <= torch.tensor(outcomes(packed, packed.rewards_N)) + 1e-5).all()


def test_cosine_length_by_hand() -> None:
    packed = batch([1.0, 1.0, 0.0, 0.0, 1.0, 1.0], [10, 5, 10, 5, 10, 15], truncated=(4,))
    settings_ = ShapingSettings(cosine_passed=(2.0, 1.0), cosine_failed=(-10.0, 0.0), cosine_exceeded=-7.0)
    found = outcomes(packed, shaping.cosine_length(packed, settings_, limit=10))
    assert found == pytest.approx([1.0, 1.5, 0.0, -5.0, -7.0, 1.0], abs=1e-5)


GROUPS_OF_LENGTHS = st.lists(
    st.lists(st.tuples(st.integers(1, 9), st.floats(-2, 2, width=32)), min_size=1, max_size=6), min_size=1, max_size=3
)
"""Sampled tokens and reward of each rollout of each group."""


def grouped(groups: list[list[tuple[int, float]]], order: list[int]) -> PackedBatch:
    flat = [(group, length, reward) for group, rollouts in enumerate(groups) for length, reward in rollouts]
    return pack(
        [make_trajectory([1], [5] * flat[i][1], group_id=flat[i][0], sample_id=i, rewards=[flat[i][2]]) for i in order]
    )


@settings(max_examples=80, deadline=None)
@given(GROUPS_OF_LENGTHS, st.floats(0.1, 3), st.randoms())
def test_the_length_reward_is_that_of_kimi_in_any_order(
    groups: list[list[tuple[int, float]]], coef: float, random: Random
) -> None:
    """Kimi Team 2025, section 2.3.3, rollout by rollout; a reply passes from a score of 1 on."""
    wanted = []
    for rollouts in groups:
        lengths = [length for length, _ in rollouts]
        shortest, longest = min(lengths), max(lengths)
        for length, reward in rollouts:
            factor = 0.5 - (length - shortest) / (longest - shortest) if longest > shortest else 0.0
            wanted.append(reward + coef * (factor if reward >= 1 else min(0.0, factor)))
    order = list(range(len(wanted)))
    random.shuffle(order)
    packed = grouped(groups, order)
    found = outcomes(packed, shaping.group_length(packed, coef=coef, pass_threshold=1.0))
    assert found == pytest.approx([wanted[i] for i in order], abs=1e-5)


@settings(max_examples=40, deadline=None)
@given(GROUPS_OF_LENGTHS, st.integers(2, 3), st.integers(1, 4))
def test_only_differences_of_length_within_a_group_count(
    groups: list[list[tuple[int, float]]], times: int, more: int
) -> None:
    """Rewards added are the same for lengths that are some times as large, and larger by the same number."""
    stretched = [[(times * length + more, reward) for length, reward in rollouts] for rollouts in groups]
    found, same = (
        outcomes(packed, shaping.group_length(packed, coef=1.0, pass_threshold=1.0))
        for packed in (grouped(g, list(range(sum(map(len, g))))) for g in (groups, stretched))
    )
    assert found == pytest.approx(same, abs=1e-5)


def test_all_branches_and_turns_of_a_rollout_count_for_its_length() -> None:
    packed = pack(
        [
            make_trajectory([1], [5], [9] * 20, [5, 5], group_id=0, sample_id=0, rewards=[0.0, 1.0]),
            make_trajectory([1], [5, 5], group_id=0, sample_id=0, rewards=[1.0]),
            make_trajectory([1], [5] * 7, group_id=0, sample_id=1, rewards=[1.0]),
            make_trajectory([1], [5] * 6, group_id=0, sample_id=2, rewards=[1.0]),
        ]
    )
    found = outcomes(packed, shaping.group_length(packed, coef=1.0, pass_threshold=1.0))
    assert found == pytest.approx([2.5, 0.5, 1.0])


@pytest.mark.parametrize("truncated", [[True, False, False], [False, True, False], [False, False, False]])
def test_a_rollout_is_truncated_if_any_of_its_branches_is(truncated: list[bool]) -> None:
    packed = pack([make_trajectory([1], [5], group_id=0, sample_id=i // 2, rewards=[1.0]) for i in range(3)])
    packed = evolve(packed, truncated_S=torch.tensor(truncated))
    wanted = [1.0 if any(truncated) else 2.0, 1.0]
    assert outcomes(packed, shaping.stop_properly(packed, 0.5)) == wanted
    settings_ = ShapingSettings(cosine_passed=(2.0, 2.0), cosine_failed=(2.0, 2.0), cosine_exceeded=1.0)
    found = outcomes(packed, shaping.cosine_length(packed, settings_, limit=9))
    assert found == [1.0 if any(truncated) else 2.0, 2.0]


def test_outcome_changes_go_to_the_last_action_token_of_the_last_branch() -> None:
    branches = [
        make_trajectory([1], [5, 6], group_id=0, sample_id=0, rewards=[0.25]),
        make_trajectory([1], [7], [8], [9, 9], group_id=0, sample_id=0, rewards=[0.5, 1.0]),
    ]
    packed = pack(branches)
    shaped = shaping.overlong_penalty(packed, limit=5, buffer=5, factor=1.0)
    changed = (shaped != packed.rewards_N).nonzero()[:, 0].tolist()
    assert changed == [packed.token_count - 1]
    assert outcomes(packed, shaped) == pytest.approx([1.75 - 1.0])


def test_a_rollout_without_actions_is_left_as_it_is() -> None:
    packed = batch([1.0, 0.0], [3, 3], truncated=(1,))
    packed = evolve(packed, action_mask_N=packed.action_mask_N & (packed.sequence_ids_N == 0))
    assert torch.equal(shaping.stop_properly(packed, -0.5), packed.rewards_N)
    shaped = shaping.overlong_penalty(packed, limit=3, buffer=3, factor=0.5)
    assert (shaped - packed.rewards_N).tolist() == [0.0, 0.0, 0.0, -0.5, 0.0, 0.0, 0.0, 0.0]


def test_normalisation_shifts_outcomes_and_scales_turns() -> None:
    packed = pack([make_trajectory([1], [5], [8], [6], rewards=[1.0, 3.0])])
    shaped = shaping.normalise(packed, mean=2.0, std=4.0)
    assert shaped[packed.action_mask_N].tolist() == pytest.approx([0.25, 0.25])
    branched = pack(
        [
            make_trajectory([1], [5, 5], group_id=0, sample_id=0, rewards=[1.0]),
            make_trajectory([1], [5], group_id=0, sample_id=1, rewards=[-2.0]),
            make_trajectory([1], [6, 6], [8], [7], group_id=0, sample_id=0, rewards=[3.0, 5.0]),
        ]
    )
    shaped = shaping.normalise(branched, mean=2.0, std=4.0)
    assert shaped[branched.action_mask_N].tolist() == pytest.approx([0.0, 0.25, -1.0, 0.0, 0.75, 0.75])
    assert outcomes(branched, shaped) == pytest.approx([(1 + 3 + 5 - 2) / 4, (-2 - 2) / 4])
    equal = shaping.normalise(packed, mean=4.0, std=0.0)
    assert outcomes(packed, equal) == [0.0], "rewards without a deviation are all their mean"


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.floats(-100, 100), min_size=1, max_size=7), min_size=1, max_size=5))
def test_running_moments_are_those_of_everything_seen(parts: list[list[float]]) -> None:
    moments = shaping.RunningMoments()
    for part in parts:
        moments = shaping.RunningMoments.from_state_dict(moments.state_dict()).update(torch.tensor(part))
    everything = torch.tensor([x for part in parts for x in part]).double()
    assert moments.mean == pytest.approx(float(everything.mean()), abs=1e-4)
    spread = float(everything.std(correction=0))
    assert moments.std == pytest.approx(spread if spread > 1e-6 else moments.std, rel=1e-3, abs=1e-3)
    assert math.isfinite(moments.std)
    assert moments.std > 0


@pytest.mark.parametrize("sign", [1, -1])
def test_rewards_that_differ_by_rounding_are_all_their_running_mean(sign: int) -> None:
    """In float32 the sum of 0.1, 0.2 and 0.4 is not 0.7."""
    packed = pack(
        [
            make_trajectory(
                [1], *[[5], [8]] * (len(rewards) - 1), [5], sample_id=i, rewards=[sign * r for r in rewards]
            )
            for i, rewards in enumerate([[0.7], [0.1, 0.2, 0.4]] * 4)
        ]
    )
    earned = shaping.outcomes(packed)
    assert len(set(earned.tolist())) == 2
    moments = shaping.RunningMoments().update(earned)
    shaped = shaping.normalise(packed, mean=moments.mean, std=moments.std)
    assert outcomes(packed, shaped) == pytest.approx([0.0] * 8, abs=1e-6)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.lists(st.lists(rewards_of_turns, min_size=1, max_size=3), min_size=1, max_size=3), max_size=4),
    st.lists(st.floats(-1e8, 1e8, width=32), max_size=4),
    st.tuples(st.floats(-50, 0, width=32), st.floats(0.125, 50, width=32)),
)
def test_clipping_bounds_the_outcome_and_keeps_single_turns_as_they_are_clamped(
    branched: list[list[list[float]]], single: list[float], limits: tuple[float, float]
) -> None:
    """Turns and branches of a rollout count together: only their sum is bounded, by its last action token."""
    played = [*branched, *([[reward]] for reward in single)]
    if not played:
        return
    trajectories = [
        make_trajectory(
            [1], *([5] if k % 2 == 0 else [8] for k in range(2 * len(turns) - 1)), sample_id=i, rewards=turns
        )
        for i, branches in enumerate(played)
        for turns in branches
    ]
    packed = pack(trajectories)
    clipped = evolve(packed, rewards_N=shaping.clip_outcomes(packed, limits))
    before, after = shaping.outcomes(packed), shaping.outcomes(clipped)
    torch.testing.assert_close(after, before.clamp(*limits), rtol=0, atol=1e-4)
    if single:
        wanted = torch.tensor(single).clamp(*limits)
        assert torch.equal(after[len(branched) :], wanted), "to the bit"
    changed = (clipped.rewards_N != packed.rewards_N).nonzero()[:, 0]
    last_of_rollout = [
        max((packed.action_mask_N & (packed.rollout_ids_S[packed.sequence_ids_N] == r)).nonzero()[:, 0].tolist())
        for r in range(len(played))
    ]
    assert {int(index) for index in changed} <= set(last_of_rollout)
    untouched = (before >= limits[0]) & (before <= limits[1])
    assert not set(changed.tolist()) & {last_of_rollout[r] for r in untouched.nonzero()[:, 0].tolist()}
