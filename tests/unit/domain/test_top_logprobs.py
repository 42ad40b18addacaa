"""Likely tokens on their way from a reply to a batch."""

import math

import pytest
import torch

from rollgrad.domain.batches.packed import pack
from rollgrad.domain.episodes.generation import Generation, StopReason
from rollgrad.domain.episodes.top_logprobs import NOBODY, TopLogprobs, end_to_end
from rollgrad.domain.episodes.trajectory import Trajectory, TrajectoryBuilder
from rollgrad.domain.errors import TrajectoryError

PAIRS = [[(7, -0.5), (3, -1.0)], [], [(5, -0.25)]]


def test_pairs_come_back_as_they_were() -> None:
    tokens = TopLogprobs.of(PAIRS)
    assert [*tokens] == PAIRS
    assert [*tokens.widened(4)] == PAIRS
    assert [*tokens[1:]] == PAIRS[1:]
    assert [*tokens.narrowed(1)] == [pairs[:1] for pairs in PAIRS]
    assert TopLogprobs.of(tokens) is tokens
    assert (tokens.ids_RK.dtype, tokens.logprobs_RK.dtype) == (torch.int32, torch.float32)


def test_parts_of_a_reply_may_have_told_different_numbers() -> None:
    more = [[(1, -0.5), (2, -1.0), (4, -2.0)]]
    assert [*end_to_end([PAIRS, more])] == [*PAIRS, *more]
    assert [*end_to_end([])] == []


def reply(*tokens: int, told: bool = True) -> Generation:
    pairs = [[(token, -0.5), (token + 1, -1.5)] for token in tokens]
    return Generation(
        token_ids=tokens,
        logprobs=[-0.5] * len(tokens),
        versions=[0] * len(tokens),
        stop_reason=StopReason.STOP,
        top_logprobs=pairs if told else (),
    )


def trajectory(*replies: Generation, sample: int = 0) -> Trajectory:
    builder = TrajectoryBuilder([1, 2], group_id=0, sample_id=sample)
    for each in replies:
        builder.add_action(each)
        builder.add_observation([9])
    return builder.build(stop_reason=StopReason.STOP)


def test_each_sampled_token_has_them_at_its_place() -> None:
    told = trajectory(reply(10, 20), reply(30)).top_logprobs
    assert told is not None
    assert [*told] == [[(10, -0.5), (11, -1.5)], [(20, -0.5), (21, -1.5)], [(30, -0.5), (31, -1.5)]]
    half = trajectory(reply(10, told=False), reply(30)).top_logprobs
    assert half is not None
    assert [*half] == [[], [(30, -0.5), (31, -1.5)]]
    assert trajectory(reply(10, told=False)).top_logprobs is None


def test_a_reply_says_them_at_each_place_or_at_none() -> None:
    wrong = reply(10, 20)
    builder = TrajectoryBuilder([1], group_id=0, sample_id=0)
    generation = Generation(
        token_ids=wrong.token_ids,
        logprobs=wrong.logprobs,
        versions=wrong.versions,
        stop_reason=StopReason.STOP,
        top_logprobs=[[(1, -0.5)]],
    )
    with pytest.raises(TrajectoryError, match="2 tokens, and the likeliest ones at 1 places"):
        builder.add_action(generation)


def test_a_batch_has_them_as_columns() -> None:
    batch = pack([trajectory(reply(10)), trajectory(reply(20), reply(30), sample=1), trajectory(reply(40, told=False))])
    assert batch.sampler_ids_NK is not None
    assert batch.sampler_logprobs_NK is not None
    assert batch.sampler_ids_NK.shape == batch.sampler_logprobs_NK.shape == (batch.token_count, 2)
    places = batch.action_mask_N.nonzero()[:, 0]
    assert batch.sampler_ids_NK[places[:3], 0].tolist() == [10, 20, 30]
    assert batch.sampler_logprobs_NK[places[3]].tolist() == [NOBODY, NOBODY] == [-math.inf, -math.inf]
    assert not batch.sampler_logprobs_NK[~batch.action_mask_N].any()
    one = batch.select([1])
    assert one.sampler_ids_NK is not None
    assert one.sampler_ids_NK[one.action_mask_N, 0].tolist() == [20, 30]
    assert pack([trajectory(reply(40, told=False))]).sampler_ids_NK is None
