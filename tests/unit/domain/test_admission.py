"""The limit of the episodes in flight follows what engines keep of them."""

import random
from collections import OrderedDict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollgrad.domain.control.admission import BLOCK, LEAST, Admission

TURNS, TURN_TOKENS = 10, 1000


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 300), st.booleans(), st.integers(0, 2**32))
def test_the_limit_stays_within_its_bounds(most: int, adapts: bool, seed: int) -> None:
    chance = random.Random(seed)
    admission = Admission(most, adapts)
    for _ in range(500):
        if admission.running and chance.random() < 0.4:
            admission.ended()
        elif admission.running < admission.limit:
            admission.began()
        else:
            admission.waited()
        continued = chance.randint(1, 10**5)
        admission.answered(continued, chance.randint(0, continued))
        assert min(most, LEAST) <= admission.limit <= most
        assert admission.running <= most
        assert adapts or admission.limit == most


def played(
    capacity: int, most: int, episodes: int, *, adapts: bool = True, keeps: bool = True
) -> tuple[Admission, float, float]:
    """An engine that keeps so many tokens, of the latest episodes first, and so many episodes that take turns in random
    order; the share of tokens that it computed again in the second half, and the mean limit there."""
    admission, chance = Admission(most, adapts), random.Random(0)
    limits: list[int] = []
    kept: OrderedDict[int, int] = OrderedDict()
    turns: dict[int, int] = {}
    begun = tokens = lost = 0
    while begun < episodes or turns:
        while begun < episodes and admission.running < admission.limit:
            admission.began()
            turns[begun] = 0
            begun += 1
        if begun < episodes:
            admission.waited()
        episode = chance.choice([*turns])
        had, want = kept.pop(episode, 0), turns[episode] * TURN_TOKENS
        if turns[episode]:
            admission.answered(want, had)
            if episodes // 2 < begun < episodes:
                limits.append(admission.limit)
                tokens, lost = tokens + want, lost + want - had
        turns[episode] += 1
        if keeps:
            kept[episode] = turns[episode] * TURN_TOKENS
            while sum(kept.values()) > capacity:
                kept.popitem(last=False)
        if turns[episode] == TURNS:
            del turns[episode]
            admission.ended()
    return admission, lost / max(1, tokens), sum(limits) / len(limits)


def test_as_many_episodes_as_the_engine_keeps_are_in_flight() -> None:
    """Histories have half of their last length on average."""
    room = 40
    capacity = room * TURNS * TURN_TOKENS // 2
    _, share_without, _ = played(capacity, 400, 1500, adapts=False)
    _, share, limit = played(capacity, 400, 1500)
    assert share_without > 0.8
    assert share < 0.1
    assert room // 2 <= limit <= 3 * room // 2


def test_what_an_engine_has_room_for_is_not_limited() -> None:
    admission, share, limit = played(10**9, 100, 500)
    assert (admission.limit, share, limit) == (100, 0.0, 100.0)


def test_a_limit_rises_again_when_histories_get_shorter() -> None:
    admission = Admission(64, adapts=True)
    for _ in range(64):
        admission.began()
    for continued, kept, limit in ((1000, 0, LEAST), (1000, 1000, 64)):
        for _ in range(50 * 64):
            while admission.running > admission.limit:
                admission.ended()
            while admission.running < admission.limit:
                admission.began()
            admission.waited()
            admission.answered(continued, kept + (kept == 0) * 200)
        assert admission.limit == limit


def test_an_engine_that_keeps_nothing_is_not_helped_by_fewer() -> None:
    admission, _, _ = played(0, 100, 2000, keeps=False)
    assert admission.useless
    assert admission.limit == 100


def test_metrics_are_of_the_time_since_the_last() -> None:
    admission = Admission(50)
    assert admission.metrics() == {}
    admission.answered(1000, 1000 - BLOCK)
    admission.answered(3000, 1000 - BLOCK)
    assert admission.metrics() == {"rollout/recomputed_share": 0.5, "rollout/concurrency_limit": 50.0}
    assert admission.metrics() == {}


@pytest.mark.parametrize("kept", [0, BLOCK])
def test_a_part_of_a_block_is_not_lost(kept: int) -> None:
    admission = Admission(50)
    admission.answered(BLOCK + kept, kept)
    assert admission.metrics()["rollout/recomputed_share"] == 0.0


def test_a_limit_rises_only_after_rounds_in_which_an_episode_has_waited() -> None:
    admission = Admission(100, adapts=True)
    limits = [admission.limit]
    for waits in (True, False, True):
        if waits:
            admission.waited()
        for _ in range(LEAST):
            admission.answered(1000, 1000)
        limits.append(admission.limit)
    assert limits == [64, 72, 72, 81]
