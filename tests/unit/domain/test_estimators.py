"""Estimators against references written from the papers, and the invariances the design promises."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rollgrad.domain.estimators import ESTIMATORS, EstimatorInput, EstimatorParams
from rollgrad.domain.estimators.scan import reverse_discounted_sum
from tests.unit.domain import references
from tests.unit.domain.references import Sequence, random_batch

GROUP_ESTIMATORS = ["reinforce_baseline", "rloo", "group_norm", "dr_grpo"]
EXAMPLES = settings(max_examples=40, deadline=None)
SEEDS = st.integers(0, 10**6)


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
    )


def expected(rows: list[list[float | None]]) -> Tensor:
    return torch.tensor([0.0 if x is None else x for row in rows for x in row], dtype=torch.float64)


@pytest.mark.parametrize("name", ESTIMATORS)
@EXAMPLES
@given(
    seed=SEEDS,
    long=st.booleans(),
    gamma=st.sampled_from([1.0, 0.99, 0.5]),
    lambd=st.sampled_from([1.0, 0.95, 0.0]),
    std_norm=st.booleans(),
)
def test_equals_the_reference(name: str, seed: int, long: bool, gamma: float, lambd: float, std_norm: bool) -> None:
    batch = random_batch(seed, long=long)
    params = EstimatorParams(gamma=gamma, lambd=lambd, std_norm=std_norm)
    want = expected(references.estimate(name, batch, gamma, lambd, std_norm))
    exact = ESTIMATORS[name](inputs(batch), params).advantages_N
    torch.testing.assert_close(exact, want, rtol=1e-9, atol=1e-9)
    single = ESTIMATORS[name](inputs(batch, torch.float32), params).advantages_N
    torch.testing.assert_close(single.double(), want, rtol=1e-3, atol=1e-3)


@EXAMPLES
@given(seed=SEEDS, gamma=st.sampled_from([1.0, 0.9]), lambd=st.sampled_from([1.0, 0.95]))
def test_returns_are_the_critics_targets(seed: int, gamma: float, lambd: float) -> None:
    batch = random_batch(seed)
    found = ESTIMATORS["gae"](inputs(batch), EstimatorParams(gamma=gamma, lambd=lambd)).returns_N
    torch.testing.assert_close(found, expected(references.gae(batch, gamma, lambd)[1]), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ESTIMATORS)
@EXAMPLES
@given(seed=SEEDS)
def test_order_and_packing_do_not_matter(name: str, seed: int) -> None:
    batch = random_batch(seed)
    params = EstimatorParams(gamma=0.9 if name in ("gae", "reinforce") else 1.0, lambd=0.9)
    order = torch.randperm(len(batch), generator=torch.Generator().manual_seed(seed)).tolist()
    lengths = [len(s.actions) for s in batch]
    before = ESTIMATORS[name](inputs(batch), params).advantages_N.split(lengths)
    after = ESTIMATORS[name](inputs([batch[i] for i in order]), params).advantages_N
    torch.testing.assert_close(after, torch.cat([before[i] for i in order]), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@EXAMPLES
@given(seed=SEEDS)
def test_what_is_masked_changes_nothing(name: str, poison: float, seed: int) -> None:
    batch = random_batch(seed)
    params = EstimatorParams(gamma=0.9, lambd=0.9)
    clean = ESTIMATORS[name](inputs(batch), params)
    poisoned = ESTIMATORS[name](inputs(batch, poison=poison), params)
    assert torch.equal(clean.advantages_N, poisoned.advantages_N)
    assert torch.equal(clean.returns_N, poisoned.returns_N)


@pytest.mark.parametrize("name", ESTIMATORS)
@EXAMPLES
@given(seed=SEEDS)
def test_a_gap_equals_the_compacted_sequence(name: str, seed: int) -> None:
    batch = random_batch(seed)
    compact = [
        Sequence(
            s.group,
            s.sample,
            *([x for x, a in zip(column, s.actions, strict=True) if a] for column in (s.rewards, s.extras, s.values)),
            [True] * sum(s.actions),
        )
        for s in batch
    ]
    params = EstimatorParams(gamma=0.9, lambd=0.8)
    gapped = ESTIMATORS[name](inputs(batch), params).advantages_N
    dense = ESTIMATORS[name](inputs(compact), params).advantages_N
    torch.testing.assert_close(gapped[flat(batch, "actions", torch.bool)], dense, rtol=1e-12, atol=1e-12)


def test_a_calibrated_critic_sees_no_advantage_across_a_gap() -> None:
    actions = [False, True, True, *[False] * 100, True, True]
    reward = [0.0] * (len(actions) - 1) + [0.5]
    zeros, values = [0.0] * len(actions), [0.5] * len(actions)
    given_inputs = inputs([Sequence(0, 0, reward, zeros, values, actions)])
    found = ESTIMATORS["gae"](given_inputs, EstimatorParams(lambd=0.95, std_norm=False))
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
    from attrs import evolve

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
