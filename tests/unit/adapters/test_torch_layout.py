"""Every prompt is laid out once, and every token of the batch has its place."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rollgrad.adapters.models.torch.layers.layout import build_layout, prefill_layout
from rollgrad.domain.batches.packed import pack
from rollgrad.testing.agent_executor import make_trajectory

tokens = st.lists(st.integers(0, 3), min_size=1, max_size=5)
samples = st.tuples(st.integers(0, 2), tokens, tokens)


@settings(max_examples=50, deadline=None)
@given(st.lists(samples, min_size=1, max_size=8))
def test_each_token_of_the_batch_lies_where_the_layout_says(rows: list[tuple[int, list[int], list[int]]]) -> None:
    batch = pack([make_trajectory(p, a, group_id=g, sample_id=i) for i, (g, p, a) in enumerate(rows)])
    layout = build_layout(batch)
    assert torch.equal(layout.tokens_M[layout.index_N], batch.tokens_N)
    assert torch.equal(layout.positions_M[layout.index_N], batch.positions_N)
    covered = [index for node in layout.nodes for index in range(node.start, node.start + node.length)]
    assert covered == list(range(len(layout.tokens_M)))
    assert set(layout.index_N.tolist()) == set(covered)


@settings(max_examples=50, deadline=None)
@given(st.lists(samples, min_size=1, max_size=8))
def test_a_tokens_path_is_its_own_sequence(rows: list[tuple[int, list[int], list[int]]]) -> None:
    batch = pack([make_trajectory(p, a, group_id=g, sample_id=i) for i, (g, p, a) in enumerate(rows)])
    layout = build_layout(batch)
    node_of = {i: node for node in layout.nodes for i in range(node.start, node.start + node.length)}
    for start, length in zip(batch.starts_S.tolist(), batch.lengths_S.tolist(), strict=True):
        last = node_of[int(layout.index_N[start + length - 1])]
        path = last.path()[:length]  # a sequence may be the beginning of another
        assert layout.tokens_M[path].tolist() == batch.tokens_N[start : start + length].tolist()


def test_branches_are_a_trie() -> None:
    """Each history that several branches begin with is laid out once, in whatever order they come."""
    main, helper = [1, 2, 3], [8, 9]
    rows = [(main, [4, 5]), (helper, [1]), ([*main, 6], [4, 5]), ([*main, 6, 4], [7]), (helper, [2])]
    layout = build_layout(pack([make_trajectory(p, a, group_id=0, sample_id=0) for p, a in rows]))
    assert sorted(layout.tokens_M.tolist()) == sorted([1, 2, 3, 4, 5, 6, 4, 5, 7, 8, 9, 1, 2])
    assert max(len(node.prefix) for node in layout.nodes) == 2


def test_sequences_of_one_group_share() -> None:
    same = [make_trajectory([1, 2, 3], [4], group_id=0, sample_id=i) for i in range(3)]
    other_group = make_trajectory([1, 2, 3], [4], group_id=1, sample_id=3)
    other_prompt = make_trajectory([1, 2, 9], [4], group_id=1, sample_id=4)
    layout = build_layout(pack([*same, other_group, other_prompt]))
    assert len(layout.tokens_M) == (3 + 1) + (3 + 1) + (1 + 1)


def test_independent_prompts_have_a_node_each() -> None:
    layout, leaves = prefill_layout([(5, 6, 7), (8,)])
    assert layout.tokens_M.tolist() == [5, 6, 7, 8]
    assert layout.positions_M.tolist() == [0, 1, 2, 0]
    assert [(leaf.start, leaf.length, leaf.keys) for leaf in leaves] == [(0, 3, 3), (3, 1, 1)]


def test_what_all_prompts_begin_with_is_laid_out_once() -> None:
    layout, leaves = prefill_layout([(1, 2, 3, 4), (1, 2, 5), (1, 2, 3)])
    assert layout.tokens_M.tolist() == [1, 2, 3, 4, 5, 3]
    assert layout.positions_M.tolist() == [0, 1, 2, 3, 2, 2]
    assert [leaf.keys for leaf in leaves] == [4, 3, 3]


def test_a_prompt_that_begins_another_keeps_a_token_of_its_own() -> None:
    layout, leaves = prefill_layout([(1, 2), (1, 2, 3)])
    assert layout.tokens_M.tolist() == [1, 2, 2, 3]
    assert [leaf.length for leaf in leaves] == [1, 2]
