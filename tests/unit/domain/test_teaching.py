"""A teacher that is told more reads the same replies, token for token, in any division of the batch."""

import torch
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rollgrad.application.learning.microbatch import split
from rollgrad.domain.batches.packed import PackedBatch, RolloutBatch, pack
from rollgrad.domain.batches.teaching import as_taught
from rollgrad.testing.agent_executor import make_trajectory

GROUPS = st.lists(
    st.tuples(st.integers(1, 4), st.integers(1, 6), st.lists(st.integers(1, 5), min_size=1, max_size=3)),
    min_size=1,
    max_size=4,
)
"""Tokens of each group's prompt, of what the teacher reads in its place, and of each reply."""


def told_batch(groups: list[tuple[int, int, list[int]]]) -> RolloutBatch:
    trajectories, told = [], []
    for group, (prompt, more, replies) in enumerate(groups):
        for reply in replies:
            sample = len(trajectories)
            tokens = [100 + sample] * reply
            trajectories.append(make_trajectory([10 + group] * prompt, tokens, group_id=group, sample_id=sample))
            told.append(tuple(range(200 + 10 * group, 200 + 10 * group + more)))
    return evolve(pack(trajectories), teacher_prompts_S=tuple(told))


def histories(batch: PackedBatch) -> Tensor:
    """A number for each action token that tells all tokens of its sequence up to it."""
    found = []
    for start, stop in (batch.runs(torch.tensor([sequence]))[0] for sequence in range(len(batch))):
        value = 0.0
        for token, action in zip(batch.tokens_N[start:stop].tolist(), batch.action_mask_N[start:stop], strict=True):
            value = (31.0 * value + token) % 100_003
            if action:
                found.append(value)
    return torch.tensor(found, dtype=torch.float64)


@settings(max_examples=60, deadline=None)
@given(GROUPS)
def test_the_teacher_reads_its_prompt_and_then_the_same_reply(groups: list[tuple[int, int, list[int]]]) -> None:
    batch = told_batch(groups)
    taught = as_taught(batch)
    for sequence, told in enumerate(batch.teacher_prompts_S):
        (own,), (its,) = batch.runs(torch.tensor([sequence])), taught.runs(torch.tensor([sequence]))
        reply = batch.tokens_N[slice(*own)][batch.action_mask_N[slice(*own)]].tolist()
        assert taught.tokens_N[slice(*its)].tolist() == [*told, *reply]
        assert taught.action_mask_N[slice(*its)].tolist() == [False] * len(told) + [True] * len(reply)
    assert torch.equal(taught.tokens_N[taught.action_mask_N], batch.tokens_N[batch.action_mask_N])
    assert taught.prompt_lengths_S.tolist() == [len(told) for told in batch.teacher_prompts_S]
    assert torch.equal(taught.group_ids_S, batch.group_ids_S)


@settings(max_examples=60, deadline=None)
@given(GROUPS, st.integers(2, 30), st.integers(1, 3))
def test_any_division_reads_the_same(groups: list[tuple[int, int, list[int]]], budget: int, shares: int) -> None:
    """The policy's passes are turned into the teacher's one by one, or the teacher's batch is divided itself."""
    batch = told_batch(groups)
    wanted = histories(as_taught(batch))

    def placed(part: PackedBatch, read: PackedBatch) -> Tensor:
        return torch.zeros(part.token_count, dtype=torch.float64).masked_scatter(part.action_mask_N, histories(read))

    passes = split(batch, budget * shares, shares)
    found_N = passes.merged([placed(part, as_taught(part)) for part in passes])
    assert torch.equal(found_N[batch.action_mask_N], wanted)
    taught = as_taught(batch)
    own = split(taught, budget * shares, shares)
    found_N = own.merged([placed(part, part) for part in own])
    assert torch.equal(found_N[taught.action_mask_N], wanted)


def test_a_teacher_that_is_told_nothing_reads_the_batch_itself() -> None:
    batch = evolve(told_batch([(2, 3, [1, 2])]), teacher_prompts_S=())
    assert as_taught(batch) is batch


def test_a_pass_of_the_teacher_is_divided_and_placed_as_that_of_the_policy() -> None:
    batch = evolve(
        told_batch([(2, 3, [1, 2]), (1, 4, [3])]),
        unit_ids_S=torch.tensor([4, 4, 9]),
        shares_S=torch.tensor([1, 0, 1]),
        shares=2,
        datasources_S=("sums", "sums", "words"),
    )
    taught = as_taught(batch)
    assert taught.unit_ids_S.tolist() == [4, 4, 9]
    assert taught.shares_S is not None
    assert (taught.shares_S.tolist(), taught.shares) == ([1, 0, 1], 2)
    assert taught.datasources_S == ("sums", "sums", "words")
