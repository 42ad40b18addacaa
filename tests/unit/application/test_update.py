"""Epochs, minibatches and micro-batches hold the same samples and the same weights."""

import math
from collections.abc import Sequence

import pytest
import torch
from attrs import evolve
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from rollgrad.application.learning.update import Listening, UpdateService, _stretches, gradient_share_by_turn
from rollgrad.domain.algorithms.losses.aggregation import loss_weights
from rollgrad.domain.algorithms.losses.objectives import ClippedValueObjective, PolicyLossObjective
from rollgrad.domain.algorithms.settings import Aggregation
from rollgrad.domain.batches.metrics import Common, Count
from rollgrad.domain.batches.packed import Batch, PackedBatch, RolloutBatch, pack
from rollgrad.domain.batches.prefixes import shared_prefixes
from rollgrad.domain.ports.models import PolicyObjective, TokenScores
from rollgrad.testing.agent_executor import make_trajectory
from rollgrad.testing.models import VOCABULARY, FakePolicy, FakeValue

OBJECTIVE = PolicyLossObjective()


def batch(lengths: list[int]) -> PackedBatch:
    packed = pack(
        [
            make_trajectory([300, 301], [10 + index] * length, group_id=index // 2, sample_id=index)
            for index, length in enumerate(lengths)
        ]
    )
    mask = packed.action_mask_N
    sequence_N = packed.sequence_ids_N.float()
    return evolve(
        packed,
        advantages_N=torch.where(mask, sequence_N - 1.0, 0.0),
        returns_N=torch.where(mask, sequence_N, 0.0),
        values_N=torch.zeros(packed.token_count),
    )


def service(policy: FakePolicy, critic: FakeValue | None = None, **settings: object) -> UpdateService:
    defaults: dict[str, object] = {
        "aggregation": Aggregation.TOKEN_MEAN,
        "max_length": 16,
        "batch_size": None,
        "epochs": 1,
        "max_tokens": 10_000,
        "seed": 0,
    }
    return UpdateService(policy, critic, **(defaults | settings))  # type: ignore[arg-type]


class PaddedPolicy(FakePolicy):
    """A policy whose rows are as long as the longest of a pass."""

    def padded(self) -> bool:
        return True


class PaddedValue(FakeValue):
    """A critic whose rows are as long as the longest of a pass."""

    def padded(self) -> bool:
        return True


def test_passes_of_models_that_are_computed_padded_have_room_for_all_rows() -> None:
    policy, critic = PaddedPolicy(), PaddedValue()
    updates = service(policy, critic, max_tokens=22)
    updates.run(batch([9, 1, 1, 8, 9, 2]), OBJECTIVE, ClippedValueObjective(clip=0.2))
    for made in (policy.updates, critic.updates):
        assert [part.lengths_S.tolist() for part in made[0]] == [[11, 11], [10, 4], [3, 3]]


lengths = st.lists(st.integers(1, 9), min_size=1, max_size=12)


@settings(max_examples=30, deadline=None)
@given(lengths, st.integers(1, 12), st.integers(1, 3), st.integers(3, 40))
def test_every_epoch_trains_each_sample_once(sizes: list[int], size: int, epochs: int, budget: int) -> None:
    policy = FakePolicy(lr=0.01)
    packed = batch(sizes)
    service(policy, batch_size=size, epochs=epochs, max_tokens=budget).run(packed, OBJECTIVE)
    per_epoch = math.ceil(len(sizes) / min(size, len(sizes)))
    assert len(policy.updates) == epochs * per_epoch
    for epoch in range(epochs):
        steps = policy.updates[epoch * per_epoch : (epoch + 1) * per_epoch]
        trained = [int(i) for step in steps for part in step for i in part.sample_ids_S]
        assert sorted(trained) == list(range(len(sizes)))
        counts = [sum(len(part) for part in step) for step in steps]
        assert max(counts) - min(counts) <= 1
    for step in policy.updates:
        distinct = [shared_prefixes(part).distinct(part.lengths_S.tolist()) for part in step]
        assert all(tokens <= budget or len(part) == 1 for tokens, part in zip(distinct, step, strict=True))


branches = st.lists(st.integers(1, 4), min_size=1, max_size=9)


def branched(counts: Sequence[int]) -> PackedBatch:
    """As many branches of each rollout, in groups of two; branches have different lengths."""
    packed = pack(
        [
            make_trajectory([300], [10 + sample] * (1 + branch), group_id=sample // 2, sample_id=100 - sample)
            for sample, count in enumerate(counts)
            for branch in range(count)
        ]
    )
    advantages_N = torch.where(packed.action_mask_N, packed.sequence_ids_N.float() - 1.0, 0.0)
    return evolve(packed, advantages_N=advantages_N)


def samples_of_steps(policy: FakePolicy) -> list[list[int]]:
    return [[int(i) for part in step for i in part.sample_ids_S] for step in policy.updates]


def test_a_rollout_that_branched_counts_once() -> None:
    policy = FakePolicy()
    metrics = service(policy, batch_size=4).run(branched([3, 3, 3, 3]), OBJECTIVE).metrics
    assert len(policy.updates) == 1
    assert metrics["policy/trained_share"] == 1.0


@settings(max_examples=40, deadline=None)
@given(branches, st.integers(1, 10), st.integers(1, 3))
def test_every_step_holds_whole_rollouts(counts: list[int], size: int, epochs: int) -> None:
    policy = FakePolicy(lr=0.01)
    service(policy, batch_size=size, epochs=epochs).run(branched(counts), OBJECTIVE)
    per_epoch = math.ceil(len(counts) / size)
    steps = samples_of_steps(policy)
    assert len(steps) == epochs * per_epoch
    for epoch in range(epochs):
        of_epoch = steps[epoch * per_epoch : (epoch + 1) * per_epoch]
        assert all(len(set(step)) <= size for step in of_epoch)
        for sample, count in enumerate(counts):
            assert sorted(step.count(100 - sample) for step in of_epoch) == [0] * (per_epoch - 1) + [count]


@settings(max_examples=20, deadline=None)
@given(branches, st.integers(0, 12), st.integers(1, 10))
def test_failures_make_steps_smaller_and_leave_their_number(counts: list[int], failed: int, size: int) -> None:
    policy = FakePolicy(lr=0.01)
    planned = len(counts) + failed
    service(policy, batch_size=size, planned=planned).run(branched(counts), OBJECTIVE)
    steps = samples_of_steps(policy)
    assert len(steps) == min(len(counts), math.ceil(planned / size))
    assert sum(len(step) for step in steps) == sum(counts)
    assert all(len(set(step)) <= size for step in steps)


@settings(max_examples=20, deadline=None)
@given(lengths, st.sampled_from(list(Aggregation)), st.integers(3, 60))
def test_micro_batches_do_not_change_the_step(sizes: list[int], aggregation: Aggregation, budget: int) -> None:
    whole, divided = FakePolicy(), FakePolicy()
    packed = batch(sizes)
    expected = service(whole, aggregation=aggregation).run(packed, OBJECTIVE).metrics
    found = service(divided, aggregation=aggregation, max_tokens=budget).run(packed, OBJECTIVE).metrics
    assert found == pytest.approx(expected, rel=1e-4, abs=1e-5)
    (_, weights), (_, same) = next(whole.weights()), next(divided.weights())
    torch.testing.assert_close(same, weights, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("aggregation", list(Aggregation))
def test_weights_are_those_of_the_whole_step(aggregation: Aggregation) -> None:
    policy = FakePolicy()
    packed = batch([4, 1, 7, 2])
    service(policy, aggregation=aggregation, max_tokens=9).run(packed, OBJECTIVE)
    (step,) = policy.updates
    assert len(step) > 1
    weights = torch.cat([part.loss_weights_N for part in step if part.loss_weights_N is not None])
    expected = loss_weights(
        aggregation,
        action_mask_N=packed.action_mask_N,
        lengths_S=packed.lengths_S,
        group_ids_S=packed.group_ids_S,
        rollout_ids_S=packed.rollout_ids_S,
        max_length=16,
    )
    assert torch.equal(weights, expected)


def test_the_critic_learns_beside_the_policy_with_token_means() -> None:
    policy, critic = FakePolicy(), FakeValue()
    packed = batch([4, 1, 7, 2])
    packed = evolve(packed, experts_NLK=torch.zeros(packed.token_count, 1, 1, dtype=torch.uint8))
    report = service(policy, critic, aggregation=Aggregation.SEQUENCE_MEAN, batch_size=2).run(
        packed, OBJECTIVE, ClippedValueObjective(clip=0.5)
    )
    assert {"policy/loss", "policy/grad_norm", "policy/lr", "critic/loss", "critic/value_loss"} <= report.metrics.keys()
    assert len(policy.updates) == len(critic.updates) == 2
    for (part,), (same,) in zip(policy.updates, critic.updates, strict=True):
        assert torch.equal(part.sample_ids_S, same.sample_ids_S)
        assert part.experts_NLK is not None
        assert same.experts_NLK is None, "they would travel to the critic's processes for nothing"
        assert part.value_weights_N is not None
        assert float(part.value_weights_N.sum()) == pytest.approx(1.0)


def test_the_share_of_values_that_moved_too_far_counts_both_sides() -> None:
    packed = batch([2, 2])
    old_N = torch.where(packed.action_mask_N, torch.tensor([0.0, 0, 0.5, -0.5, 0, 0, 0.2, -0.1]), 0.0)
    report = service(FakePolicy(), FakeValue()).run(
        evolve(packed, values_N=old_N), OBJECTIVE, ClippedValueObjective(clip=0.3)
    )
    assert report.metrics["critic/value_clip_share"] == pytest.approx(0.5)


def test_the_likelihood_of_replies_that_passed_is_a_mean_over_their_tokens() -> None:
    """VAPO's eq. 10; a score of just the threshold passes."""
    packed = evolve(batch([2, 3, 4]), scores_S=torch.tensor([1.0, 0.4, 0.5]))
    packed = evolve(packed, advantages_N=torch.zeros(packed.token_count))
    policy = FakePolicy()
    objective = PolicyLossObjective(positive_nll_coef=0.5)
    metrics = service(policy, pass_threshold=0.5, max_tokens=8).run(packed, objective).metrics
    moved_V = torch.full((VOCABULARY,), -1 / VOCABULARY)  # minus the probability of each token
    moved_V[10] += 2 / 6
    moved_V[12] += 4 / 6
    torch.testing.assert_close(policy.state_dict()["table"], 0.5 * moved_V)
    assert metrics["policy/positive_nll"] == pytest.approx(math.log(VOCABULARY))


def test_the_effective_share_of_samples_is_that_of_the_weights() -> None:
    """(mean w)^2 / mean w^2 of the token weights w = pi / mu."""
    packed = batch([1, 3])
    weights = torch.tensor([1.0, 2.0, 3.0, 4.0])
    rollout_N = packed.rollout_logprobs_N.clone()
    rollout_N[packed.action_mask_N] = -math.log(VOCABULARY) - weights.log()
    metrics = service(FakePolicy(), max_tokens=6).run(evolve(packed, rollout_logprobs_N=rollout_N), OBJECTIVE).metrics
    assert metrics["policy/mismatch_effective_sample_share"] == pytest.approx(2.5**2 / 7.5)


@pytest.mark.parametrize(("forks", "shares"), [(None, [0.25, 0.75]), ([2, 3, 7], [0.4, 0.6])])
def test_a_turns_share_of_the_gradient_is_of_weights_and_advantages(
    forks: list[int] | None, shares: list[float]
) -> None:
    """Shares are of the tokens alone at which the loss counts."""
    packed = pack([make_trajectory([1, 1], [2, 3], [4, 4, 4], [5, 6])])
    learned_N = None
    if forks is not None:
        learned_N = torch.zeros(9, dtype=torch.bool).index_fill_(0, torch.tensor(forks), True)
    found = gradient_share_by_turn(
        evolve(
            packed,
            advantages_N=torch.tensor([0.0, 0, 1, -1, 9, 9, 9, -3, 3]),
            loss_weights_N=torch.where(packed.action_mask_N, 0.25, 0.0),
            learned_N=learned_N,
        )
    )
    assert found == pytest.approx(
        {"policy/gradient_share_turn_0": shares[0], "policy/gradient_share_turn_1": shares[1]}
    )


def test_metrics_are_means_over_steps() -> None:
    policy = FakePolicy(lr=0.5)
    metrics = service(policy, batch_size=2, epochs=2).run(batch([1, 1, 1, 1]), OBJECTIVE).metrics
    assert len(policy.updates) == 4
    assert metrics["policy/lr"] == 0.5
    assert metrics["policy/ratio_mean"] == pytest.approx(1.0)


@pytest.mark.parametrize("skips", [0, 1, 2])
def test_skipped_steps_are_counted_and_have_no_gradient_norm(skips: int) -> None:
    policy = Skipping(skips)
    metrics = service(policy, batch_size=2).run(batch([1, 1, 1, 1]), OBJECTIVE).metrics
    assert metrics["policy/skipped_steps"] == skips
    assert metrics["policy/loss_scale"] == 8.0
    assert metrics.get("policy/grad_norm") == (None if skips == 2 else pytest.approx(sum(policy.norms) / (2 - skips)))


class Plain(FakePolicy):
    """A policy of a user's own, which reports plain numbers."""

    def update(self, micro_batches: Sequence[Batch], objective: PolicyObjective[Batch]) -> dict[str, float]:
        return {name: float(value) for name, value in super().update(micro_batches, objective).items()}


@pytest.mark.parametrize("size", [2, 4])
def test_a_policy_that_reports_plain_numbers_has_the_same_metrics(size: int) -> None:
    settings: dict[str, object] = {"batch_size": size, "aggregation": Aggregation.CONSTANT_LENGTH, "max_length": 1000}
    one, other = (
        service(policy, **settings).run(batch([1, 2, 3, 4]), OBJECTIVE).metrics
        for policy in (FakePolicy(lr=0.5), Plain(lr=0.5))
    )
    assert one == pytest.approx(other)
    assert other["policy/lr"] == 0.5


class Skipping(FakePolicy):
    """In float16, as if its first gradients overflowed."""

    def __init__(self, skips: int) -> None:
        super().__init__(lr=0.5)
        self._skips = skips
        self.norms: list[float] = []

    def update(self, micro_batches: Sequence[Batch], objective: PolicyObjective[Batch]) -> dict[str, float]:
        metrics = super().update(micro_batches, objective) | {"loss_scale": Common(8.0), "skipped_steps": Count(0.0)}
        if len(self.updates) <= self._skips:
            del metrics["grad_norm"]
            return metrics | {"skipped_steps": Count(1.0)}
        self.norms.append(metrics["grad_norm"])
        return metrics


def test_shuffling_follows_the_seed_and_moves_on() -> None:
    def orders(seed: int) -> list[list[int]]:
        policy = FakePolicy(lr=0.0)
        updater = service(policy, batch_size=2, seed=seed)
        for _ in range(2):
            updater.run(batch([1] * 12), OBJECTIVE)
        return [part.sample_ids_S.tolist() for (part,) in policy.updates]

    assert orders(1) == orders(1)
    assert orders(1) != orders(2)
    first, second = orders(1)[:6], orders(1)[6:]
    assert first != second, "each pass has an order of its own"


def test_samples_of_a_prompt_stay_neighbours() -> None:
    policy = FakePolicy()
    service(policy, batch_size=6, max_tokens=1000).run(batch([2] * 12), OBJECTIVE)
    for (part,) in policy.updates:
        groups = part.group_ids_S.tolist()
        assert groups == sorted(groups)


@settings(max_examples=30, deadline=None)
@given(lengths, st.integers(3, 40), st.booleans())
def test_the_only_optimizer_step_tells_the_log_probs_before_it(sizes: list[int], budget: int, skip: bool) -> None:
    policy = FakePolicy(lr=0.5)
    packed = batch(sizes)
    before_N = policy.score(packed).logprobs_N
    told_N = service(policy, max_tokens=budget, skip_idle=skip).run(packed, OBJECTIVE).logprobs_N
    assert told_N is not None
    known_N = ~told_N.isnan()
    assert torch.equal(told_N[known_N], before_N[known_N])
    left_out = {1} if skip and len(sizes) > 1 else set()  # the second sample's advantage is 0
    assert set(packed.sequence_ids_N[~known_N].tolist()) == left_out


@pytest.mark.parametrize("loss", ["ppo", "gmpo", "gspo", "topr"])
def test_sequences_are_left_out_only_where_they_have_no_gradient(loss: str) -> None:
    """The loss counts at the first token of each reply, where the second reply has an advantage of 0."""
    packed = batch([3, 4, 2])
    advantages_N = packed.filled("advantages_N").clone()
    advantages_N[packed.sequence_ids_N == 1] = torch.tensor([0.0, 0.0, 0.0, 1.0, -0.5, 0.25])
    packed = evolve(packed, advantages_N=advantages_N)
    tables = []
    for skip in (True, False):
        policy = FakePolicy(torch.linspace(0, 1, VOCABULARY))
        taken = service(policy, skip_idle=skip, learn=lambda step: step.positions_N == 2)
        taken.run(packed, PolicyLossObjective(loss=loss))
        tables.append(policy.state_dict()["table"])
    torch.testing.assert_close(tables[0], tables[1])
    assert not torch.equal(tables[0], torch.linspace(0, 1, VOCABULARY))


@pytest.mark.parametrize("purpose", ["keep", "learn"])
def test_tokens_are_chosen_from_the_whole_step(purpose: str) -> None:
    """Those that a correction keeps, and those at which the policy loss counts."""
    steps: list[int] = []

    def keep(step: RolloutBatch) -> Tensor:
        steps.append(step.token_count)
        return step.positions_N == 2  # the first token of each reply

    policy = FakePolicy()
    service(policy, batch_size=2, max_tokens=8, **{purpose: keep}).run(batch([4, 5, 6, 3]), OBJECTIVE)
    assert sum(steps) == 4 * 2 + 18
    assert len(steps) == 2
    assert sum(len(step) for step in policy.updates) > 2, "a step has several passes"
    for step in policy.updates:
        for part in step:
            chosen_N = part.kept_N if purpose == "keep" else part.learned_N
            assert chosen_N is not None
            assert torch.equal(chosen_N, part.positions_N == 2)
            assert part.entropies_N is None


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(1, 3), min_size=2, max_size=6), st.data(), st.sampled_from(list(Aggregation)))
def test_masked_truncated_rollouts_teach_nothing(counts: list[int], data: st.DataObject, mode: Aggregation) -> None:
    """The step is that of the other rollouts alone; a rollout is cut off if one of its branches is."""
    packed = branched(counts)
    packed = evolve(
        packed, returns_N=packed.action_mask_N.float(), values_N=torch.where(packed.action_mask_N, 0.25, 0.0)
    )
    cut_S = torch.tensor(data.draw(st.lists(st.booleans(), min_size=len(packed), max_size=len(packed))))
    finished_S = ~torch.isin(packed.sample_ids_S, packed.sample_ids_S[cut_S])
    assume(bool(finished_S.any()))
    alone = packed.select(finished_S.nonzero()[:, 0])
    found, expected = (FakePolicy(), FakeValue()), (FakePolicy(), FakeValue())
    value_objective = ClippedValueObjective(clip=0.5)
    report = service(*found, aggregation=mode, mask_truncated=True).run(
        evolve(packed, truncated_S=cut_S), OBJECTIVE, value_objective
    )
    same = service(*expected, aggregation=mode).run(alone, OBJECTIVE, value_objective).metrics
    share = same.pop("policy/trained_share") * alone.rollouts / packed.rollouts
    assert report.metrics == pytest.approx(same | {"policy/trained_share": share})
    for model, other in zip(found, expected, strict=True):
        torch.testing.assert_close(model.state_dict()["table"], other.state_dict()["table"])
    assert report.loss_weights_N is not None
    finished_N = finished_S[packed.sequence_ids_N]
    assert not bool(report.loss_weights_N[~finished_N].any())
    assert bool((report.loss_weights_N[finished_N & packed.action_mask_N] > 0).all())


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(1, 3), min_size=2, max_size=6), st.booleans(), st.data())
def test_rollouts_that_repeat_themselves_teach_nothing(counts: list[int], cut: bool, data: st.DataObject) -> None:
    """As those that were cut off, which they may be as well; a rollout repeats itself if one of its branches does."""
    packed = branched(counts)
    loops_S = torch.tensor(data.draw(st.lists(st.booleans(), min_size=len(packed), max_size=len(packed))))
    certain_N = loops_S[packed.sequence_ids_N] & packed.action_mask_N
    packed = evolve(
        packed,
        rollout_logprobs_N=torch.where(certain_N, 0.0, -1.0),
        truncated_S=torch.arange(len(packed)) == 0,
    )
    left_out_S = loops_S | packed.truncated_S if cut else loops_S
    learned_S = ~torch.isin(packed.sample_ids_S, packed.sample_ids_S[left_out_S])
    assume(bool(learned_S.any()))
    found, expected = FakePolicy(), FakePolicy()
    report = service(found, mask_repetition=1, mask_truncated=cut).run(packed, OBJECTIVE)
    service(expected).run(packed.select(learned_S.nonzero()[:, 0]), OBJECTIVE)
    torch.testing.assert_close(found.state_dict()["table"], expected.state_dict()["table"])
    assert report.metrics["policy/repetition_share"] == pytest.approx(float(loops_S.float().mean()))


