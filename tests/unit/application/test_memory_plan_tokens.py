"""The tokens that the memory plan takes for a pass are the most that a pass has when batches are divided."""

import math

import hypothesis.strategies as st
import pytest
from attrs import evolve
from hypothesis import example, given, settings

from rollgrad.application.learning.microbatch import split
from rollgrad.application.settings.memory_plan_tokens import REPEATS, group_tokens, pass_tokens
from rollgrad.application.settings.model_shape import ModelShape, PassMemory
from rollgrad.application.settings.run import RLConfig
from rollgrad.domain.batches import partition
from rollgrad.domain.batches.packed import PackedBatch, pack
from rollgrad.domain.batches.prefixes import shared_prefixes
from rollgrad.testing.agent_executor import make_trajectory

PACKED = ModelShape(
    parameters=1000, layers=3, hidden=8, kv_heads=2, head_dim=4, passes=PassMemory(scored=((16, 1), (32, 2)))
)
PADDED = evolve(PACKED, passes=PassMemory(scored=((16, 1), (32, 2)), padded=True))
PROMPT, REPLY = 20, 6


def config_of(groups: int, samples: int, budget: int) -> RLConfig:
    config = RLConfig()
    config.rollout.batch_size, config.rollout.n_samples_per_prompt = groups, samples
    config.data.max_prompt_tokens, config.rollout.max_new_tokens = PROMPT, REPLY
    config.train.max_tokens_per_micro_batch = budget
    return config


def batch_of(prompts: list[int], replies: list[list[int]]) -> PackedBatch:
    """Returns samples in groups: each has the group's prompt, of so many tokens, and a reply of its own."""
    made = []
    for group, (prompt, lengths) in enumerate(zip(prompts, replies, strict=True)):
        for sample, length in enumerate(lengths):
            own = [100 + sample] + [7] * (length - 1)
            made.append(make_trajectory([group] * prompt, own, group_id=group, sample_id=len(made)))
    return pack(made)


def most(batch: PackedBatch, budget: int, shares: int) -> tuple[int, int]:
    """Returns the distinct tokens of the largest share of a pass, and the most tokens with repeats."""
    found = []
    for shares_of_pass in split(batch, budget * shares, shares).plan:
        for sequences in filter(None, shares_of_pass):
            part = batch.select(sequences)
            lengths = part.lengths_S.tolist()
            found.append((shared_prefixes(part).distinct(lengths), sum(lengths)))
    return max(distinct for distinct, _ in found), max(repeated for _, repeated in found)


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[int], list[list[int]]]:
    groups, samples = draw(st.integers(1, 6)), draw(st.integers(1, 8))
    long = st.one_of(st.just(PROMPT), st.integers(1, PROMPT))
    reply = st.one_of(st.just(REPLY), st.integers(1, REPLY))
    prompts = draw(st.lists(long, min_size=groups, max_size=groups))
    return prompts, [draw(st.lists(reply, min_size=samples, max_size=samples)) for _ in prompts]


@settings(deadline=None)
@given(batches(), st.integers(1, 400), st.integers(1, 4))
@example(([PROMPT] * 3, [[REPLY] * 8] * 3), 400, 1)
@example(([PROMPT], [[REPLY] * 8]), 400, 4)
def test_no_pass_has_more(drawn: tuple[list[int], list[list[int]]], budget: int, shares: int) -> None:
    prompts, replies = drawn
    config = config_of(len(prompts), len(replies[0]), budget)
    config.cluster.enable, config.actor.num_gpus_per_node = True, shares
    planned = pass_tokens(config, PACKED, shares)
    distinct, repeated = most(batch_of(prompts, replies), budget, shares)
    assert distinct <= math.ceil(partition.NEARLY_FAIR * planned.distinct)
    assert repeated <= max(planned.distinct + planned.repeated, distinct)


@pytest.mark.parametrize(("groups", "samples", "shares"), [(3, 8, 1), (4, 2, 2), (5, 8, 5), (2, 1, 1)])
def test_samples_as_long_as_they_may_be_have_as_many(groups: int, samples: int, shares: int) -> None:
    config = config_of(groups, samples, 1000)
    config.cluster.enable, config.actor.num_gpus_per_node = True, shares
    planned = pass_tokens(config, PACKED, shares)
    distinct, repeated = most(batch_of([PROMPT] * groups, [[REPLY] * samples] * groups), 1000, shares)
    assert planned.distinct == distinct == math.ceil(groups / shares) * (PROMPT + samples * REPLY)
    if shares == 1:  # of several shares one may have more repeats than others
        assert planned.distinct + planned.repeated == repeated


def test_prompts_that_may_not_be_shared_are_counted_with_each_sample() -> None:
    config, all_samples = config_of(3, 8, 1000), 3 * 8 * (PROMPT + REPLY)
    assert pass_tokens(config, PACKED, 1).distinct == 3 * (PROMPT + 8 * REPLY)
    for shape in (PADDED, evolve(PACKED, passes=None)):
        assert pass_tokens(config, shape, 1).distinct == all_samples
        assert pass_tokens(config, shape, 1).repeated == 0
    assert pass_tokens(config, PACKED, 1, told=5).distinct == all_samples + 3 * 8 * 5
    config.train.agent_func_path = "agent.py"  # whose samples may have several sequences each
    assert pass_tokens(config, PACKED, 1).distinct == 1000
    assert pass_tokens(config, PACKED, 1).repeated == (REPEATS - 1) * 1000


def test_an_optimizer_step_has_a_part_of_the_samples() -> None:
    config = config_of(3, 8, 1000)
    config.train.batch_size = 2
    assert pass_tokens(config, PACKED, 1, trained=True).distinct == 2 * (PROMPT + REPLY)
    assert pass_tokens(config, PACKED, 1).distinct == 3 * (PROMPT + 8 * REPLY)


def test_samples_of_an_odd_number_are_not_divided_equally() -> None:
    """One of two processes has two of three samples."""
    config = config_of(3, 1, 1000)
    config.cluster.enable, config.actor.num_gpus_per_node = True, 2
    assert pass_tokens(config, PACKED, 2).distinct == 2 * (PROMPT + REPLY)


@pytest.mark.parametrize("budget", [8, 12, 22, 30])
def test_where_prompt_and_reply_share_a_budget_a_shorter_prompt_leaves_more(budget: int) -> None:
    config = config_of(1, 8, 1000)
    config.data.max_len = budget
    most_tokens = max(p + 8 * min(REPLY, budget - p) for p in range(min(PROMPT, budget - 1) + 1))
    assert group_tokens(config) == most_tokens


def test_repeats_are_bounded_as_passes_bound_them() -> None:
    assert REPEATS == partition.REPEATS
