"""The loss at the most uncertain tokens alone, against the paper's definition."""

import math
from typing import Any

import pytest
import torch
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rollgrad.domain.algorithms.losses.high_entropy import high_entropy_tokens
from rollgrad.domain.algorithms.losses.objectives import PolicyLossObjective
from rollgrad.domain.batches.packed import RolloutBatch
from rollgrad.domain.ports.models import TokenScores
from tests.unit.domain import references

POLICY = PolicyLossObjective(kl_coef=0.1, kl_estimator="k2", entropy_coef=0.01, positive_nll_coef=0.1)


@settings(max_examples=100, deadline=None)
@given(
    entropies=st.lists(
        st.integers(0, 12_000).map(lambda n: n / 1000) | st.sampled_from([0.0, 0.5, 1.0]), min_size=1, max_size=30
    ),
    share=st.sampled_from([0.1, 0.2, 0.3, 0.5, 0.9, 1.0]),
    data=st.data(),
    poison=st.sampled_from([math.nan, math.inf, -math.inf, 99.0]),
)
def test_the_chosen_tokens_are_those_of_the_definition(
    entropies: list[float], share: float, data: st.DataObject, poison: float
) -> None:
    """In any order, whatever stands at places that are no actions; and those of the quantile of torch."""
    actions = data.draw(st.lists(st.booleans(), min_size=len(entropies), max_size=len(entropies)))
    order = torch.tensor(data.draw(st.permutations(range(len(entropies)))))
    mask_N = torch.tensor(actions)
    entropies_N = torch.where(mask_N, torch.tensor(entropies, dtype=torch.float64), poison)
    wanted = torch.tensor(references.high_entropy(entropies, actions, share))
    found = high_entropy_tokens(entropies_N, mask_N, share)
    assert torch.equal(found, wanted)
    assert torch.equal(high_entropy_tokens(entropies_N[order], mask_N[order], share), wanted[order])
    if mask_N.any():
        assert found.sum() >= max(1, math.floor(share * int(mask_N.sum())))
        assert torch.equal(high_entropy_tokens(entropies_N, mask_N, 1.0), mask_N)


def test_shares_by_hand() -> None:
    """The quantile 0.7 of eleven tokens is that of the eighth: rounding takes none of them away."""
    entropies_N, everywhere = torch.arange(11.0), torch.ones(11, dtype=torch.bool)
    chosen = {s: int(high_entropy_tokens(entropies_N, everywhere, s).sum()) for s in (0.1, 0.2, 0.3, 0.7, 0.75, 0.9)}
    assert chosen == {0.1: 2, 0.2: 3, 0.3: 4, 0.7: 8, 0.75: 8, 0.9: 10}
    alike = torch.tensor([1.0, 2.0, 2.0, 2.0, 0.5])
    assert high_entropy_tokens(alike, torch.ones(5, dtype=torch.bool), 0.2).tolist() == [False, True, True, True, False]
    rounded = alike + torch.tensor([0.0, 0.0, 2e-7, 4e-7, 0.0])
    assert torch.equal(high_entropy_tokens(rounded, everywhere[:5], 0.2), alike == 2.0)


def batch_of(learned: list[bool] | None) -> RolloutBatch:
    """Two sequences of four tokens, the first of which each is no action."""
    mask_N = torch.tensor([False, True, True, True] * 2)
    generator = torch.Generator().manual_seed(0)

    def column() -> Tensor:
        return torch.where(mask_N, -torch.rand(8, generator=generator), 0.0)

    return RolloutBatch(
        tokens_N=torch.arange(8),
        action_mask_N=mask_N,
        turn_ids_N=torch.where(mask_N, 0, -1),
        rewards_N=torch.zeros(8),
        rollout_logprobs_N=column(),
        versions_N=torch.zeros(8, dtype=torch.int32),
        lengths_S=torch.tensor([4, 4]),
        prompt_lengths_S=torch.tensor([1, 1]),
        group_ids_S=torch.tensor([0, 0]),
        sample_ids_S=torch.tensor([0, 1]),
        scores_S=torch.ones(2),
        truncated_S=torch.zeros(2, dtype=torch.bool),
        old_logprobs_N=column(),
        ref_logprobs_N=column(),
        advantages_N=torch.where(mask_N, 1.5, 0.0),
        loss_weights_N=mask_N / 6,
        positive_weights_N=mask_N / 6,
        learned_N=None if learned is None else torch.tensor(learned),
    )


def gradient(objective: PolicyLossObjective, batch: RolloutBatch, **scores: Any) -> tuple[Tensor, dict[str, Any]]:
    leaf = (batch.filled("old_logprobs_N") - 0.05).requires_grad_()
    output = objective(TokenScores(logprobs_N=leaf, entropy_N=-leaf, **scores), batch)
    return torch.autograd.grad(output.loss, leaf)[0], dict(output.metrics)


def test_the_policy_loss_counts_at_chosen_tokens_and_what_is_added_to_it_at_all() -> None:
    """Weights stay those of all tokens: the sum over two parts of the tokens is the loss of all."""
    chosen = [False, True, False, False, False, True, True, False]
    of_all, _ = gradient(POLICY, batch_of(None))
    found, metrics = gradient(POLICY, batch_of(chosen))
    others, _ = gradient(POLICY, batch_of([not each for each in chosen]))
    rest, _ = gradient(POLICY, evolve(batch_of(None), advantages_N=torch.zeros(8)))
    assert metrics["high_entropy_share"] == pytest.approx(3 / 6)
    chosen_N = torch.tensor(chosen)
    torch.testing.assert_close(found, torch.where(chosen_N, of_all, rest))
    torch.testing.assert_close(found + others, of_all + rest)
    assert (of_all - rest)[batch_of(None).action_mask_N].abs().min() > 0.1


def test_score_centering_takes_nothing_out_where_nothing_is_learned() -> None:
    objective = PolicyLossObjective(loss="policy_gradient", centred=True)
    chosen_N = torch.tensor([False, True, False, False] * 2)
    batch = evolve(
        batch_of(chosen_N.tolist()),
        sampler_ids_NK=torch.zeros(8, 1, dtype=torch.int32),
        sampler_logprobs_NK=torch.full((8, 1), -1.0),
    )
    mean_N = torch.ones(8, requires_grad=True)
    more = {"residual_N": torch.zeros(8), "policy_mass_N": torch.ones(8)}
    scores = TokenScores(logprobs_N=torch.full((8,), -1.0), entropy_N=torch.ones(8), mean_score_N=mean_N, **more)
    (found,) = torch.autograd.grad(objective(scores, batch).loss, mean_N)
    torch.testing.assert_close(found, torch.where(chosen_N, 1.5 / 6, 0.0))


@pytest.mark.parametrize("estimator", ["k2", "full"])
def test_a_reference_that_does_not_teach_a_rollout_pulls_it_nowhere(estimator: str) -> None:
    objective = PolicyLossObjective(kl_coef=0.5, kl_estimator=estimator)
    base = evolve(batch_of(None), advantages_N=torch.zeros(8))
    scores = {"divergence_N": torch.full((8,), 3.0)}
    kept = {
        taught: gradient(objective, evolve(base, taught_S=taught_S), **scores)
        for taught, taught_S in (("all", None), ("first", torch.tensor([True, False])))
    }
    first_N = torch.arange(8) < 4
    torch.testing.assert_close(kept["first"][0], torch.where(first_N, kept["all"][0], 0.0))
    if estimator == "full":
        assert float(kept["first"][1]["ref_kl"]) == pytest.approx(3.0 / 2)
