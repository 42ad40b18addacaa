"""Off-policy corrections: every triple against a loop, the named ones by hand."""

import itertools
import math
import random

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rollgrad.domain.algorithms import settings as algorithm
from rollgrad.domain.algorithms.losses.corrections import (
    correction_weights,
    interpolated_proximal,
    within_second_moment,
)
from tests.unit.domain import references
from tests.unit.domain.references import CorrectionSettings, Tokens


@attrs.define(kw_only=True)
class Correction(algorithm.CorrectionSettings):
    """With the level resolved, as in a run, and whether the ratio of the loss is against the sampler already."""

    level: str = "token"
    bypass: bool = False


LEVELS = ["token", "sequence", "geometric"]
TRIPLES = list(
    itertools.product(LEVELS, ["truncate", "clip", "mask"], ["ratio", "binary_kl", "tv", "opsm"], [False, True])
)
EXAMPLES = settings(max_examples=12, deadline=None)
SEEDS = st.integers(0, 10**6)


def random_tokens(seed: int) -> Tokens:
    """Ragged sequences with masked places between; samplers close by and far off."""
    rng = random.Random(seed)
    sequence = [s for s in range(rng.randint(1, 4)) for _ in range(rng.randint(1, 5))]
    actions = [rng.random() < 0.8 for _ in sequence]
    old = [-rng.expovariate(1.0) - 0.01 if a else 0.0 for a in actions]
    spread = rng.choice([0.05, 0.5, 3.0, 30.0])
    return Tokens(
        logprobs=[min(-1e-3, x + rng.gauss(0, spread)) if a else 0.0 for x, a in zip(old, actions, strict=True)],
        old=old,
        advantages=[rng.gauss(0, 1) if a else 0.0 for a in actions],
        actions=actions,
        sequence=sequence,
        selected=[False] * len(actions),
    )


def weigh(
    correction: Correction, tokens: Tokens, dtype: torch.dtype = torch.float64, poison: float | None = None
) -> Tensor:
    mask = torch.tensor(tokens.actions)
    columns = [torch.tensor(x, dtype=dtype) for x in (tokens.logprobs, tokens.old, tokens.advantages)]
    if poison is not None:
        columns = [torch.where(mask, x, poison) for x in columns]
    return correction_weights(
        correction,
        logprobs_N=columns[0],
        rollout_logprobs_N=columns[1],
        advantages_N=columns[2],
        action_mask_N=mask,
        sequence_N=torch.tensor(tokens.sequence),
        sequences=tokens.sequences,
        bypass=correction.bypass,
    )


def of_ratios(ratios: list[float], advantages: list[float] | None = None) -> Tokens:
    """One sequence of tokens with these pi / mu, mu = exp(-9)."""
    n = len(ratios)
    return Tokens(
        [math.log(r) - 9 for r in ratios], [-9.0] * n, advantages or [1.0] * n, [True] * n, [0] * n, [False] * n
    )


def settings_of(correction: Correction) -> CorrectionSettings:
    return CorrectionSettings(**attrs.asdict(correction))


@pytest.mark.parametrize(("level", "mode", "gate", "bypass"), TRIPLES)
@settings(max_examples=15, deadline=None)
@given(
    seed=SEEDS,
    bounds=st.sampled_from([(0.5, 2.0), (0.0, 1.0), (0.999, 1.002)]),
    threshold=st.sampled_from([0.0, 5e-3, 0.2]),
)
def test_every_triple_equals_the_reference(
    level: str, mode: str, gate: str, bypass: bool, seed: int, bounds: tuple[float, float], threshold: float
) -> None:
    tokens = random_tokens(seed)
    correction = Correction(
        level=level, mode=mode, gate=gate, low=bounds[0], high=bounds[1], threshold=threshold, bypass=bypass
    )
    found = weigh(correction, tokens).double()
    wanted = [references.correction_weight(settings_of(correction), t, tokens) for t in range(len(tokens.actions))]
    torch.testing.assert_close(found, torch.tensor(wanted, dtype=torch.float64), rtol=1e-10, atol=1e-12)
    if bypass:
        assert set(found.tolist()) <= {0.0, 1.0}
        full = weigh(attrs.evolve(correction, bypass=False), tokens)
        if mode != "clip" or bounds[0] > 0:
            assert torch.equal(full > 0, found > 0)


@pytest.mark.parametrize(("level", "mode", "gate", "bypass"), TRIPLES)
@settings(max_examples=5, deadline=None)
@given(seed=SEEDS)
def test_equal_logprobs_weigh_one(level: str, mode: str, gate: str, bypass: bool, seed: int) -> None:
    tokens = random_tokens(seed)
    same = attrs.evolve(tokens, logprobs=list(tokens.old))
    for low, high, threshold in ((0.5, 2.0, 5e-3), (1.0, 1.0, 0.0)):
        correction = Correction(
            level=level, mode=mode, gate=gate, low=low, high=high, threshold=threshold, bypass=bypass
        )
        for dtype in (torch.float32, torch.float64):
            assert weigh(correction, same, dtype).tolist() == [float(a) for a in tokens.actions]


