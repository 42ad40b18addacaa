"""Estimators against references written from the papers, and the invariances the design promises."""

import itertools
import math
import random

import attrs
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from rollgrad.domain.algorithms import catalogue
from rollgrad.domain.algorithms.estimators import (
    ESTIMATORS,
    Advantages,
    EstimatorInput,
    EstimatorParams,
    estimate,
    estimator,
)
from rollgrad.domain.algorithms.estimators.actions import whiten_over
from rollgrad.domain.algorithms.estimators.discounting import reverse_discounted_sum
from rollgrad.domain.errors import ConfigurationError, RewardError
from tests.unit.domain import references
from tests.unit.domain.references import PART_WEIGHTS, Sequence, Settings, random_batch

NAMES = list(catalogue.ESTIMATORS)
BASELINED = [
    "reinforce_baseline",
    "rloo",
    "rloo_sequence",
    "group_norm",
    "dr_grpo",
    "opo",
    "optimal_token_baseline",
    "gpg",
    "gdpo",
    "turn_group_norm",
    "process_group_norm",
    "gigpo",
]
"""Estimators whose baseline is the group's."""
GROUP_ESTIMATORS = [*BASELINED, "lite_ppo", "maxrl", "pass_at_k"]
SCALE_FREE = ["group_norm", "lite_ppo", "gdpo", "maxrl", "pass_at_k", "turn_group_norm", "process_group_norm", "gigpo"]
LINEAR = [
    "reinforce_baseline",
    "rloo",
    "rloo_sequence",
    "dr_grpo",
    "opo",
    "optimal_token_baseline",
    "gpg",
    "remax",
    "flash_reinforce",
]
EXAMPLES = settings(max_examples=12, deadline=None)
FEWER = settings(max_examples=6, deadline=None)
"""For what holds of every estimator alike."""
SEEDS = st.integers(0, 10**6)
WHITENINGS = st.sampled_from([None, *catalogue.WHITENINGS])
PARAMS = EstimatorParams(gamma=0.9, lambd=0.8, pass_k=2)
SETTINGS = st.builds(
    Settings,
    gamma=st.sampled_from([1.0, 0.99, 0.5]),
    lambd=st.sampled_from([1.0, 0.95, 0.0]),
    critic_lambd=st.sampled_from([None, 1.0, 0.7]),
    length_adaptive_alpha=st.sampled_from([None, 0.05, 0.5]),
    prefix_weight=st.sampled_from([0.5, 0.0, 3.0]),
    pass_k=st.sampled_from([1, 2, 3, 8]),
    step_weight=st.sampled_from([1.0, 0.0, 0.5]),
    no_std_norm=st.booleans(),
)