def test_an_update_whose_rollouts_were_all_cut_off_takes_no_step() -> None:
    policy, critic = FakePolicy(lr=0.5), FakeValue()
    packed = batch([4, 1])
    updates = service(policy, critic, mask_truncated=True)
    objectives = OBJECTIVE, ClippedValueObjective(clip=0.5)
    report = updates.run(evolve(packed, truncated_S=torch.tensor([True, True])), *objectives)
    assert policy.updates == critic.updates == []
    assert not updates.under_way
    assert report.metrics == {}
    assert report.loss_weights_N is not None
    assert not bool(report.loss_weights_N.any())
    assert updates.run(packed, *objectives).metrics["policy/trained_share"] == 1.0


def test_several_optimizer_steps_tell_no_log_probs() -> None:
    report = service(FakePolicy(lr=0.5), batch_size=2).run(batch([2, 3, 4]), OBJECTIVE)
    assert report.logprobs_N is None


def test_the_last_epoch_tells_entropies_and_clipped_tokens() -> None:
    policy = FakePolicy(lr=200.0)
    packed = batch([4, 5, 6])
    before = policy.score(packed)
    packed = evolve(packed, old_logprobs_N=before.logprobs_N)
    report = service(policy, epochs=2, max_tokens=8).run(packed, OBJECTIVE)
    weights_N, entropies_N, clipped_N = report.loss_weights_N, report.entropies_N, report.clipped_N
    assert weights_N is not None
    assert entropies_N is not None
    assert clipped_N is not None
    first = (weights_N * before.entropy_N).sum()
    assert float((weights_N * entropies_N).sum()) == pytest.approx(2 * report.metrics["policy/entropy"] - float(first))
    clipped = 2 * (report.metrics["policy/clip_low_share"] + report.metrics["policy/clip_high_share"])
    assert 0 < clipped < 1, "of the first epoch, where ratios are 1, none"
    assert float(weights_N[clipped_N].sum()) == pytest.approx(clipped)


