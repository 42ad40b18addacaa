"""Estimators against references written from the papers, and the invariances the design promises."""

import math
from typing import Any

import attrs
import pytest
import torch
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rollgrad.domain.catalogue import estimator_traits
from rollgrad.domain.estimators import ESTIMATORS, EstimatorInput, EstimatorParams, estimate
from rollgrad.domain.estimators.scan import reverse_discounted_sum
from tests.unit.domain import estimator_references as references
from tests.unit.domain.references import Sequence, random_batch

GROUP_ESTIMATORS = ["reinforce_baseline", "rloo", "group_norm", "dr_grpo"]
EXAMPLES = settings(max_examples=40, deadline=None)
SEEDS = st.integers(0, 10**6)
WEIGHTS = [1.0, 0.5]


def flat(batch: list[Sequence], name: str, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.tensor([x for s in batch for x in getattr(s, name)], dtype=dtype)


def inputs(batch: list[Sequence], dtype: torch.dtype = torch.float64, poison: float | None = None) -> EstimatorInput:
    mask = flat(batch, "actions", torch.bool)
    columns = {name: flat(batch, name, dtype) for name in ("rewards", "extras", "values")}
    if poison is not None:
        columns = {name: torch.where(mask, column, poison) for name, column in columns.items()}
    return EstimatorInput(
        rewards_N=columns["rewards"],
        token_rewards_N=columns["extras"],
        values_N=columns["values"],
        action_mask_N=mask,
        lengths_S=torch.tensor([len(s.actions) for s in batch]),
        group_ids_S=torch.tensor([s.group for s in batch]),
        sample_ids_S=torch.tensor([s.sample for s in batch]),
        baselines_S=torch.tensor(extra_lists(batch)["baselines"], dtype=dtype),
        reward_parts_SK=torch.tensor(extra_lists(batch)["parts"], dtype=dtype),
        part_weights_K=torch.tensor(WEIGHTS, dtype=dtype),
    )


def extra_lists(batch: list[Sequence]) -> dict[str, Any]:
    """Greedy baselines (one a prompt) and two named rewards of each sequence, made up from its numbers."""
    return {
        "baselines": [math.sin(s.group) for s in batch],
        "parts": [[math.cos(s.group + 3 * s.sample + len(s.actions)), float(s.sample % 2)] for s in batch],
        "weights": WEIGHTS,
    }


def with_turns(given_inputs: EstimatorInput, batch: list[Sequence]) -> EstimatorInput:
    """Turns by number, for sequences whose gaps will be gone."""
    numbers = []
    for s in batch:
        turn = -1
        for t, action in enumerate(s.actions):
            turn += action and (t == 0 or not s.actions[t - 1])
            numbers.append(turn if action else -1)
    return evolve(given_inputs, turn_ids_N=torch.tensor(numbers))


def select(given_inputs: EstimatorInput, order: list[int], lengths: list[int]) -> EstimatorInput:
    """The sequences in another order."""
    index_N = torch.cat([torch.arange(sum(lengths)).split(lengths)[i] for i in order])
    changed = {}
    for field in attrs.fields(EstimatorInput):
        value = getattr(given_inputs, field.name)
        if value is not None and not field.name.endswith("_K"):
            changed[field.name] = value[index_N] if field.name.endswith("_N") else value[order]
        if field.name == "reward_parts_SK":
            changed[field.name] = value[order]
    return evolve(given_inputs, **changed)


def expected(rows: list[list[float | None]]) -> Tensor:
    return torch.tensor([0.0 if x is None else x for row in rows for x in row], dtype=torch.float64)


@pytest.mark.parametrize("name", ESTIMATORS)
@EXAMPLES
@given(
    seed=SEEDS,
    long=st.booleans(),
    gamma=st.sampled_from([1.0, 0.99, 0.5]),
    lambd=st.sampled_from([1.0, 0.95, 0.0]),
    whiten=st.sampled_from([None, "none", "batch", "group"]),
    std_norm=st.booleans(),
)
def test_equals_the_reference(
    name: str, seed: int, long: bool, gamma: float, lambd: float, whiten: str | None, std_norm: bool
) -> None:
    batch = random_batch(seed, long=long)
    params = EstimatorParams(gamma=gamma, lambd=lambd)
    rows = references.estimate(name, batch, gamma=gamma, lambd=lambd, **extra_lists(batch))
    rows = references.whitened(batch, rows, whiten or estimator_traits(name).whiten, std_norm=std_norm)
    want = expected(rows)
    exact = estimate(name, inputs(batch), params, whiten=whiten, std_norm=std_norm).advantages_N
    torch.testing.assert_close(exact, want, rtol=1e-8, atol=1e-8)
    if std_norm and whiten is not None:
        return  # in float32 a whitened spread of rounding errors is noise
    single = estimate(name, inputs(batch, torch.float32), params, whiten=whiten, std_norm=std_norm).advantages_N
    torch.testing.assert_close(single.double(), want, rtol=1e-3, atol=1e-3)


@EXAMPLES
@given(
    seed=SEEDS,
    gamma=st.sampled_from([1.0, 0.9]),
    lambd=st.sampled_from([1.0, 0.95]),
    critic_lambd=st.sampled_from([None, 1.0, 0.8]),
    alpha=st.sampled_from([None, 0.05, 0.5]),
)
def test_vapos_lambdas_and_the_critics_targets(
    seed: int, gamma: float, lambd: float, critic_lambd: float | None, alpha: float | None
) -> None:
    batch = random_batch(seed, long=True)
    params = EstimatorParams(gamma=gamma, lambd=lambd, critic_lambd=critic_lambd, length_adaptive_alpha=alpha)
    found = estimate("gae", inputs(batch), params, whiten="none")
    advantages, returns = references.gae(batch, gamma, lambd, critic_lambd, alpha)
    torch.testing.assert_close(found.advantages_N, expected(advantages), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(found.returns_N, expected(returns), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ESTIMATORS)
@EXAMPLES
@given(seed=SEEDS)
def test_order_and_packing_do_not_matter(name: str, seed: int) -> None:
    batch = random_batch(seed)
    params = EstimatorParams(gamma=0.9, lambd=0.9)
    order = torch.randperm(len(batch), generator=torch.Generator().manual_seed(seed)).tolist()
    for s in {(s.group, s.sample) for s in batch}:  # branches of a rollout keep their order
        places = [place for place, i in enumerate(order) if (batch[i].group, batch[i].sample) == s]
        for place, i in zip(places, sorted(order[place] for place in places), strict=True):
            order[place] = i
    lengths = [len(s.actions) for s in batch]
    before = estimate(name, inputs(batch), params).advantages_N.split(lengths)
    after = estimate(name, select(inputs(batch), order, lengths), params).advantages_N
    torch.testing.assert_close(after, torch.cat([before[i] for i in order]), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@EXAMPLES
@given(seed=SEEDS)
def test_what_is_masked_changes_nothing(name: str, poison: float, seed: int) -> None:
    batch = random_batch(seed)
    params = EstimatorParams(gamma=0.9, lambd=0.9)
    clean = estimate(name, inputs(batch), params)
    poisoned = estimate(name, inputs(batch, poison=poison), params)
    assert torch.equal(clean.advantages_N, poisoned.advantages_N)
    assert torch.equal(clean.returns_N, poisoned.returns_N)


@pytest.mark.parametrize("name", ESTIMATORS)
@EXAMPLES
@given(seed=SEEDS)
def test_a_gap_equals_the_compacted_sequence(name: str, seed: int) -> None:
    batch = random_batch(seed)
    gapped = with_turns(inputs(batch), batch)
    mask = gapped.action_mask_N
    compact = evolve(
        gapped,
        lengths_S=torch.tensor([sum(s.actions) for s in batch]),
        **{
            field: getattr(gapped, field)[mask]
            for field in ("rewards_N", "token_rewards_N", "values_N", "action_mask_N", "turn_ids_N")
        },
    )
    params = EstimatorParams(gamma=0.9, lambd=0.8)
    found = estimate(name, gapped, params).advantages_N
    dense = estimate(name, compact, params).advantages_N
    torch.testing.assert_close(found[mask], dense, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ESTIMATORS)
@EXAMPLES
@given(seed=SEEDS, factor=st.sampled_from([0.1, 3.0]))
def test_scaled_rewards_scale_advantages_or_leave_them(name: str, seed: int, factor: float) -> None:
    batch = random_batch(seed)
    given_inputs = inputs(batch)
    zero = torch.zeros_like(given_inputs.rewards_N)
    plain = evolve(given_inputs, token_rewards_N=zero, values_N=zero)
    scaled = evolve(
        plain,
        rewards_N=plain.rewards_N * factor,
        baselines_S=None if plain.baselines_S is None else plain.baselines_S * factor,
        reward_parts_SK=None if plain.reward_parts_SK is None else plain.reward_parts_SK * factor,
    )
    before, after = (estimate(name, x, EstimatorParams(), whiten="none").advantages_N for x in (plain, scaled))
    scale_free = ("group_norm", "turn_group_norm", "maxrl", "gdpo")
    torch.testing.assert_close(after, before * (1.0 if name in scale_free else factor), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", [n for n in ESTIMATORS if "group" in estimator_traits(n).needs])
@EXAMPLES
@given(seed=SEEDS)
def test_what_all_of_a_group_got_teaches_nothing(name: str, seed: int) -> None:
    """Equal outcomes have no advantage; a constant added to them matters to maxrl alone, which divides by it."""
    if name == "gdpo":
        return  # its parts are apart from the reward
    rewards = [0.1 * (seed % 10)] * 4 + torch.rand(4, generator=torch.Generator().manual_seed(seed)).tolist()
    groups = [0] * 4 + [1] * 4
    found = estimate(name, one_token_each(rewards, groups), EstimatorParams(), whiten="none").advantages_N[1::2]
    assert found[:4].abs().max() < 1e-6
    if name != "maxrl":
        more = one_token_each([r + 2.0 for r in rewards], groups)
        shifted = estimate(name, more, EstimatorParams(), whiten="none").advantages_N[1::2]
        torch.testing.assert_close(shifted, found, rtol=1e-3, atol=1e-4)


def test_a_calibrated_critic_sees_no_advantage_across_a_gap() -> None:
    actions = [False, True, True, *[False] * 100, True, True]
    reward = [0.0] * (len(actions) - 1) + [0.5]
    zeros, values = [0.0] * len(actions), [0.5] * len(actions)
    given_inputs = inputs([Sequence(0, 0, reward, zeros, values, actions)])
    found = estimate("gae", given_inputs, EstimatorParams(lambd=0.95), whiten="none")
    assert found.advantages_N.abs().max() < 1e-12


def one_token_each(rewards: list[float], groups: list[int] | None = None) -> EstimatorInput:
    batch = [
        Sequence(0 if groups is None else groups[i], i, [0.0, r], [0.0, 0.0], [0.0, 0.0], [False, True])
        for i, r in enumerate(rewards)
    ]
    return inputs(batch, torch.float32)


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("dr_grpo", [0.75, -0.25, -0.25, -0.25]),
        ("rloo", [1, -1 / 3, -1 / 3, -1 / 3]),
        ("group_norm", [1.5, -0.5, -0.5, -0.5]),
    ],
)
def test_hand_computed_groups(name: str, wanted: list[float]) -> None:
    found = ESTIMATORS[name](one_token_each([1, 0, 0, 0]), EstimatorParams()).advantages_N[1::2]
    torch.testing.assert_close(found, torch.tensor(wanted, dtype=torch.float32), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", GROUP_ESTIMATORS)
@pytest.mark.parametrize("count", [1, 3, 6, 7])
@pytest.mark.parametrize("reward", [0.1, 1 / 3, -0.7])
def test_equal_rewards_teach_nothing(name: str, count: int, reward: float) -> None:
    found = ESTIMATORS[name](one_token_each([reward] * count), EstimatorParams()).advantages_N
    assert found.abs().max() < 1e-6


@EXAMPLES
@given(seed=SEEDS)
def test_rloo_is_dr_grpo_scaled(seed: int) -> None:
    rewards = torch.rand(5, generator=torch.Generator().manual_seed(seed)).tolist()
    rloo = ESTIMATORS["rloo"](one_token_each(rewards), EstimatorParams()).advantages_N
    dr_grpo = ESTIMATORS["dr_grpo"](one_token_each(rewards), EstimatorParams()).advantages_N
    torch.testing.assert_close(rloo, dr_grpo * 5 / 4, rtol=1e-5, atol=1e-6)


@EXAMPLES
@given(seed=SEEDS, scale=st.floats(0.1, 10), shift=st.floats(-5, 5))
def test_group_norm_ignores_scale_and_shift(seed: int, scale: float, shift: float) -> None:
    rewards = torch.rand(5, generator=torch.Generator().manual_seed(seed)).tolist()
    plain = ESTIMATORS["group_norm"](one_token_each(rewards), EstimatorParams()).advantages_N
    moved = ESTIMATORS["group_norm"](one_token_each([r * scale + shift for r in rewards]), EstimatorParams())
    torch.testing.assert_close(plain, moved.advantages_N, rtol=1e-2, atol=1e-3)


def test_gae_without_a_critic_is_refused() -> None:
    with pytest.raises(ValueError, match="values_N"):
        ESTIMATORS["gae"](evolve(one_token_each([1.0]), values_N=None), EstimatorParams())


@pytest.mark.parametrize("discount", [0.0, 0.5, 0.99, 1.0])
@pytest.mark.parametrize("lengths", [[0], [1], [63], [64], [65], [0, 64, 0, 129, 1], [4097, 3, 0, 200], [5000]])
def test_the_scan_equals_a_loop(discount: float, lengths: list[int]) -> None:
    x = torch.randn(sum(lengths), dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    wanted, start = [], 0
    for length in lengths:
        running, row = 0.0, []
        for value in reversed(x[start : start + length].tolist()):
            running = value + discount * running
            row.append(running)
        wanted += row[::-1]
        start += length
    found = reverse_discounted_sum(x, torch.tensor(lengths), discount)
    torch.testing.assert_close(found, torch.tensor(wanted, dtype=torch.float64), rtol=1e-10, atol=1e-10)