def flat(batch: list[Sequence], name: str, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.tensor([x for s in batch for x in getattr(s, name)], dtype=dtype)


def inputs(batch: list[Sequence], dtype: torch.dtype = torch.float64, poison: float | None = None) -> EstimatorInput:
    mask = flat(batch, "actions", torch.bool)
    columns = {name: flat(batch, name, dtype) for name in ("rewards", "extras", "values", "logprobs", "collisions")}
    if poison is not None:
        columns = {name: torch.where(mask, column, poison) for name, column in columns.items()}
    has_turns = all(s.turns is not None for s in batch)
    return EstimatorInput(
        rewards_N=columns["rewards"],
        token_rewards_N=columns["extras"],
        values_N=columns["values"],
        action_mask_N=mask,
        turn_ids_N=flat(batch, "turns", torch.int64) if has_turns else None,
        lengths_S=torch.tensor([len(s.actions) for s in batch]),
        group_ids_S=torch.tensor([s.group for s in batch]),
        sample_ids_S=torch.tensor([s.sample for s in batch]),
        baselines_S=torch.tensor([s.baseline for s in batch], dtype=dtype),
        reward_parts_SK=torch.tensor([s.parts for s in batch], dtype=dtype),
        part_weights_K=torch.tensor(PART_WEIGHTS, dtype=dtype),
        state_ids_N=flat(batch, "states", torch.int64),
        logprobs_N=columns["logprobs"],
        collision_N=columns["collisions"],
    )


def expected(rows: references.Rows) -> Tensor:
    return torch.tensor([0.0 if x is None else x for row in rows for x in row], dtype=torch.float64)


def params_of(options: Settings) -> EstimatorParams:
    return EstimatorParams(**attrs.asdict(options))


def raw(name: str, batch: list[Sequence], params: EstimatorParams = PARAMS) -> Tensor:
    return ESTIMATORS[name](inputs(batch), params).advantages_N


def numbered(batch: list[Sequence]) -> list[Sequence]:
    """The batch with its turns named on the tokens."""
    return [attrs.evolve(s, turns=turns) for s, turns in zip(batch, references.turn_numbers(batch), strict=True)]


def batch_for(name: str, seed: int, *, long: bool = False) -> list[Sequence]:
    """A random batch that the estimator takes."""
    return random_batch(seed, long=long, negative="rewards_from_0" not in catalogue.ESTIMATORS[name].needs)


def reordered(batch: list[Sequence], seed: int) -> list[int]:
    """A random order of the rollouts in which the branches of one keep theirs."""
    order = list(range(len(batch)))
    random.Random(seed).shuffle(order)
    waiting: dict[tuple[int, int], list[int]] = {}
    for i, s in enumerate(batch):
        waiting.setdefault((s.group, s.sample), []).append(i)
    return [waiting[batch[i].group, batch[i].sample].pop(0) for i in order]


def padded(sequence: Sequence, before: int, after: int) -> Sequence:
    """With tokens of no action added at both ends."""

    def pad(column: list[float]) -> list[float]:
        return [9.0] * before + column + [9.0] * after

    return attrs.evolve(
        sequence,
        rewards=pad(sequence.rewards),
        extras=pad(sequence.extras),
        values=pad(sequence.values),
        actions=[False] * before + sequence.actions + [False] * after,
    )


def test_every_estimator_is_in_the_catalogue() -> None:
    assert set(NAMES) == set(ESTIMATORS)
    assert {*GROUP_ESTIMATORS} == {n for n, traits in catalogue.ESTIMATORS.items() if "group" in traits.needs}


@pytest.mark.parametrize("name", NAMES)
@EXAMPLES
@given(seed=SEEDS, long=st.booleans(), options=SETTINGS)
def test_equals_the_reference(name: str, seed: int, long: bool, options: Settings) -> None:
    batch = batch_for(name, seed, long=long)
    advantages, returns = references.raw(name, batch, options)
    exact = ESTIMATORS[name](inputs(batch), params_of(options))
    torch.testing.assert_close(exact.advantages_N, expected(advantages), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(exact.returns_N, expected(returns), rtol=1e-9, atol=1e-9)
    single = ESTIMATORS[name](inputs(batch, torch.float32), params_of(options))
    assert single.advantages_N.dtype == single.returns_N.dtype == torch.float32
    torch.testing.assert_close(single.advantages_N.double(), expected(advantages), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", NAMES)
@EXAMPLES
@given(seed=SEEDS, over=WHITENINGS, std_norm=st.booleans(), options=SETTINGS)
def test_whitening_equals_the_reference(
    name: str, seed: int, over: str | None, std_norm: bool, options: Settings
) -> None:
    batch = batch_for(name, seed)
    rows, returns = references.raw(name, batch, options)
    chosen = over or {"gae": "batch", "turn_gae": "batch", "reinforce": "batch", "reinforce_baseline": "batch"}.get(
        name, "none"
    )
    want = expected(references.whitened_over(batch, rows, chosen, std_norm))
    exact = estimate(name, inputs(batch), params_of(options), whiten=over, std_norm=std_norm)
    torch.testing.assert_close(exact.advantages_N, want, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(exact.returns_N, expected(returns), rtol=1e-9, atol=1e-9)
    single = estimate(name, inputs(batch, torch.float32), params_of(options), whiten=over, std_norm=std_norm)
    torch.testing.assert_close(single.advantages_N.double(), want, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("name", NAMES)
@FEWER
@given(seed=SEEDS, over=WHITENINGS, options=SETTINGS)
def test_each_role_has_the_advantages_that_it_has_alone(
    name: str, seed: int, over: str | None, options: Settings
) -> None:
    batch = batch_for(name, seed)
    rng = random.Random(seed)
    drawn: dict[tuple[int, int], str] = {}
    roles = tuple(drawn.setdefault((s.group, s.sample), rng.choice(["first", "second"])) for s in batch)
    chosen = over or {"gae": "batch", "turn_gae": "batch", "reinforce": "batch", "reinforce_baseline": "batch"}.get(
        name, "none"
    )
    advantages: list[Tensor] = [torch.empty(0)] * len(batch)
    returns = list(advantages)
    for role in set(roles):
        places = [place for place, own in enumerate(roles) if own == role]
        alone = [batch[place] for place in places]
        rows, targets = references.raw(name, alone, options)
        for place, row, target in zip(
            places, references.whitened_over(alone, rows, chosen, True), targets, strict=True
        ):
            advantages[place], returns[place] = expected([row]), expected([target])
    found = estimate(name, attrs.evolve(inputs(batch), roles_S=roles), params_of(options), whiten=over)
    torch.testing.assert_close(found.advantages_N, torch.cat(advantages), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(found.returns_N, torch.cat(returns), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["turn_gae", "turn_group_norm", "process_group_norm", "gigpo"])
@EXAMPLES
@given(seed=SEEDS, options=SETTINGS)
def test_adjacent_turns_are_told_apart_by_their_ids(name: str, seed: int, options: Settings) -> None:
    rng = random.Random(seed)
    batch = []
    following: dict[tuple[int, int], int] = {}
    for s in random_batch(seed):
        turns = []
        for _ in s.actions:
            turns.append(following.get((s.group, s.sample), 0))
            following[s.group, s.sample] = turns[-1] + (rng.random() < 0.5)
        following[s.group, s.sample] = turns[-1] + 1
        batch.append(attrs.evolve(s, turns=turns))
    found = ESTIMATORS[name](inputs(batch), params_of(options)).advantages_N
    want = expected(references.raw(name, batch, options)[0])
    torch.testing.assert_close(found, want, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", NAMES)
@FEWER
@given(seed=SEEDS)
def test_order_and_packing_do_not_matter(name: str, seed: int) -> None:
    batch, rng = batch_for(name, seed), random.Random(seed)
    order = reordered(batch, seed)
    lengths = [len(s.actions) for s in batch]
    before = torch.split(raw(name, batch), lengths)
    widths = [(rng.randint(0, 3), rng.randint(0, 3)) for _ in batch]
    moved = [padded(batch[i], *widths[i]) for i in order]
    after = torch.split(raw(name, moved), [len(s.actions) for s in moved])
    for i, row in zip(order, after, strict=True):
        start = widths[i][0]
        torch.testing.assert_close(row[start : start + lengths[i]], before[i], rtol=1e-9, atol=1e-12)
        assert row[:start].count_nonzero() == row[start + lengths[i] :].count_nonzero() == 0


@pytest.mark.parametrize("name", NAMES)
@EXAMPLES
@given(seed=SEEDS, over=WHITENINGS, poison=st.sampled_from([math.nan, math.inf]))
def test_what_is_masked_changes_nothing(name: str, seed: int, over: str | None, poison: float) -> None:
    batch = batch_for(name, seed)
    clean = estimate(name, inputs(batch), PARAMS, whiten=over)
    poisoned = estimate(name, inputs(batch, poison=poison), PARAMS, whiten=over)
    assert torch.equal(clean.advantages_N, poisoned.advantages_N)
    assert torch.equal(clean.returns_N, poisoned.returns_N)
    assert clean.advantages_N.isfinite().all()


@pytest.mark.parametrize("name", NAMES)
@FEWER
@given(seed=SEEDS)
def test_a_gap_equals_the_compacted_sequence(name: str, seed: int) -> None:
    batch = numbered(batch_for(name, seed))
    compact = []
    for s in batch:
        places, turns = references.action_positions(s), s.turns
        assert turns is not None
        compact.append(
            attrs.evolve(
                s,
                rewards=[s.rewards[t] for t in places],
                extras=[s.extras[t] for t in places],
                values=[s.values[t] for t in places],
                turns=[turns[t] for t in places],
                actions=[True] * len(places),
            )
        )
    gapped = raw(name, batch)
    torch.testing.assert_close(gapped, raw(name, [attrs.evolve(s, turns=None) for s in batch]), rtol=0, atol=0)
    dense = raw(name, compact)
    torch.testing.assert_close(gapped[flat(batch, "actions", torch.bool)], dense, rtol=1e-12, atol=1e-12)


def is_odd(turn: int) -> bool:
    return turn > 0 and turn % 2 == 1


def branch_of(sequence: Sequence, *, odd: bool) -> Sequence:
    """A branch that has the sequence's odd turns alone, or all of it but these."""
    assert sequence.turns is not None
    kept = [t for t, turn in enumerate(sequence.turns) if is_odd(turn) == odd]
    columns = {name: [getattr(sequence, name)[t] for t in kept] for name in ("rewards", "extras", "values", "actions")}
    return attrs.evolve(sequence, **columns, turns=[sequence.turns[t] for t in kept])


@pytest.mark.parametrize("name", NAMES)
@FEWER
@given(seed=SEEDS)
def test_turns_of_branches_follow_each_other_as_they_were_sampled(name: str, seed: int) -> None:
    """As those of an agent and the sub-agent that it calls, and calls again."""
    whole = numbered(list({(s.group, s.sample): s for s in batch_for(name, seed)}.values()))
    branches = [
        branch
        for s in whole
        for branch in (branch_of(s, odd=False), attrs.evolve(branch_of(s, odd=True), parts=[0.0] * len(s.parts)))
    ]
    found, wanted = raw(name, branches), raw(name, whole)
    odd = torch.cat([torch.tensor([is_odd(turn) for turn in s.turns or []]) for s in whole])
    in_second = torch.cat([torch.full((len(b.actions),), i % 2 == 1) for i, b in enumerate(branches)])
    torch.testing.assert_close(found[~in_second], wanted[~odd], rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(found[in_second], wanted[odd], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_a_batch_without_actions_is_answered_with_zeros(name: str) -> None:
    batch = [Sequence(0, i, [0.0] * 2, [0.0] * 2, [0.0] * 2, [False] * 2) for i in range(2)]
    for over in (None, *catalogue.WHITENINGS):
        assert torch.equal(
            estimate(name, inputs(batch), PARAMS, whiten=over).advantages_N, torch.zeros(4, dtype=torch.float64)
        )


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("over", catalogue.WHITENINGS)
def test_a_batch_of_no_sequence_has_no_advantage(name: str, over: str) -> None:
    columns = attrs.asdict(one_token_each([1.0]), recurse=False)
    weights = columns.pop("part_weights_K")
    nothing = {key: None if column is None else column[:0] for key, column in columns.items()}
    found = estimate(name, EstimatorInput(**nothing, part_weights_K=weights), PARAMS, whiten=over)
    assert len(found.advantages_N) == len(found.returns_N) == 0


@pytest.mark.parametrize("name", ["gae", "turn_gae"])
def test_a_calibrated_critic_sees_no_advantage_across_a_gap(name: str) -> None:
    actions = [False, True, True, *[False] * 100, True, True]
    reward = [0.0] * (len(actions) - 1) + [0.5]
    zeros, values = [0.0] * len(actions), [0.5] * len(actions)
    found = raw(name, [Sequence(0, 0, reward, zeros, values, actions)], EstimatorParams(lambd=0.95))
    assert found.abs().max() < 1e-12


def one_token_each(
    rewards: list[float], groups: list[int] | None = None, dtype: torch.dtype = torch.float32
) -> EstimatorInput:
    batch = [
        Sequence(
            0 if groups is None else groups[i], i, [0.0, r], [0.0, 0.0], [0.0, 0.0], [False, True], parts=[r, 3 * r]
        )
        for i, r in enumerate(rewards)
    ]
    return inputs(batch, dtype)


def plain_batch(seed: int) -> list[Sequence]:
    """Rollouts of one turn and one branch, with no KL."""
    rng, batch = random.Random(seed), []
    for group in range(rng.randint(1, 3)):
        for sample in range(rng.randint(1, 5)):
            n = rng.randint(1, 6)
            batch.append(
                Sequence(
                    group,
                    sample,
                    [0.0] * n + [rng.random()],
                    [0.0] * (n + 1),
                    [0.0] * (n + 1),
                    [False] + [True] * n,
                    baseline=0.25 * group,
                    parts=[rng.random(), rng.random()],
                )
            )
    return batch


def moved_rewards(s: Sequence, scale: float, shift: float) -> Sequence:
    """With scale * r + shift for every reward of a rollout of one turn, its parts and its baseline."""
    return attrs.evolve(
        s,
        rewards=[*s.rewards[:-1], scale * s.rewards[-1] + shift],
        baseline=scale * s.baseline + shift,
        parts=[scale * x + shift for x in s.parts],
    )


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("dr_grpo", [0.75, -0.25, -0.25, -0.25]),
        ("opo", [0.75, -0.25, -0.25, -0.25]),
        ("gpg", [0.75, -0.25, -0.25, -0.25]),
        ("flash_reinforce", [0.75, -0.25, -0.25, -0.25]),
        ("rloo", [1, -1 / 3, -1 / 3, -1 / 3]),
        ("rloo_sequence", [1, -1 / 3, -1 / 3, -1 / 3]),
        ("group_norm", [1.5, -0.5, -0.5, -0.5]),
        ("turn_group_norm", [1.5, -0.5, -0.5, -0.5]),
        ("process_group_norm", [1.5, -0.5, -0.5, -0.5]),
        ("gigpo", [3, -1, -1, -1]),
        ("gdpo", [1.5, -0.5, -0.5, -0.5]),
        ("lite_ppo", [1.5, -0.5, -0.5, -0.5]),
        ("maxrl", [3, -1, -1, -1]),
        ("remax", [1, 0, 0, 0]),
        ("reinforce", [1, 0, 0, 0]),
    ],
)
def test_hand_computed_groups(name: str, wanted: list[float]) -> None:
    found = ESTIMATORS[name](one_token_each([1, 0, 0, 0]), EstimatorParams()).advantages_N[1::2]
    torch.testing.assert_close(found, torch.tensor(wanted, dtype=torch.float32), rtol=1e-6, atol=1e-6)


def test_a_token_that_one_rollout_alone_has_takes_the_last_baseline_before_it() -> None:
    """It does so even if rewards to go were equal there."""
    batch = [
        Sequence(0, 0, [0.0], [0.0], [0.0], [True]),
        Sequence(0, 1, [-1.0, 0.0, 1.0], [0.0] * 3, [0.0] * 3, [True, False, True]),
    ]
    assert raw("optimal_token_baseline", batch).tolist() == [0.0, 0.0, 0.0, 1.0]
    raised = [attrs.evolve(s, rewards=[*s.rewards[:-1], s.rewards[-1] + 1e3]) for s in batch]
    assert raw("optimal_token_baseline", raised).tolist() == pytest.approx([0.0, 0.0, 0.0, 1.0], abs=1e-9)


def test_opo_weighs_by_length() -> None:
    batch = [
        Sequence(0, 0, [1.0], [0.0], [0.0], [True]),
        Sequence(0, 1, [0.0] * 3, [0.0] * 3, [0.0] * 3, [True] * 3),
    ]
    assert raw("opo", batch).tolist() == [0.75, -0.25, -0.25, -0.25]


def test_gpg_leaves_groups_that_teach_nothing_out_of_the_mean() -> None:
    found = ESTIMATORS["gpg"](one_token_each([1, 0, 1, 1], [0, 0, 1, 1]), EstimatorParams()).advantages_N[1::2]
    assert found.tolist() == [1.0, -1.0, 0.0, 0.0]


def test_lite_ppo_scales_all_groups_alike() -> None:
    """A group whose rewards hardly differ keeps small advantages, which group_norm makes as large as the others'."""
    rewards = one_token_each([1, 0, 1.001, 1], [0, 0, 1, 1])
    found = ESTIMATORS["lite_ppo"](rewards, EstimatorParams()).advantages_N[1::2]
    std = math.sqrt(sum((r - 3.001 / 4) ** 2 for r in (1, 0, 1.001, 1)) / 3)
    torch.testing.assert_close(found, torch.tensor([0.5, -0.5, 5e-4, -5e-4]) / std, rtol=1e-3, atol=0)
    normed = ESTIMATORS["group_norm"](rewards, EstimatorParams()).advantages_N[1::2]
    assert normed.abs().tolist() == pytest.approx([0.7071] * 4, rel=1e-3)


@EXAMPLES
@given(rewards=st.lists(st.sampled_from([0.0, 1.0]), min_size=2, max_size=12), k=st.integers(1, 8))
def test_pass_at_k_of_passes_is_the_papers(rewards: list[float], k: int) -> None:
    """Chen et al. 2025, by their analytical derivation: with W of N replies wrong, R = 1 - C(W, k) / C(N, k) and its
    deviation s, a right one has (1 - R) / s and a wrong one (1 - R - C(W - 1, k - 1) / C(N - 1, k - 1)) / s."""
    assume(k < len(rewards))
    found = ESTIMATORS["pass_at_k"](one_token_each(rewards, dtype=torch.float64), EstimatorParams(pass_k=k))
    total, wrong = len(rewards), rewards.count(0.0)
    passes = 1 - math.comb(wrong, k) / math.comb(total, k)
    deviation = math.sqrt(passes * (1 - passes)) + 1e-9
    of_wrong = 1 - passes - math.comb(max(wrong - 1, 0), k - 1) / math.comb(total - 1, k - 1)
    wanted = [(1 - passes if reward else of_wrong) / deviation if 0 < passes < 1 else 0.0 for reward in rewards]
    assert found.advantages_N[1::2].tolist() == pytest.approx(wanted, abs=1e-9)


@EXAMPLES
@given(rewards=st.lists(st.floats(-3, 3), min_size=2, max_size=8))
def test_pass_at_1_is_grpo_but_for_the_deviation(rewards: list[float]) -> None:
    given_inputs = one_token_each(rewards, dtype=torch.float64)
    found = ESTIMATORS["pass_at_k"](given_inputs, EstimatorParams(pass_k=1)).advantages_N
    normed = ESTIMATORS["group_norm"](given_inputs, EstimatorParams()).advantages_N
    unbiased = math.sqrt(len(rewards) / (len(rewards) - 1))
    torch.testing.assert_close(found, unbiased * normed, rtol=1e-4, atol=1e-4)


@EXAMPLES
@given(seed=SEEDS, k=st.integers(1, 5))
def test_advantages_of_the_best_sum_to_0_in_each_group(seed: int, k: int) -> None:
    batch = plain_batch(seed)
    found = raw("pass_at_k", batch, EstimatorParams(pass_k=k))
    last = torch.tensor([len(s.actions) for s in batch]).cumsum(0) - 1
    sums = torch.zeros(3, dtype=torch.float64).index_add_(0, torch.tensor([s.group for s in batch]), found[last])
    assert sums.abs().max() < 1e-6


def test_with_k_of_two_a_second_right_reply_is_worth_little() -> None:
    one, two = (
        ESTIMATORS["pass_at_k"](one_token_each(rewards), EstimatorParams(pass_k=2)).advantages_N[1::2].tolist()
        for rewards in ([1, 0, 0, 0], [1, 1, 0, 0])
    )
    assert one == pytest.approx([1, -1 / 3, -1 / 3, -1 / 3])
    assert two == pytest.approx([5**-0.5, 5**-0.5, -(5**-0.5), -(5**-0.5)])
    solved = ESTIMATORS["pass_at_k"](one_token_each([1, 1, 1, 0]), EstimatorParams(pass_k=2))
    assert solved.advantages_N.abs().max() == 0, "any two of them have a right one"
    large = one_token_each([0.0, *[1e8 / 3] * 7], dtype=torch.float64)
    rounded = ESTIMATORS["pass_at_k"](large, EstimatorParams(pass_k=2))
    assert rounded.advantages_N.abs().max() == 0, "however large it is"


@pytest.mark.parametrize(
    ("names", "wanted"),
    [
        (["dr_grpo", "opo", "gpg", "flash_reinforce"], 1.0),
        (["rloo", "rloo_sequence"], 2.0),
        (["group_norm", "lite_ppo", "gdpo", "turn_group_norm", "process_group_norm"], math.sqrt(0.5)),
        (["gigpo"], math.sqrt(2)),
        (["pass_at_k"], 1.0),
    ],
)
def test_a_reward_against_its_opposite_by_hand(names: list[str], wanted: float) -> None:
    """Both are of one size, and two are the fewest that have a deviation."""
    for name in names:
        found = ESTIMATORS[name](one_token_each([1.0, -1.0]), EstimatorParams(pass_k=1)).advantages_N[1::2]
        assert found.tolist() == pytest.approx([wanted, -wanted], rel=1e-6), name


def test_early_tokens_of_a_distilled_reply_count_more() -> None:
    batch = [Sequence(0, 0, [0.0] * 4, [-1.0, 2.0, 0.0, 1.0], [0.0] * 4, [True, True, False, True])]
    found = raw("iw_opd", batch, EstimatorParams(prefix_weight=0.8))
    assert found.tolist() == pytest.approx([-1.0 * 1.8, 2.0 * (1 + 0.8 * 3 / 4), 0.0, 1.0 * (1 + 0.8 / 4)])
    assert raw("iw_opd", batch, EstimatorParams(prefix_weight=0.0)).tolist() == [-1.0, 2.0, 0.0, 1.0]
    agreed = attrs.evolve(batch[0], sample=1, extras=[0.0] * 4)
    assert raw("iw_opd", [agreed, *batch])[:4].tolist() == [0.0] * 4, "where student and teacher are of one opinion"


def test_a_rollout_counts_once_however_many_branches_it_has() -> None:
    one = Sequence(0, 0, [1.0], [0.0], [0.0], [True])
    none = attrs.evolve(one, rewards=[0.0])
    other = attrs.evolve(none, sample=1)
    assert raw("dr_grpo", [one, none, none, other]).tolist() == [0.5, 0.5, 0.5, -0.5]


@pytest.mark.parametrize("name", GROUP_ESTIMATORS)
def test_equal_rewards_teach_nothing(name: str) -> None:
    rewards, counts, dtypes = [0.1, 1 / 3, -0.7, 1e-7, 1e6, -1e6 / 3], [1, 3, 6, 7], [torch.float32, torch.float64]
    for reward, count, dtype in itertools.product(rewards, counts, dtypes):
        if "rewards_from_0" in catalogue.ESTIMATORS[name].needs:
            reward = abs(reward)
        given_inputs = one_token_each([reward] * count + [0.3] * 3, [0] * count + [1] * 3, dtype)
        found = ESTIMATORS[name](given_inputs, EstimatorParams()).advantages_N
        assert found[: 2 * count].abs().max() < 1e-6 * max(1.0, abs(reward)), (reward, count, dtype)


@pytest.mark.parametrize("name", GROUP_ESTIMATORS)
@pytest.mark.parametrize("reward", [0.3, -0.3])
def test_rewards_that_rounding_parted_teach_nothing(name: str, reward: float) -> None:
    if "rewards_from_0" in catalogue.ESTIMATORS[name].needs:
        reward = abs(reward)
    next_to_it = float(torch.nextafter(torch.tensor(reward), torch.tensor(0.0)))
    found = ESTIMATORS[name](one_token_each([reward, next_to_it, reward]), EstimatorParams()).advantages_N
    assert found.abs().max() < 1e-6


@pytest.mark.parametrize("name", GROUP_ESTIMATORS)
@pytest.mark.parametrize("sign", [1, -1])
def test_equal_outcomes_earned_over_other_turns_teach_nothing(name: str, sign: int) -> None:
    if "rewards_from_0" in catalogue.ESTIMATORS[name].needs:
        sign = 1
    batch = [
        attrs.evolve(s, values=[0.0, 0.0, 1.0], parts=[sign * 0.3] * 2)
        for s in two_turns([[sign * x for x in turns] for turns in ([0.1, 0.2], [0.2, 0.1], [0.3, 0], [100.3, -100])])
    ]
    found = ESTIMATORS[name](inputs(batch, torch.float32), EstimatorParams()).advantages_N
    assert found[::3].abs().max() < 1e-3


@pytest.mark.parametrize("name", GROUP_ESTIMATORS)
@pytest.mark.parametrize(("low", "high"), [(0.0, 1e-7), (1e-9, 2e-9), (1e6, 1e6 + 1), (1e-20, 1.0)])
def test_rewards_differ_at_any_scale(name: str, low: float, high: float) -> None:
    found = ESTIMATORS[name](one_token_each([low, high]), EstimatorParams(pass_k=1)).advantages_N[1::2]
    assert found[0] < 0 < found[1]
    torch.testing.assert_close(found[0], -found[1])


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("gdpo", "on_policy_distill", "iw_opd")])
def test_a_reward_that_is_no_number_is_not_hidden(name: str) -> None:
    """An advantage that the reward enters is NaN, instead of a 0 that looks like nothing to learn."""
    batch = one_token_each([math.nan, 1.0, 0.0, 1.0], [0, 0, 1, 1])
    found = ESTIMATORS[name](batch, EstimatorParams()).advantages_N[1::2]
    assert found[0].isnan()
    if "group" in catalogue.ESTIMATORS[name].needs:
        assert found[1].isnan()
        over_the_batch = name in ("gpg", "lite_ppo")
        assert over_the_batch or found[2:].isfinite().all()


@pytest.mark.parametrize("name", [*GROUP_ESTIMATORS, "flash_reinforce", "remax"])
@FEWER
@given(seed=SEEDS)
def test_rewards_are_compared_without_rounding_what_they_have_in_common(name: str, seed: int) -> None:
    """Float32 holds each of these, but not sums and means of them."""
    rng = random.Random(seed)
    rewards = [[1000 + rng.randint(0, 9) / 64 for _ in range(2)] for _ in range(5)]
    batch = [
        attrs.evolve(s, baseline=1000 + 1 / 64, parts=mine) for s, mine in zip(two_turns(rewards), rewards, strict=True)
    ]
    single = ESTIMATORS[name](inputs(batch, torch.float32), PARAMS).advantages_N
    torch.testing.assert_close(single.double(), raw(name, batch), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", NAMES)
def test_half_precision_is_computed_in_float32(name: str, dtype: torch.dtype) -> None:
    batch = batch_for(name, 3, long=True)
    single = attrs.asdict(inputs(batch, torch.float32), recurse=False)
    floats = [key for key, column in single.items() if column is not None and column.is_floating_point()]
    half = single | {key: single[key].to(dtype) for key in floats}
    wanted = ESTIMATORS[name](EstimatorInput(**single | {key: half[key].float() for key in floats}), PARAMS)
    found = ESTIMATORS[name](EstimatorInput(**half), PARAMS)
    assert torch.equal(found.advantages_N, wanted.advantages_N)
    assert torch.equal(found.returns_N, wanted.returns_N)


@EXAMPLES
@given(rewards=st.lists(st.sampled_from([0.0, 0.5, 1.0, -1.0, -1e-3]), min_size=2, max_size=5))
def test_maxrl_refuses_what_it_is_not_made_for(rewards: list[float]) -> None:
    if min(rewards) >= 0:
        assert ESTIMATORS["maxrl"](one_token_each(rewards), EstimatorParams()).advantages_N.isfinite().all()
        return
    with pytest.raises(
        RewardError, match=rf"below 0, but that of an episode is {min(rewards):g}:.*--reward.clip_range"
    ):
        ESTIMATORS["maxrl"](one_token_each(rewards), EstimatorParams())


def test_maxrl_takes_what_cancels_for_nothing() -> None:
    """In float32 0.1 + 0.2 - 0.3 is below 0."""
    actions = [True, False, True, False, True]
    batch = [
        Sequence(0, i, rewards, [0.0] * 5, [0.0] * 5, actions)
        for i, rewards in enumerate(([0.1, 0.0, 0.2, 0.0, -0.3], [0.0, 0.0, 0.0, 0.0, 1.0]))
    ]
    found = ESTIMATORS["maxrl"](inputs(batch, torch.float32), EstimatorParams()).advantages_N
    assert found[::5].tolist() == [-1.0, 1.0]


def two_turns(rewards: list[list[float]]) -> list[Sequence]:
    """Rollouts of one group, each of two turns of a token."""
    return [
        Sequence(0, i, [mine[0], 0.0, mine[1]], [0.0] * 3, [0.0] * 3, [True, False, True])
        for i, mine in enumerate(rewards)
    ]


@pytest.mark.parametrize(
    ("rewards", "paper", "own"),
    [
        ([[1, 1], [1, 0]], [[1, 0.5], [-1, -1.5]], [[0.7071, 0.7071], [-0.7071, -0.7071]]),
        ([[1, 0], [0, 0]], [[1, -0.5], [-1, -0.5]], [[0.7071, 0], [-0.7071, 0]]),
    ],
)
def test_both_ways_to_normalise_turns_by_hand(
    rewards: list[list[float]], paper: list[list[float]], own: list[list[float]]
) -> None:
    """The paper's sums of rewards that are normalised over all turns, and sums that are normalised turn by turn."""
    for name, wanted in (("process_group_norm", paper), ("turn_group_norm", own)):
        found = raw(name, two_turns(rewards), EstimatorParams()).view(2, 3)[:, ::2]
        torch.testing.assert_close(found, torch.tensor(wanted, dtype=torch.float64), rtol=1e-4, atol=1e-4)


def test_gigpo_by_hand() -> None:
    """Two episodes that part at their first turn: of the second turns each is in a state of its own."""
    batch = [attrs.evolve(s, values=[-1.0, 0.0, float(i)]) for i, s in enumerate(two_turns([[1, 0], [0, 2]]))]
    given_inputs = attrs.evolve(inputs(batch), state_ids_N=torch.tensor([4, -1, 5, 4, -1, 6]))
    found = {
        weight: ESTIMATORS["gigpo"](given_inputs, EstimatorParams(step_weight=weight)).advantages_N.view(2, 3)[:, ::2]
        for weight in (0.0, 1.0)
    }
    half = math.sqrt(0.5)
    for weight, wanted in ((0.0, [[-half, -half], [half, half]]), (1.0, [[-2 * half, -half], [2 * half, half]])):
        torch.testing.assert_close(found[weight], torch.tensor(wanted, dtype=torch.float64), rtol=1e-6, atol=1e-6)
    by_means = ESTIMATORS["gigpo"](given_inputs, EstimatorParams(no_std_norm=True)).advantages_N.view(2, 3)[:, ::2]
    assert by_means.tolist() == [[-1.0, -0.5], [1.0, 0.5]], "outcomes 1 and 2, the same of the first turns"
    alike = attrs.evolve(given_inputs, state_ids_N=torch.tensor([4, -1, 5, 4, -1, 5]))
    shared = ESTIMATORS["gigpo"](alike, EstimatorParams(gamma=0.5)).advantages_N.view(2, 3)[:, ::2]
    torch.testing.assert_close(shared, torch.tensor([[-half, -2 * half], [half, 2 * half]], dtype=torch.float64))


@EXAMPLES
@given(seed=SEEDS)
def test_gigpo_of_states_that_nobody_shares_is_grpo(seed: int) -> None:
    batch = random_batch(seed)
    alone = attrs.evolve(inputs(batch), state_ids_N=torch.arange(sum(len(s.actions) for s in batch)))
    found = ESTIMATORS["gigpo"](alone, PARAMS).advantages_N
    torch.testing.assert_close(found, raw("group_norm", batch), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", SCALE_FREE)
@EXAMPLES
@given(seed=SEEDS, scale=st.floats(0.1, 10))
def test_normalised_rewards_have_no_scale(name: str, seed: int, scale: float) -> None:
    batch = plain_batch(seed)
    scaled = raw(name, [moved_rewards(s, scale, 0.0) for s in batch])
    torch.testing.assert_close(scaled, raw(name, batch), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", LINEAR)
@EXAMPLES
@given(seed=SEEDS, scale=st.floats(0.1, 10))
def test_advantages_scale_with_rewards(name: str, seed: int, scale: float) -> None:
    batch = plain_batch(seed)
    scaled = raw(name, [moved_rewards(s, scale, 0.0) for s in batch])
    torch.testing.assert_close(scaled, scale * raw(name, batch), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", [*BASELINED, "remax"])
@EXAMPLES
@given(seed=SEEDS, shifts=st.lists(st.floats(-5, 5), min_size=3, max_size=3))
def test_a_constant_on_a_groups_rewards_changes_nothing(name: str, seed: int, shifts: list[float]) -> None:
    batch = plain_batch(seed)
    shifted = raw(name, [moved_rewards(s, 1.0, shifts[s.group]) for s in batch])
    torch.testing.assert_close(shifted, raw(name, batch), rtol=1e-5, atol=1e-5)


@EXAMPLES
@given(seed=SEEDS, shift=st.floats(-5, 5))
def test_a_constant_on_the_batchs_rewards_leaves_flash_reinforce(seed: int, shift: float) -> None:
    batch = plain_batch(seed)
    shifted = raw("flash_reinforce", [moved_rewards(s, 1.0, shift) for s in batch])
    torch.testing.assert_close(shifted, raw("flash_reinforce", batch), rtol=1e-9, atol=1e-9)


@EXAMPLES
@given(seed=SEEDS)
def test_rloo_is_dr_grpo_scaled(seed: int) -> None:
    rewards = torch.rand(5, generator=torch.Generator().manual_seed(seed)).tolist()
    rloo = ESTIMATORS["rloo"](one_token_each(rewards), EstimatorParams()).advantages_N
    dr_grpo = ESTIMATORS["dr_grpo"](one_token_each(rewards), EstimatorParams()).advantages_N
    torch.testing.assert_close(rloo, dr_grpo * 5 / 4, rtol=1e-5, atol=1e-6)


@EXAMPLES
@given(seed=SEEDS)
def test_turn_gae_of_one_token_turns_is_gae(seed: int) -> None:
    batch = [attrs.evolve(s, turns=list(range(len(s.actions)))) for s in random_batch(seed)]
    torch.testing.assert_close(raw("turn_gae", batch), raw("gae", batch), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "column"),
    [
        ("gae", "values_N"),
        ("turn_gae", "values_N"),
        ("remax", "baselines_S"),
        ("gdpo", "reward_parts_SK"),
        ("gdpo", "part_weights_K"),
        ("gigpo", "state_ids_N"),
        ("optimal_token_baseline", "logprobs_N"),
        ("optimal_token_baseline", "collision_N"),
    ],
)
def test_a_missing_input_is_named(name: str, column: str) -> None:
    columns = attrs.asdict(one_token_each([1.0]), recurse=False)
    with pytest.raises(ValueError, match=column):
        estimate(name, EstimatorInput(**{**columns, column: None}), EstimatorParams())


def test_an_unknown_estimator_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="nonsense"):
        estimate("nonsense", one_token_each([1.0]), EstimatorParams())


@pytest.mark.parametrize("column", ["advantages_N", "returns_N"])
def test_a_result_without_a_value_for_each_token_is_refused(column: str, algorithms_as_before: None) -> None:
    @estimator("toy")
    def toy(inputs: EstimatorInput, params: EstimatorParams) -> Advantages:
        whole = Advantages(advantages_N=inputs.rewards_N, returns_N=inputs.rewards_N)
        return attrs.evolve(whole, **{column: inputs.rewards_N.mean()})

    with pytest.raises(ConfigurationError, match=rf"The estimator toy returned {column} of shape \(\) for 4 tokens"):
        estimate("toy", one_token_each([1.0, 0.0]), EstimatorParams())


@EXAMPLES
@given(seed=SEEDS)
def test_whitened_advantages_have_mean_0_and_deviation_1(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    values = 3 + 2 * torch.randn(40, generator=generator, dtype=torch.float64)
    groups = torch.arange(40) % 3
    found = whiten_over(values, groups, std_norm=True)
    for group in range(3):
        mine = found[groups == group]
        assert abs(float(mine.mean())) < 1e-12
        assert float(mine.std(correction=0)) == pytest.approx(1.0, rel=1e-9)
    assert float(whiten_over(values, None, std_norm=True).std(correction=0)) == pytest.approx(1.0, rel=1e-9)


@pytest.mark.parametrize("over", ["batch", "group"])
@pytest.mark.parametrize("std_norm", [True, False])
@pytest.mark.parametrize(
    ("value", "count"), [(1000.7, 21), (100.3, 3), (12345.678, 3), (0.1, 13), (1e-30, 5), (0.0, 2)]
)
@pytest.mark.parametrize("sign", [1, -1])
def test_equal_values_whiten_to_0(value: float, count: int, sign: int, std_norm: bool, over: str) -> None:
    groups = torch.zeros(count, dtype=torch.int64) if over == "group" else None
    found = whiten_over(torch.full((count,), sign * value), groups, std_norm=std_norm)
    assert torch.equal(found, torch.zeros(count))


@pytest.mark.parametrize("value", [1000.7, -12345.678, 0.3])
def test_values_that_rounding_parted_whiten_to_0(value: float) -> None:
    values = torch.full((8,), value)
    values[::3] = torch.nextafter(values[0], torch.tensor(torch.inf))
    assert len(values.unique()) == 2
    assert torch.equal(whiten_over(values, None, std_norm=True), torch.zeros(8))


@EXAMPLES
@given(seed=SEEDS, mean=st.sampled_from([0.0, 1.0, -1000.0, 1e4]), spread=st.sampled_from([3e-6, 1e-3, 1.0]))
def test_whitening_is_exact_however_far_the_mean(seed: int, mean: float, spread: float) -> None:
    """`spread` is relative to the mean: from several roundings of float32 on."""
    noise = torch.randn(200, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    values = (mean + spread * max(1.0, abs(mean)) * noise).float()
    exact = values.double() - values.double().mean()
    wanted = exact / exact.square().mean().clamp(min=1e-8).sqrt()
    for groups in (None, torch.zeros(200, dtype=torch.int64)):
        found = whiten_over(values, groups, std_norm=True)
        torch.testing.assert_close(found.double(), wanted, rtol=1e-6, atol=1e-6)


SCAN_LENGTHS = [[0], [1], [63], [64], [65], [0, 64, 0, 129, 1], [4097, 3, 0, 200], [5000]]


def looped(x: Tensor, lengths: list[int], discounts: list[float]) -> Tensor:
    wanted, start = [], 0
    for length, discount in zip(lengths, discounts, strict=True):
        running, row = 0.0, []
        for value in reversed(x[start : start + length].tolist()):
            running = value + discount * running
            row.append(running)
        wanted += row[::-1]
        start += length
    return torch.tensor(wanted, dtype=torch.float64)


@pytest.mark.parametrize("discount", [0.0, 0.5, 0.99, 1.0])
@pytest.mark.parametrize("lengths", SCAN_LENGTHS)
def test_the_scan_equals_a_loop(discount: float, lengths: list[int]) -> None:
    x = torch.randn(sum(lengths), dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = reverse_discounted_sum(x, torch.tensor(lengths), discount)
    torch.testing.assert_close(found, looped(x, lengths, [discount] * len(lengths)), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("lengths", SCAN_LENGTHS)
def test_the_scan_takes_a_discount_for_each_sequence(lengths: list[int]) -> None:
    x = torch.randn(sum(lengths), dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    discounts = [(0.99, 0.0, 1.0, 0.5)[i % 4] for i in range(len(lengths))]
    found = reverse_discounted_sum(x, torch.tensor(lengths), torch.tensor(discounts, dtype=torch.float64))
    torch.testing.assert_close(found, looped(x, lengths, discounts), rtol=1e-10, atol=1e-10)