@pytest.mark.parametrize("kept", [[0, 1, 2], [1, 2], [2, 1, 0], [0, 2], [1]], ids=str)
def test_what_is_told_of_tokens_stands_at_their_places(kept: list[int]) -> None:
    whole = batch([2, 1, 3])
    listening = Listening(OBJECTIVE)
    told = evolve(whole, places_S=whole.starts_S).select(kept)
    values_N = torch.arange(1.0, 1 + told.token_count)
    listening.hear(told, TokenScores(logprobs_N=-values_N, entropy_N=values_N), values_N == 1)
    logprobs_N, entropies_N, clipped_N = listening.columns(whole.token_count)
    assert logprobs_N is not None
    assert entropies_N is not None
    assert clipped_N is not None
    places = [
        place
        for start, stop in (whole.runs(torch.tensor([sequence]))[0] for sequence in kept)
        for place in range(start, stop)
    ]
    assert logprobs_N[places].tolist() == (-values_N).tolist()
    assert entropies_N[places].tolist() == values_N.tolist()
    assert clipped_N.nonzero()[:, 0].tolist() == places[:1]
    assert int(entropies_N.isnan().sum()) == whole.token_count - len(places)


def test_a_batch_with_no_sequence_missing_is_written_at_once() -> None:
    whole = batch([2, 1, 3])
    placed = evolve(whole, places_S=whole.starts_S + 5)
    assert _stretches(placed) == [(slice(0, 12), slice(5, 17))]
