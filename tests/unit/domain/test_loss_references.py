"""Policy losses, their gradients and the corrections equal float64 loops written from the papers."""

import math

import pytest
import torch
from attrs import frozen
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rollgrad.domain.catalogue import POLICY_LOSSES, policy_loss_traits
from rollgrad.domain.losses import POLICY_LOSSES as FUNCTIONS
from rollgrad.domain.losses.corrections import Correction, correction_weights, interpolated_proximal
from rollgrad.domain.losses.kl import kl_estimate
from rollgrad.domain.losses.registry import PolicyLossInput, PolicyLossParams
from rollgrad.domain.losses.selection import clip_cov_tokens, kl_cov_tokens, token_keys
from tests.unit.domain import loss_references as references

EXAMPLES = settings(max_examples=25, deadline=None)
SEEDS = st.integers(0, 10**6)
LEVELS, MODES, GATES = (
    ("token", "sequence", "geometric"),
    ("truncate", "clip", "mask"),
    ("ratio", "binary_kl", "tv", "opsm"),
)


@frozen(eq=False)
class Batch:
    """Sequences of action and other tokens, with random numbers for all that a loss reads."""

    mask_N: Tensor
    sequence_N: Tensor
    lengths: list[int]
    new_N: Tensor
    old_N: Tensor
    advantages_N: Tensor
    weights_N: Tensor
    selected_N: Tensor

    def rows(self, values_N: Tensor) -> list[list[float]]:
        """Each sequence's action tokens."""
        parts = zip(values_N.split(self.lengths), self.mask_N.split(self.lengths), strict=True)
        return [part[mask].tolist() for part, mask in parts]

    def flat(self, rows: list[list[float]]) -> Tensor:
        """Back to tokens, 0 elsewhere."""
        values_N = torch.zeros(len(self.mask_N), dtype=torch.float64)
        values_N[self.mask_N] = torch.tensor([x for row in rows for x in row], dtype=torch.float64)
        return values_N


def make(seed: int, spread: float = 0.4) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    lengths = (torch.randint(1, 9, (4,), generator=generator) + 1).tolist()
    total = sum(lengths)
    sequence_N = torch.repeat_interleave(torch.arange(4), torch.tensor(lengths))
    mask_N = torch.rand(total, generator=generator) < 0.7
    mask_N[torch.tensor(lengths).cumsum(0) - 1] = True

    def noise(scale: float) -> Tensor:
        return scale * torch.randn(total, generator=generator, dtype=torch.float64)

    new_N = (-1.5 + noise(0.6)).clamp(max=-0.05)
    old_N = (new_N + noise(spread)).clamp(max=-0.05)
    zero_N = torch.zeros(total, dtype=torch.float64)
    return Batch(
        mask_N,
        sequence_N,
        lengths,
        *(torch.where(mask_N, x, zero_N) for x in (new_N, old_N, noise(1.0), noise(1.0).abs())),
        (torch.rand(total, generator=generator) < 0.3) & mask_N,
    )


def run(name: str, batch: Batch) -> tuple[Tensor, Tensor]:
    """(token losses, gradient of their weighted sum at the log-probs)."""
    low, high = policy_loss_traits(name).clip or (0.0, 0.0)
    leaf = batch.new_N.clone().requires_grad_()
    found = FUNCTIONS[name](
        PolicyLossInput(
            logprobs_N=leaf,
            old_logprobs_N=batch.old_N,
            advantages_N=batch.advantages_N,
            action_mask_N=batch.mask_N,
            sequence_N=batch.sequence_N,
            sequences=len(batch.lengths),
            selected_N=batch.selected_N,
        ),
        PolicyLossParams(clip_low=low, clip_high=high),
    )
    loss_N = torch.where(batch.mask_N, found.loss_N, 0.0)
    (gradient_N,) = torch.autograd.grad((loss_N * batch.weights_N).sum(), leaf)
    return loss_N.detach(), gradient_N


