"""Common beginnings of sequences are counted, and computed, once in each part, however a batch is divided."""

import itertools
from collections.abc import Sequence
from random import Random

import pytest
import torch
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from rollgrad.application.learning.microbatch import split
from rollgrad.domain.batches.packed import PackedBatch, RolloutBatch, pack
from rollgrad.domain.batches.partition import (
    PASS_SHARE,
    REPEATS,
    Piece,
    distinct_tokens,
    divided,
    least_possible,
    micro_batches,
    pieces,
)
from rollgrad.domain.batches.prefixes import shared_prefixes
from rollgrad.domain.episodes.images import Image, PlacedImage, PlacedImages
from rollgrad.testing.agent_executor import make_trajectory
from tests.shards import shards

TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=6)
BRANCHES = st.tuples(st.integers(0, 2), st.integers(0, 3), TOKENS, TOKENS)
"""Group, sample, prompt and reply: many of two tokens begin alike."""


def packed(rows: Sequence[tuple[int, int, list[int], list[int]]]) -> RolloutBatch:
    ordered = sorted(rows, key=lambda row: row[:2])
    return pack([make_trajectory(p, a, group_id=g, sample_id=s) for g, s, p, a in ordered])


def distinct(batch: PackedBatch) -> int:
    """Nodes of the tries, one a group, that hold the sequences, counted one by one."""
    rows = [tuple(row.tolist()) for row in batch.tokens_N.split(batch.lengths_S.tolist())]
    groups = batch.group_ids_S.tolist()
    return len({(g, row[:end]) for g, row in zip(groups, rows, strict=True) for end in range(1, len(row) + 1)})


