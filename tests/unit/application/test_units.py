"""Units: what stays together however a batch is divided."""

import pytest
import torch
from attrs import evolve, frozen
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rollgrad.application.learning.microbatch import split
from rollgrad.domain.algorithms.losses.preference import PreferenceObjective
from rollgrad.domain.algorithms.preference_settings import PreferenceSettings
from rollgrad.domain.batches.examples import ExampleBatch, pack_preferences
from rollgrad.domain.batches.packed import PackedBatch, RolloutBatch, pack
from rollgrad.domain.batches.prefixes import shared_prefixes
from rollgrad.domain.episodes.examples import Preference, WeightedTokens
from rollgrad.domain.episodes.images import Image, PlacedImage
from rollgrad.domain.ports.models import TokenScores
from rollgrad.testing.agent_executor import make_trajectory
from tests.shards import shards


def reply(length: int) -> WeightedTokens:
    weights_T = torch.ones(length + 2)
    weights_T[:2] = 0
    return WeightedTokens(token_ids_T=torch.arange(length + 2), weights_T=weights_T, prompt_length=2)


def pairs(lengths: list[tuple[int, int]]) -> ExampleBatch:
    return pack_preferences(
        [
            Preference(chosen=reply(chosen), rejected=reply(chosen + more), row=row)
            for row, (chosen, more) in enumerate(lengths)
        ]
    )


def units_of(batch: PackedBatch) -> dict[int, int]:
    """Sequences of each unit."""
    ids, counts = torch.unique(batch.unit_ids_S, return_counts=True)
    return dict(zip(ids.tolist(), counts.tolist(), strict=True))


def distinct(batch: PackedBatch) -> int:
    """Tokens that a forward pass computes."""
    return shared_prefixes(batch).distinct(batch.lengths_S.tolist())


LENGTHS = st.lists(st.tuples(st.integers(1, 6), st.integers(1, 5)), min_size=1, max_size=7)


@given(LENGTHS, st.integers(1, 60), st.integers(1, 4))
def test_no_forward_pass_or_process_has_half_a_pair(
    lengths: list[tuple[int, int]], budget: int, processes: int
) -> None:
    batch = pairs(lengths)
    passes = split(batch, budget)
    assert sum(map(len, passes)) == len(batch)
    for part in passes:
        assert set(units_of(part).values()) == {2}
        assert distinct(part) <= budget or len(part) == 2
        shared = shards(part, processes)
        assert all(set(units_of(shard).values()) == {2} for shard in shared.parts)
        found_N = shared.merged([shard.tokens_N for shard in shared.parts])
        assert torch.equal(found_N, part.tokens_N)


@given(LENGTHS, st.integers(1, 60), st.integers(1, 4))
def test_no_process_gets_more_than_its_budget(lengths: list[tuple[int, int]], budget: int, processes: int) -> None:
    batch = pairs(lengths)
    longest = max(map(distinct, split(batch, 1)))
    passes = split(batch, budget * processes, processes)
    assert sum(map(len, passes)) == len(batch)
    for part in passes:
        assert all(distinct(shard) <= max(budget, longest) for shard in shards(part, processes).parts)


@given(LENGTHS, st.integers(1, 60), st.integers(1, 4))
def test_a_loss_of_pairs_is_the_same_in_any_division(
    lengths: list[tuple[int, int]], budget: int, processes: int
) -> None:
    batch, objective = pairs(lengths), PreferenceObjective(settings=PreferenceSettings(loss=("simpo",)))

    def loss(part: ExampleBatch) -> float:
        logprobs_N = -(1.0 + part.positions_N % 3).double() * part.action_mask_N
        return float(objective(TokenScores(logprobs_N=logprobs_N, entropy_N=logprobs_N), part).loss)

    for passes in (split(batch, budget), split(batch, budget * processes, processes, padded=True)):
        divided = sum(loss(shard) for part in passes for shard in shards(part, processes).parts)
        assert divided == pytest.approx(loss(batch), rel=1e-6)


def area(batch: PackedBatch) -> int:
    """Tokens of a pass of sequences side by side, padding included."""
    return len(batch) * int(batch.lengths_S.max())


@given(LENGTHS, st.integers(1, 60), st.integers(1, 4))
def test_padding_counts_in_the_budget_of_a_model_that_is_computed_padded(
    lengths: list[tuple[int, int]], budget: int, processes: int
) -> None:
    batch = pairs(lengths)
    passes = split(batch, budget * processes, processes, padded=True)
    assert sorted(s for number in range(len(passes)) for s in passes.sequences(number)) == list(range(len(batch)))
    for part in passes:
        own = shards(part, processes)
        assert torch.equal(own.merged([shard.tokens_N for shard in own.parts]), part.tokens_N)
        for shard in own.parts:
            assert set(units_of(shard).values()) == {2}
            assert area(shard) <= budget or len(shard) == 2
    fewer = sum(bool(share) for plan in passes.plan for share in plan)
    assert fewer > processes * (len(passes) - 1), "no pass more than needed"