@pytest.mark.parametrize(("level", "mode", "gate", "bypass"), TRIPLES)
@settings(max_examples=5, deadline=None)
@given(seed=SEEDS, poison=st.sampled_from([float("nan"), float("inf"), float("-inf")]))
def test_masked_and_extreme_inputs_stay_finite(
    level: str, mode: str, gate: str, bypass: bool, seed: int, poison: float
) -> None:
    tokens, rng = random_tokens(seed), random.Random(seed)
    correction = Correction(
        level=level, mode=mode, gate=gate, high=1e9, threshold=rng.choice([5e-3, 1e9]), bypass=bypass
    )
    assert torch.equal(weigh(correction, tokens), weigh(correction, tokens, poison=poison))
    for t, action in enumerate(tokens.actions):
        if action:
            tokens.logprobs[t], tokens.old[t] = rng.choice(
                [(0.0, -1e4), (-1e4, 0.0), (-1e4, -1e4), (0.0, 0.0), (-0.1, -math.inf), (1e4, 0.0)]
            )
    found = weigh(correction, tokens, torch.float32, poison)
    assert found.isfinite().all()
    assert found.min() >= 0
    assert found[~torch.tensor(tokens.actions)].count_nonzero() == 0


@pytest.mark.parametrize(
    ("correction", "wanted"),
    [
        (Correction(level="token", mode="truncate"), [0.2, 1.0, 2.0]),
        (Correction(level="token", mode="clip"), [0.5, 1.0, 2.0]),
        (Correction(level="token", mode="mask"), [0.0, 1.0, 0.0]),
        (Correction(level="token", mode="mask", low=0.1, high=6.0), [0.2, 1.0, 5.0]),
        (Correction(level="token", mode="mask", bypass=True), [0.0, 1.0, 0.0]),
        (Correction(level="token", mode="truncate", bypass=True), [1.0, 1.0, 1.0]),
    ],
    ids=["tis", "tis_two_sided", "icepop", "icepop_wide", "icepop_bypass", "tis_bypass"],
)
def test_tis_and_icepop_by_hand(correction: Correction, wanted: list[float]) -> None:
    torch.testing.assert_close(
        weigh(correction, of_ratios([0.2, 1.0, 5.0])).double(),
        torch.tensor(wanted, dtype=torch.float64),
        rtol=1e-9,
        atol=1e-12,
    )


@pytest.mark.parametrize(
    ("level", "ratios", "wanted"),
    [
        ("geometric", [0.5, 3.0], [0.5, 3.0]),
        ("geometric", [5.0, 3.0], [0.0, 0.0]),
        ("geometric", [0.1, 0.9], [0.0, 0.0]),
        ("sequence", [0.5, 3.0], [0.5, 3.0]),
        ("sequence", [1.5, 1.5], [0.0, 0.0]),
    ],
)
def test_sequence_masks_by_hand(level: str, ratios: list[float], wanted: list[float]) -> None:
    found = weigh(Correction(level=level, mode="mask"), of_ratios(ratios))
    torch.testing.assert_close(found, torch.tensor(wanted, dtype=torch.float64), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("level", "wanted"), [("sequence", 2.0), ("geometric", 1.5)])
def test_truncated_sequence_ratios_by_hand(level: str, wanted: float) -> None:
    found = weigh(Correction(level=level), of_ratios([1.5, 1.5]))
    torch.testing.assert_close(found, torch.full((2,), wanted, dtype=torch.float64), rtol=1e-9, atol=0)


@pytest.mark.parametrize(
    ("ratios", "advantages", "wanted"),
    [
        ([0.5, 0.5], [-1.0, 1.0], [0.0, 0.5]),
        ([2.0, 2.0], [-1.0, -1.0], [2.0, 2.0]),
        ([0.5, 2.0], [-1.0, -1.0], [0.5, 2.0]),
        ([0.5, 1.0], [-1.0, 0.0], [0.0, 1.0]),
    ],
)
def test_opsm_by_hand(ratios: list[float], advantages: list[float], wanted: list[float]) -> None:
    correction = Correction(level="sequence", mode="mask", gate="opsm", threshold=0.1)
    found = weigh(correction, of_ratios(ratios, advantages))
    torch.testing.assert_close(found, torch.tensor(wanted, dtype=torch.float64), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("gate", "threshold"), [("tv", 0.15), ("binary_kl", 0.05)])
def test_divergence_gates_by_hand(gate: str, threshold: float) -> None:
    tokens = attrs.evolve(
        of_ratios([1.0] * 3), old=[math.log(0.5)] * 3, logprobs=[math.log(p) for p in (0.5, 0.6, 0.9)]
    )
    found = weigh(Correction(mode="mask", gate=gate, threshold=threshold), tokens)
    torch.testing.assert_close(found, torch.tensor([1.0, 1.2, 0.0], dtype=torch.float64), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("correction", "option"),
    [(Correction(level="odd"), "level"), (Correction(mode="odd"), "mode"), (Correction(gate="odd"), "gate")],
)
def test_unknown_options_are_named(correction: Correction, option: str) -> None:
    with pytest.raises(ValueError, match=f"{option} 'odd'"):
        weigh(correction, of_ratios([1.0]))