def prompts(groups: int, samples: int, prompt: int, reply: int) -> list[Piece]:
    """Rollouts with replies of a third to five thirds of `reply` tokens."""
    generator = torch.Generator().manual_seed(0)
    replies = torch.randint(reply // 3, reply * 5 // 3, (groups * samples,), generator=generator).tolist()
    return [Piece([i], i // samples, prompt + r, prompt + r, prompt) for i, r in enumerate(replies)]


@settings(deadline=None)
@given(st.lists(BRANCHES, min_size=1, max_size=9))
def test_distinct_tokens_are_those_of_a_trie(rows: list[tuple[int, int, list[int], list[int]]]) -> None:
    batch = packed(rows)
    found = shared_prefixes(batch)
    assert found.distinct(batch.lengths_S.tolist()) == distinct(batch)
    assert sorted(found.order) == list(range(len(batch)))


def pictured(parts: Sequence[int | str]) -> tuple[list[int], PlacedImages, tuple[int | str, ...]]:
    """A prompt of tokens and images, each of which stands for some tokens of one id; the places of its images; and its
    tokens by what they are."""
    tokens: list[int] = []
    images: list[PlacedImage] = []
    for part in parts:
        if isinstance(part, str):
            image = Image(digest=part, data=b"", tensors={})
            images.append(PlacedImage(image=image, start=len(tokens), stop=len(tokens) + len(part)))
        tokens += [part] if isinstance(part, int) else [1] * len(part)
    return (
        tokens,
        tuple(images),
        tuple(x for part in parts for x in ([part] if isinstance(part, int) else [part] * len(part))),
    )


@settings(deadline=None)
@given(st.lists(st.lists(st.sampled_from([0, 1, "x", "y", "two"]), min_size=1, max_size=4), min_size=1, max_size=5))
def test_tokens_of_different_images_are_distinct(prompts: list[list[int | str]]) -> None:
    found = [pictured(parts) for parts in prompts]
    batch = pack([make_trajectory(tokens, [0], sample_id=i) for i, (tokens, _, _) in enumerate(found)])
    batch = evolve(batch, images_S=tuple(images for _, images, _ in found))
    rows = [(*told_apart, 0) for _, _, told_apart in found]
    nodes = {row[:end] for row in rows for end in range(1, len(row) + 1)}
    before = batch.tokens_N.clone()
    assert shared_prefixes(batch).distinct(batch.lengths_S.tolist()) == len(nodes)
    assert torch.equal(batch.tokens_N, before)


@settings(deadline=None)
@given(st.lists(BRANCHES, min_size=1, max_size=9), st.integers(1, 40), st.integers(1, 4))
def test_every_division_has_each_token_once_and_keeps_its_budget(
    rows: list[tuple[int, int, list[int], list[int]]], budget: int, parts: int
) -> None:
    batch = packed(rows)
    longest = int(batch.lengths_S.max())
    found = split(batch, budget * parts, parts)
    rest = sorted(zip(batch.group_ids_S.tolist(), batch.sample_ids_S.tolist(), batch.lengths_S.tolist(), strict=True))
    seen = [(int(p.group_ids_S[i]), int(p.sample_ids_S[i]), int(p.lengths_S[i])) for p in found for i in range(len(p))]
    assert sorted(seen) == rest
    for part in found:
        shared = shards(part, parts)
        assert torch.equal(shared.merged([shard.tokens_N for shard in shared.parts]), part.tokens_N)
        assert all(distinct(shard) <= max(budget, longest) for shard in shared.parts)
    places_N = found.merged([part.tokens_N + 2 * part.positions_N for part in found])
    assert torch.equal(places_N, batch.tokens_N + 2 * batch.positions_N)


@settings(deadline=None)
@given(st.lists(BRANCHES, min_size=1, max_size=9), st.integers(1, 30), st.randoms())
def test_a_piece_is_a_rollout_or_what_has_room_of_a_long_one(
    rows: list[tuple[int, int, list[int], list[int]]], largest: int, random: Random
) -> None:
    batch = packed(rows)
    batch = batch.select(random.sample(range(len(batch)), len(batch)))
    tokens = [row.tolist() for row in batch.tokens_N.split(batch.lengths_S.tolist())]
    units, groups = batch.units_S.tolist(), batch.group_ids_S.tolist()
    found = pieces(batch, largest, shared_prefixes(batch))
    assert sorted(s for piece in found for s in piece.sequences) == list(range(len(batch)))
    assert [piece.group for piece in found] == sorted((p.group for p in found), key=groups.index), "groups in a row"
    for piece in found:
        (unit,) = {units[s] for s in piece.sequences}
        whole = [s for s in range(len(batch)) if units[s] == unit]
        assert piece.tokens == distinct(batch.select(piece.sequences))
        assert piece.repeated == sum(len(tokens[s]) for s in piece.sequences)
        assert piece.sequences == whole or distinct(batch.select(whole)) > largest
        assert piece.tokens <= largest or len(piece.sequences) == 1
        firsts = [tokens[other.sequences[0]] for other in found if other.group == piece.group]
        alike = sum(1 for _ in itertools.takewhile(lambda column: len({*column}) == 1, zip(*firsts, strict=False)))
        assert piece.shared == (alike if len(firsts) > 1 else 0)


@settings(deadline=None)
@given(st.lists(BRANCHES, min_size=1, max_size=9), st.integers(1, 4))
def test_a_part_is_counted_with_no_fewer_tokens_than_it_has(
    rows: list[tuple[int, int, list[int], list[int]]], parts: int
) -> None:
    """Then no budget is broken; replies to one prompt are counted exactly."""
    batch = packed(rows)
    together = pieces(batch, batch.token_count, shared_prefixes(batch))
    for part in divided(together, parts):
        if part:
            assert distinct_tokens(part) >= distinct(batch.select([s for piece in part for s in piece.sequences]))


GROUPS = st.lists(st.tuples(st.integers(1, 50), st.lists(st.integers(0, 30), min_size=1, max_size=5)), min_size=1)
"""Tokens of each prompt, and of the replies to it."""


def rollouts_of(groups: list[tuple[int, list[int]]]) -> list[Piece]:
    return [
        Piece([100 * group + i], group, shared + own, shared + own, shared if len(replies) > 1 else 0)
        for group, (shared, replies) in enumerate(groups)
        for i, own in enumerate(replies)
    ]


@settings(deadline=None)
@given(GROUPS, st.integers(1, 9))
def test_no_part_has_much_more_than_its_share(sizes: list[tuple[int, list[int]]], parts: int) -> None:
    """Never more than a fair share and the largest group, which is what dealing whole groups out gives."""
    rollouts = rollouts_of(sizes)
    found = divided(rollouts, parts)
    assert sorted(piece.sequences[0] for part in found for piece in part) == [p.sequences[0] for p in rollouts]
    groups = [shared + sum(replies) for shared, replies in sizes]
    assert max(map(distinct_tokens, found)) <= sum(groups) / parts + max(groups)


@settings(deadline=None)
@given(GROUPS.filter(lambda groups: len(groups) <= 6), st.integers(2, 3))
def test_no_part_has_a_third_more_than_the_best_division_of_whole_groups(
    sizes: list[tuple[int, list[int]]], parts: int
) -> None:
    """Graham 1969, theorem 2: the largest groups are dealt out first."""
    groups = [shared + sum(replies) for shared, replies in sizes]
    best = min(
        max(sum(tokens for tokens, own in zip(groups, places, strict=True) if own == part) for part in range(parts))
        for places in itertools.product(range(parts), repeat=len(groups))
    )
    assert max(map(distinct_tokens, divided(rollouts_of(sizes), parts))) <= (4 / 3 - 1 / (3 * parts)) * best


@settings(deadline=None)
@given(GROUPS.filter(lambda groups: sum(len(replies) for _, replies in groups) <= 6), st.integers(1, 4))
def test_no_division_has_less_than_the_least_possible(sizes: list[tuple[int, list[int]]], parts: int) -> None:
    rollouts = rollouts_of(sizes)
    least = least_possible(rollouts, parts)
    for places in itertools.product(range(parts), repeat=len(rollouts)):
        held = [[p for p, own in zip(rollouts, places, strict=True) if own == part] for part in range(parts)]
        if all(held) or len(rollouts) < parts:
            assert max(map(distinct_tokens, held)) >= least


@pytest.mark.parametrize(
    ("groups", "parts", "least"),
    [([(10, [5, 5])], 1, 20), ([(10, [5, 5])], 2, 15), ([(10, [5, 5])], 3, 10), ([(10, [5, 5]), (4, [1, 1])], 3, 10)],
)
def test_the_least_possible_by_hand(groups: list[tuple[int, list[int]]], parts: int, least: int) -> None:
    """More parts than groups compute a prompt more for each, of those with the shortest prompts."""
    assert least_possible(rollouts_of(groups), parts) == least


@settings(deadline=None)
@given(GROUPS, st.integers(1, 400), st.integers(0, 4))
def test_passes_keep_budget_and_order_and_none_could_be_joined_to_the_next(
    sizes: list[tuple[int, list[int]]], budget: int, wanted: int
) -> None:
    rollouts = rollouts_of(sizes)
    runs = micro_batches(rollouts, budget, wanted)
    assert list(itertools.chain(*runs)) == rollouts
    for run in runs:
        assert len(run) == 1 or distinct_tokens(run) <= budget
        assert len(run) == 1 or sum(piece.repeated for piece in run) <= REPEATS * budget
    for one, two in itertools.pairwise(runs):
        before = [piece for piece in one if piece.group != two[0].group]
        if before and before != one:  # a group is cut to fill a run that has begun
            assert two[0].shared * PASS_SHARE <= budget - distinct_tokens(before)
    if wanted == 0:
        for one, two in itertools.pairwise(runs):
            room = budget - distinct_tokens(one)
            joined = [*one, *two]
            begins = two[0].shared * PASS_SHARE > room and one[-1].group != two[0].group
            fits = distinct_tokens(joined) <= budget and sum(p.repeated for p in joined) <= REPEATS * budget
            assert begins or not fits


@pytest.mark.parametrize("ranks", [1, 8, 64])
@pytest.mark.parametrize(("prompt", "reply"), [(2048, 512), (1024, 1024), (512, 2048)])
def test_ranks_compute_little_more_than_sharing_allows(prompt: int, reply: int, ranks: int) -> None:
    rollouts = prompts(32, 8, prompt, reply)
    found = divided(rollouts, ranks)
    work = sum(map(distinct_tokens, found)) / ranks
    assert work <= 1.1 * least_possible(rollouts, ranks)
    assert max(map(distinct_tokens, found)) <= 1.25 * least_possible(rollouts, ranks)


def test_a_group_is_cut_only_where_that_is_cheaper() -> None:
    rollouts = prompts(4, 8, 1000, 30)
    for part in divided(rollouts, 4):
        assert len({piece.group for piece in part}) == 1
    assert all(divided(prompts(1, 8, 10, 300), 4))
    whole = micro_batches(prompts(3, 8, 1000, 30), 2300)
    assert [len(run) for run in whole] == [8, 8, 8]
    assert len(micro_batches(prompts(4, 8, 10, 300), 4000)) == 3


def test_keys_of_a_shared_prefix_have_room() -> None:
    """Attention copies them for each sequence, so a thousand short replies do not go into one pass."""
    runs = micro_batches(prompts(1, 64, 1000, 3), 1500)
    assert max(sum(piece.repeated for piece in run) for run in runs) <= REPEATS * 1500
    assert list(itertools.chain(*runs)) == prompts(1, 64, 1000, 3)