@pytest.mark.parametrize("name", POLICY_LOSSES)
@EXAMPLES
@given(seed=SEEDS)
def test_losses_and_gradients_equal_the_papers(name: str, seed: int) -> None:
    batch = make(seed)
    low, high = policy_loss_traits(name).clip or (0.0, 0.0)
    rows = [batch.rows(x) for x in (batch.new_N, batch.old_N, batch.advantages_N, batch.selected_N)]
    sequences = list(zip(*rows, strict=True))
    loss_N, gradient_N = run(name, batch)
    wanted = [references.token_losses(name, *s, low, high) for s in sequences]
    torch.testing.assert_close(loss_N, batch.flat(wanted), rtol=1e-10, atol=1e-12)
    weights = batch.rows(batch.weights_N)
    slopes = [references.gradients(name, *s, low, high, w) for s, w in zip(sequences, weights, strict=True)]
    torch.testing.assert_close(gradient_N, batch.flat(slopes), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    "name", [n for n in POLICY_LOSSES if n not in ("gspo", "gmpo", "sequence_ppo", "kl_cov", "clip_cov")]
)
def test_at_a_ratio_of_one_the_gradient_is_the_policy_gradient(name: str) -> None:
    batch = make(3, spread=0.0)
    torch.testing.assert_close(run(name, batch)[1], -batch.weights_N * batch.advantages_N, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", POLICY_LOSSES)
@pytest.mark.parametrize("gap", [1e4, -1e4, 100.0, -100.0])
def test_extreme_ratios_stay_finite(name: str, gap: float) -> None:
    batch = make(5)
    batch = Batch(**{**{f: getattr(batch, f) for f in Batch.__annotations__}, "old_N": batch.new_N - abs(gap)})
    if gap < 0:
        batch = Batch(
            **{**{f: getattr(batch, f) for f in Batch.__annotations__}, "new_N": batch.old_N, "old_N": batch.new_N}
        )
    for result in run(name, batch):
        assert torch.isfinite(result).all()


def corrected(batch: Batch, correction: Correction) -> Tensor:
    return correction_weights(
        correction,
        logprobs_N=batch.new_N,
        rollout_logprobs_N=batch.old_N,
        advantages_N=batch.advantages_N,
        action_mask_N=batch.mask_N,
        sequence_N=batch.sequence_N,
        sequences=len(batch.lengths),
    )


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("level", LEVELS)
@EXAMPLES
@given(seed=SEEDS, threshold=st.sampled_from([0.001, 0.05, 0.3]))
def test_corrections_equal_their_definition(level: str, mode: str, gate: str, seed: int, threshold: float) -> None:
    batch = make(seed)
    settings_ = Correction(level=level, mode=mode, gate=gate, low=0.8, high=1.3, threshold=threshold)
    rows = zip(*(batch.rows(x) for x in (batch.new_N, batch.old_N, batch.advantages_N)), strict=True)
    wanted = [references.correction(level, mode, gate, 0.8, 1.3, threshold, *row) for row in rows]
    torch.testing.assert_close(corrected(batch, settings_), batch.flat(wanted), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("level", LEVELS)
def test_equal_policies_weigh_one_and_broken_numbers_stay_finite(level: str, mode: str, gate: str) -> None:
    batch = make(1, spread=0.0)
    correction = Correction(level=level, mode=mode, gate=gate)
    assert torch.equal(corrected(batch, correction), batch.mask_N.double())
    fields = {f: getattr(batch, f) for f in Batch.__annotations__}
    for poison in (math.nan, math.inf, -math.inf):
        spoiled = Batch(**{**fields, "old_N": torch.where(batch.mask_N, batch.old_N - 1e4, poison)})
        assert torch.isfinite(corrected(spoiled, correction)).all()


def test_bypass_leaves_out_and_weighs_nothing() -> None:
    batch = make(2)
    found = corrected(batch, Correction(mode="mask", low=0.8, high=1.3, bypass=True))
    assert set(found.tolist()) == {0.0, 1.0}
    ratio = (batch.new_N - batch.old_N).exp()
    assert torch.equal(found > 0, batch.mask_N & (ratio >= 0.8) & (ratio <= 1.3))


@pytest.mark.parametrize(
    ("correction", "wanted"),
    [
        (Correction(mode="truncate", high=2.0), [2.0, 0.25, 1.0]),  # TIS
        (Correction(mode="mask", low=0.5, high=5.0), [4.0, 0.0, 1.0]),  # IcePop
        (Correction(level="geometric", mode="mask", low=0.9, high=1.1), [4.0, 0.25, 1.0]),  # seq-mask-TIS
        (Correction(level="sequence", mode="mask", gate="opsm", threshold=0.1, bypass=True), [1.0, 1.0, 1.0]),
        (Correction(level="sequence", mode="mask", gate="opsm", threshold=-0.1, bypass=True), [0.0, 0.0, 0.0]),
    ],
)
def test_named_corrections_by_hand(correction: Correction, wanted: list[float]) -> None:
    new = torch.log(torch.tensor([0.8, 0.1, 0.5]))
    base = torch.log(torch.tensor([0.2, 0.4, 0.5]))
    found = correction_weights(
        correction,
        logprobs_N=new,
        rollout_logprobs_N=base,
        advantages_N=torch.tensor([-1.0, -1.0, -1.0]),
        action_mask_N=torch.ones(3, dtype=torch.bool),
        sequence_N=torch.zeros(3, dtype=torch.int64),
        sequences=1,
    )
    torch.testing.assert_close(found, torch.tensor(wanted), rtol=1e-5, atol=1e-6)


def test_interpolated_proximal_policy() -> None:
    new, mu = torch.tensor([-1.0] * 4), torch.tensor([-2.0] * 4)
    found = interpolated_proximal(new, mu, torch.tensor([4, 3, 2, 0]), current_version=5)
    torch.testing.assert_close(found, torch.tensor([-2.0, -1.5, -1 - 1 / 3, -1.2]))


@EXAMPLES
@given(seed=SEEDS)
def test_the_unbiased_k3_has_the_gradient_of_the_divergence(seed: int) -> None:
    """Exact over a small vocabulary: E_old[rho k3] is KL(pi || ref), and so are their gradients."""
    generator = torch.Generator().manual_seed(seed)
    logits, old, ref = (torch.randn(8, generator=generator, dtype=torch.float64) for _ in range(3))
    leaf = logits.clone().requires_grad_()
    new, old, ref = leaf.log_softmax(0), old.log_softmax(0), ref.log_softmax(0)
    exact = (new.exp() * (new - ref)).sum()
    estimate = (old.exp() * kl_estimate(new, ref, "k3_unbiased", (new - old).exp())).sum()
    torch.testing.assert_close(estimate, exact)
    torch.testing.assert_close(*(torch.autograd.grad(x, leaf, retain_graph=True)[0] for x in (estimate, exact)))


@EXAMPLES
@given(seed=SEEDS, share=st.sampled_from([0.05, 0.3, 1.0]))
def test_selected_tokens_do_not_depend_on_order(seed: int, share: float) -> None:
    batch = make(seed)
    sample_ids = torch.arange(len(batch.lengths)) + 17
    positions_N = torch.cat([torch.arange(n) for n in batch.lengths])

    def select(order: list[int]) -> tuple[set[tuple[int, int]], set[tuple[int, int]]]:
        spans = torch.arange(len(batch.mask_N)).split(batch.lengths)
        index_N = torch.cat([spans[i] for i in order])
        lengths_S = torch.tensor([batch.lengths[i] for i in order])
        columns = batch.old_N[index_N], batch.advantages_N[index_N], batch.mask_N[index_N]
        keys_N = token_keys(sample_ids[order], positions_N[index_N], lengths_S)
        clip = clip_cov_tokens(*columns, share=share, limits=(0.0, 9.0), keys_N=keys_N)
        kl = kl_cov_tokens(*columns, share=share)
        count = max(1, int(share * int(batch.mask_N.sum())))
        assert int(kl.sum()) == count
        assert int(clip.sum()) <= count
        assert not ((clip | kl) & ~columns[2]).any()
        names = [
            (int(sample_ids[order[s]]), int(p))
            for s, p in zip(
                torch.repeat_interleave(torch.arange(len(order)), lengths_S), positions_N[index_N], strict=True
            )
        ]
        return tuple({names[i] for i in chosen.nonzero()[:, 0].tolist()} for chosen in (clip, kl))  # type: ignore[return-value]

    order = torch.randperm(4, generator=torch.Generator().manual_seed(seed)).tolist()
    assert select([0, 1, 2, 3]) == select(order)