def test_weights_are_constants_to_the_gradient() -> None:
    leaf = torch.tensor([-1.0], requires_grad=True)
    found = correction_weights(
        Correction(),
        logprobs_N=leaf,
        rollout_logprobs_N=torch.tensor([-1.2]),
        advantages_N=torch.ones(1),
        action_mask_N=torch.ones(1, dtype=torch.bool),
        sequence_N=torch.zeros(1, dtype=torch.int64),
        sequences=1,
    )
    assert not found.requires_grad


@EXAMPLES
@given(seed=SEEDS, current=st.integers(0, 100))
def test_the_interpolated_proximal_policy(seed: int, current: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    new, old = -torch.rand(2, 8, generator=generator, dtype=torch.float64) * 5

    def at(age: int) -> Tensor:
        versions = torch.full((8,), current - age, dtype=torch.int32)
        return interpolated_proximal(new.requires_grad_(), old, versions, current)

    assert not at(3).requires_grad
    for fresh in (-2, 0, 1):
        assert torch.equal(at(fresh), old)
    torch.testing.assert_close(at(2), (new.detach() + old) / 2)
    torch.testing.assert_close(at(3), (2 * new.detach() + old) / 3)
    distances = [(at(age) - new.detach()).abs() for age in range(1, 8)]
    assert all((later <= sooner).all() for sooner, later in itertools.pairwise(distances))
    for age in range(1, 8):
        assert ((at(age) - old) * (new.detach() - old) >= 0).all()


@EXAMPLES
@given(seed=SEEDS, threshold=st.sampled_from([1e-4, 0.04, 1.0]), poison=st.sampled_from([0.0, math.nan, math.inf]))
def test_the_second_moment_leaves_out_what_is_furthest_off(seed: int, threshold: float, poison: float) -> None:
    """Neither the order of tokens matters, nor what stands at those that are no actions."""
    tokens = random_tokens(seed)
    wanted = torch.tensor(references.kept_by_second_moment(tokens, threshold))
    mask = torch.tensor(tokens.actions)
    new, base = (torch.where(mask, torch.tensor(x), poison) for x in (tokens.logprobs, tokens.old))
    assert torch.equal(within_second_moment(new, base, mask, threshold), wanted)
    order = torch.randperm(len(mask), generator=torch.Generator().manual_seed(seed))
    assert torch.equal(within_second_moment(new[order], base[order], mask[order], threshold), wanted[order])


def test_the_second_moment_by_hand() -> None:
    """Squares of 0.01, 0.04, 0.09 and 4: their mean is 1.035, without the last 0.0467, without the last two 0.025."""
    apart = torch.tensor([2.0, 0.1, -0.3, 0.2])
    mask = torch.ones(4, dtype=torch.bool)
    kept = {
        threshold: within_second_moment(apart - 5, torch.full((4,), -5.0), mask, threshold).tolist()
        for threshold in (2.0, 0.05, 0.04, 0.001)
    }
    assert kept == {
        2.0: [True, True, True, True],
        0.05: [False, True, True, True],
        0.04: [False, True, False, True],
        0.001: [False, False, False, False],
    }


@pytest.mark.parametrize(("threshold", "kept"), [(1.25, [True, True]), (0.25, [False, True]), (0.2499, [False, False])])
def test_a_second_moment_may_be_as_large_as_the_threshold(threshold: float, kept: list[bool]) -> None:
    """Squares of 2.25 and 0.25, whose means no rounding changes."""
    mask = torch.ones(2, dtype=torch.bool)
    assert within_second_moment(torch.tensor([-3.5, -4.5]), torch.tensor([-5.0] * 2), mask, threshold).tolist() == kept


def test_one_token_after_one_text_stays_or_goes_in_all_samples() -> None:
    """Its log-prob is rounded in another place in each pass."""
    new = torch.tensor([-5.1, -4.0, -3.9999998, -3.9999995])
    mask = torch.ones(4, dtype=torch.bool)
    kept = within_second_moment(new, torch.full((4,), -5.0), mask, 0.6)
    assert kept.tolist() == [True, False, False, False]


@pytest.mark.parametrize("mode", ["truncate", "clip", "mask"])
def test_what_the_second_moment_leaves_out_weighs_nothing(mode: str) -> None:
    tokens = of_ratios([0.2, 1.0, 5.0])
    correction = Correction(mode=mode, gate="second_moment")
    columns = [torch.tensor(x) for x in (tokens.logprobs, tokens.old, tokens.advantages)]
    given_to = {
        "logprobs_N": columns[0],
        "rollout_logprobs_N": columns[1],
        "advantages_N": columns[2],
        "action_mask_N": torch.ones(3, dtype=torch.bool),
        "sequence_N": torch.zeros(3, dtype=torch.int64),
        "sequences": 1,
    }
    found = correction_weights(correction, kept_N=torch.tensor([False, True, True]), **given_to)
    assert found.tolist() == pytest.approx([0.0, 1.0, 5.0 if mode == "mask" else 2.0], rel=1e-5)
    with pytest.raises(ValueError, match="kept_N"):
        correction_weights(correction, **given_to)
