"""Losses that compare replies by rank against the cheapest of all assignments, whatever the split."""

import math
from itertools import permutations

import pytest
import torch
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rollgrad.domain.algorithms.losses.preference import PreferenceObjective
from rollgrad.domain.algorithms.losses.transport import with_opposites
from rollgrad.domain.algorithms.preference_settings import PreferenceSettings
from rollgrad.domain.batches.examples import ExampleBatch
from rollgrad.domain.errors import DataError
from tests.unit.domain.test_preference import (
    BETA,
    EXAMPLES,
    RANKED,
    SEEDS,
    SMOOTHING,
    batch_of,
    objective_of,
    output,
    random_pairs,
)


def by_transport(name: str, batch: ExampleBatch, theta_N: Tensor) -> Tensor:
    """The loss by its definition: the pairs of numbers whose squared distances have the least sum, over all
    assignments; differentiable."""
    assert batch.ref_logprobs_N is not None
    own_P2, reference_P2 = (
        torch.stack([part[mask].sum() for part, mask in zip(
            values_N.split(batch.lengths_S.tolist()),
            batch.action_mask_N.split(batch.lengths_S.tolist()), strict=True)]).view(-1, 2)
        for values_N in (theta_N, batch.ref_logprobs_N)
    )  # fmt: skip
    if name == "aot":
        first_P, second_P = (values_P2[:, 0] - values_P2[:, 1] for values_P2 in (own_P2, reference_P2))
    else:
        first_P, second_P = (own_P2 - reference_P2).unbind(1)
    ways = [list(way) for way in permutations(range(len(first_P)))]
    cheapest = min(ways, key=lambda way: float((first_P - second_P[way]).detach().square().sum()))
    x_P = BETA * (first_P - second_P[cheapest])
    return -((1 - SMOOTHING) * x_P.sigmoid().log() + SMOOTHING * (-x_P).sigmoid().log()).mean()


@pytest.mark.parametrize("name", sorted(RANKED))
@EXAMPLES
@given(seed=SEEDS, parts=st.integers(1, 4))
def test_equal_ranks_are_compared_however_the_step_is_divided(name: str, seed: int, parts: int) -> None:
    pairs = [evolve(pair, weight=2.0) for pair in random_pairs(seed)]
    batch, theta_N = batch_of(pairs, seed)
    objective = objective_of(name)
    with pytest.raises(ValueError, match="opposites_S2"):
        output(objective, theta_N, batch)
    batch = with_opposites(batch, theta_N, objective.settings)
    leaf = theta_N.clone().requires_grad_()
    wanted = by_transport(name, batch, leaf)
    (slope,) = torch.autograd.grad(wanted, leaf)
    whole, gradient, metrics = output(objective, theta_N, batch)
    assert whole == pytest.approx(float(wanted.detach()), rel=1e-6)  # weights are float32
    assert metrics[f"{name}_loss"] == pytest.approx(whole)
    torch.testing.assert_close(gradient, slope, rtol=1e-6, atol=1e-12)
    order = torch.randperm(len(pairs), generator=torch.Generator().manual_seed(seed))
    summed, total = torch.zeros_like(gradient), 0.0
    for part in order.tensor_split(min(parts, len(pairs))):
        sequences = torch.isin(batch.group_ids_S, part).nonzero()[:, 0].flip(0)  # the rejected reply first
        index = batch.token_index(sequences)
        loss, of_part, _ = output(objective, theta_N[index], batch.select(sequences))
        summed[index] += of_part
        total += loss
    torch.testing.assert_close(summed, gradient, rtol=1e-12, atol=1e-15)
    assert total == pytest.approx(whole, rel=1e-12)


def test_a_step_of_one_pair_is_dpo() -> None:
    pairs = random_pairs(3)[:1]
    batch, theta_N = batch_of(pairs, 3)
    losses = []
    for name in ("sigmoid", *sorted(RANKED)):
        objective = objective_of(name)
        losses.append(output(objective, theta_N, with_opposites(batch, theta_N, objective.settings))[:2])
    for loss, gradient in losses[1:]:
        assert loss == pytest.approx(losses[0][0], rel=1e-12)
        torch.testing.assert_close(gradient, losses[0][1])


def test_pairs_of_different_weights_have_no_common_ranks() -> None:
    pairs = [evolve(pair, weight=float(1 + place)) for place, pair in enumerate(random_pairs(7))]
    assert len(pairs) > 1
    batch, theta_N = batch_of(pairs, 7)
    with pytest.raises(DataError, match=r"leave the column weight out, or change --dpo\.loss"):
        with_opposites(batch, theta_N, PreferenceSettings(loss=("aot",)))


def test_a_policy_that_is_its_reference_has_the_known_loss() -> None:
    batch, _ = batch_of([evolve(pair, weight=1.0) for pair in random_pairs(5)], 5)
    assert batch.ref_logprobs_N is not None
    objective = PreferenceObjective(settings=PreferenceSettings(loss=("aot",)))
    batch = with_opposites(batch, batch.ref_logprobs_N, objective.settings)
    loss, _, _ = output(objective, batch.ref_logprobs_N, batch)
    assert loss == pytest.approx(math.log(2), rel=1e-6)
