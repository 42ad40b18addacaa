"""Experts of tokens, as several requests of an episode recorded them."""

import torch

from rollgrad.domain.batches.packed import pack
from rollgrad.domain.episodes.generation import Generation, StopReason
from rollgrad.domain.episodes.routed import RoutedTokens, experts_type, unrecorded
from rollgrad.domain.episodes.trajectory import Trajectory, TrajectoryBuilder

NONE = 255


def routed(start: int, *experts: int) -> RoutedTokens:
    return RoutedTokens(start=start, experts_RLK=torch.tensor(experts, dtype=torch.uint8)[:, None, None])


def trajectory(*parts: RoutedTokens, before: tuple[RoutedTokens, ...] = ()) -> Trajectory:
    """A prompt of three tokens and a reply of two."""
    builder = TrajectoryBuilder([1, 2, 3], group_id=0, sample_id=0)
    builder.add_routed(before)
    builder.add_action(
        Generation(token_ids=[4, 5], logprobs=[-1.0, -1.0], versions=[0, 0], stop_reason=StopReason.STOP, routed=parts)
    )
    return builder.build(stop_reason=StopReason.STOP)


def experts(of: Trajectory) -> list[int] | None:
    return None if of.experts_TLK is None else of.experts_TLK.flatten().tolist()


def test_what_was_recorded_first_stays_and_the_rest_is_marked() -> None:
    assert experts(trajectory()) is None
    assert experts(trajectory(routed(0, 7, 7, 7, 7))) == [7, 7, 7, 7, NONE]
    assert experts(trajectory(routed(1, 8, 8, 8), before=(routed(0, 7, 7),))) == [7, 7, 8, 8, NONE]
    assert experts(trajectory(routed(2, 8, 8))) == [NONE, NONE, 8, 8, NONE]
    assert experts(trajectory(routed(0, 7, 7, 7), routed(0, 8, 8, 8, 8, 8))) == [7, 7, 7, 8, 8]


def test_a_batch_has_them_where_any_trajectory_does() -> None:
    some, none = trajectory(routed(0, 7, 7, 7, 7)), trajectory()
    assert pack([none, none]).experts_NLK is None
    batch = pack([none, some])
    assert batch.experts_NLK is not None
    assert batch.experts_NLK.flatten().tolist() == [NONE] * 5 + [7, 7, 7, 7, NONE]
    chosen = batch.select([1]).experts_NLK
    assert chosen is not None
    assert chosen.flatten().tolist() == [7, 7, 7, 7, NONE]


def test_a_number_is_left_for_those_that_nobody_recorded() -> None:
    for count in (4, 254, 255, 256, 512):
        assert unrecorded(torch.zeros(1, dtype=experts_type(count))) >= count