def test_processes_have_equal_shares_of_padded_sequences() -> None:
    passes = split(pairs([(1, 1)] * 6), 1000, 3, padded=True)
    assert [[len(share) for share in plan] for plan in passes.plan] == [[4, 4, 4]]


def branched() -> RolloutBatch:
    """Two rollouts of three branches with 5 tokens each, and one of a single branch; no two begin alike."""
    samples = [0, 0, 0, 1, 1, 1, 2]
    rows = [([place], [1, 2, 3, 4], sample) for place, sample in enumerate(samples)]
    return pack([make_trajectory(prompt, reply, group_id=0, sample_id=sample) for prompt, reply, sample in rows])


@pytest.mark.parametrize(("budget", "sequences"), [(35, [7]), (20, [3, 4]), (15, [3, 3, 1]), (14, [2, 1, 2, 2])])
def test_branches_share_a_pass_that_has_room_for_them(budget: int, sequences: list[int]) -> None:
    """A rollout that is longer than the budget would need more memory than the user gave: its branches part."""
    assert [len(part) for part in split(branched(), budget)] == sequences


def test_results_by_token_are_in_the_order_of_the_batch() -> None:
    batch = branched().select([0, 3, 6, 1, 4, 2, 5])  # branches of a rollout are no neighbours
    passes = split(batch, 15)
    found_N = passes.merged([part.positions_N + 100 * part.sample_ids_S[part.sequence_ids_N] for part in passes])
    assert torch.equal(found_N, batch.positions_N + 100 * batch.sample_ids_S[batch.sequence_ids_N])


def samples_of(batch: RolloutBatch, processes: int) -> list[list[int]]:
    return [part.sample_ids_S.tolist() for part in shards(batch, processes).parts]


def test_processes_have_what_was_planned_for_them() -> None:
    passes = split(branched(), 40, 2)
    for number, part in enumerate(passes):
        planned = [passes.whole.sample_ids_S[own].tolist() for own in passes.plan[number]]
        assert samples_of(part, 2) == planned
    planned_for_two = evolve(branched(), shares=2, shares_S=torch.tensor([0, 1, 1, 1, 1, 1, 1]))
    assert samples_of(planned_for_two, 2) == [[0], [0, 0, 1, 1, 1, 2]]
    assert sorted(map(len, samples_of(planned_for_two, 3))) == [2, 2, 3], "a plan for others is none"


def test_a_rollout_is_divided_over_processes_where_it_has_more_than_a_fair_share() -> None:
    assert samples_of(branched().select([0, 1, 2]), 3) == [[0], [0], [0]]
    assert sorted(samples_of(branched().select(range(6)), 2)) == [[0, 0, 0], [1, 1, 1]]


@pytest.mark.parametrize(("pictured", "copied"), [((), 1), ((0, 2), 2), ((0,), 0)])
def test_a_process_without_samples_computes_the_shortest_one_with_images_if_any_has(
    pictured: tuple[int, ...], copied: int
) -> None:
    """Processes that divide what images go through all compute it, or none."""
    batch = pack([make_trajectory([1], [2] * length, sample_id=i) for i, length in enumerate((7, 3, 5))])
    image = PlacedImage(image=Image(digest="a", data=b"", tensors={}), start=0, stop=1)
    images_S = tuple((image,) if sample in pictured else () for sample in range(3)) if pictured else ()
    parts = shards(evolve(batch, images_S=images_S, loss_weights_N=torch.ones(batch.token_count)), 5).parts
    weightless = [part.sample_ids_S.tolist() for part in parts if not part.filled("loss_weights_N").any()]
    assert len(weightless) >= 2
    assert all(samples == [copied] for samples in weightless)


@frozen(kw_only=True, eq=False)
class Extended(PackedBatch):
    """A trainer's own columns, of each shape."""

    margins_S: Tensor
    table_SK: Tensor
    targets_N: Tensor
    bonus_weights_N: Tensor
    absent_N: Tensor | None = None


def test_a_new_column_needs_no_list() -> None:
    lengths_S = torch.tensor([2, 3])
    batch = Extended(
        tokens_N=torch.arange(5),
        action_mask_N=torch.ones(5, dtype=torch.bool),
        lengths_S=lengths_S,
        prompt_lengths_S=torch.ones_like(lengths_S),
        group_ids_S=torch.zeros_like(lengths_S),
        margins_S=torch.tensor([0.5, 1.5]),
        table_SK=torch.arange(6.0).view(2, 3),
        targets_N=torch.arange(5) * 10,
        bonus_weights_N=torch.ones(5),
    )
    second = batch.select([1])
    assert (second.margins_S.tolist(), second.table_SK.tolist()) == ([1.5], [[3.0, 4.0, 5.0]])
    assert (second.targets_N.tolist(), second.absent_N) == ([20, 30, 40], None)
    idle = shards(second, 2)
    assert [float(part.bonus_weights_N.sum()) for part in idle.parts] == [3.0, 0.0]
