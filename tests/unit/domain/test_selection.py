"""Selection of judged replies."""

import statistics
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollgrad.domain.algorithms.selection import Judged, best, best_against_worst, standardised, usable

REWARDS = st.sampled_from([-1.0, 0.0, 0.5, 1.0])
REPLIES = st.lists(
    st.builds(
        Judged,
        row=st.integers(0, 2),
        sample=st.integers(0, 9),
        text=st.sampled_from(["a", "b", "c", " "]),
        reward=REWARDS | st.none(),
        truncated=st.booleans(),
    ),
    unique_by=lambda reply: (reply.row, reply.sample),
)


def judged(*rewards: float, text: str | None = None) -> list[Judged]:
    return [Judged(row=0, sample=i, text=text or str(i), reward=reward) for i, reward in enumerate(rewards)]


@given(REPLIES, st.integers(1, 3), REWARDS | st.none(), st.sampled_from([0.0, 0.5, 2.0]))
def test_every_reply_is_kept_or_counted(
    replies: list[Judged], top_k: int, min_reward: float | None, min_margin: float
) -> None:
    selected = best(replies, top_k=top_k, min_reward=min_reward, min_margin=min_margin)
    good = usable(replies).kept
    prompts = [prompt for prompt in {reply.row for reply in good} if _spread(good, prompt) < min_margin]
    assert selected.dropped["prompts below min_margin"] == len(prompts)
    left_out = sum(count for reason, count in selected.dropped.items() if not reason.startswith("prompts"))
    in_them = sum(reply.row in prompts for reply in good)
    assert len(selected.kept) + left_out + in_them == len(replies)
    for prompt in {reply.row for reply in selected.kept}:
        kept = [reply for reply in selected.kept if reply.row == prompt]
        assert len({reply.text for reply in kept}) == len(kept) <= top_k
        texts = {one.text for one in kept}
        others = [reply for reply in good if reply.row == prompt and reply.text not in texts]
        if len(kept) == top_k and others:
            assert max(other.reward or 0.0 for other in others) <= min(one.reward or 0.0 for one in kept)


@given(REPLIES)
def test_unusable_replies_are_counted_by_their_first_reason(replies: list[Judged]) -> None:
    reasons = {
        "not judged": lambda reply: reply.reward is None,
        "cut off": lambda reply: reply.truncated,
        "empty": lambda reply: reply.text == " ",
    }
    found = [next((reason for reason, holds in reasons.items() if holds(reply)), None) for reply in replies]
    selected = usable(replies)
    assert selected.kept == tuple(reply for reply, reason in zip(replies, found, strict=True) if reason is None)
    assert selected.dropped == Counter(reason for reason in found if reason is not None)


def _spread(replies: tuple[Judged, ...], prompt: int) -> float:
    rewards = [reply.reward for reply in replies if reply.row == prompt and reply.reward is not None]
    return max(rewards) - min(rewards)


@given(REPLIES)
def test_a_pair_has_a_spread(replies: list[Judged]) -> None:
    pairs = best_against_worst(replies)
    for chosen, rejected in pairs.kept:
        group = [reply.reward for reply in usable(replies).kept if reply.row == chosen.row]
        assert chosen.row == rejected.row
        assert (chosen.reward, rejected.reward) == (max(map(float, group)), min(map(float, group)))  # type: ignore[arg-type]
        assert chosen.reward != rejected.reward
        assert chosen.text != rejected.text


def test_groups_without_spread_are_counted() -> None:
    assert best_against_worst(judged(1.0, 1.0)).dropped == {"prompts without spread": 1}
    assert best_against_worst(judged(0.1 + 0.2, 0.3)).dropped == {"prompts without spread": 1}
    assert best_against_worst(judged(1.0, 0.8), min_margin=0.5).dropped == {"prompts below min_margin": 1}
    assert best_against_worst(judged(1.0, 0.0, text="same")).dropped == {"prompts whose pair is equal": 1}


def test_bounds_are_reached_whatever_rounding_leaves_of_rewards() -> None:
    assert 0.7 - 0.2 < 0.5
    assert 0.1 + 0.7 < 0.8
    assert len(best_against_worst(judged(0.7, 0.2), min_margin=0.5).kept) == 1
    assert len(best(judged(0.7, 0.2), min_margin=0.5).kept) == 1
    assert len(best(judged(0.1 + 0.7), min_reward=0.8).kept) == 1
    assert best(judged(0.7, 0.2001), min_margin=0.5).dropped == {"prompts below min_margin": 1}


def test_equally_good_replies_keep_their_order() -> None:
    assert [reply.sample for reply in best(judged(0.0, 1.0, 1.0), top_k=2).kept] == [1, 2]
    assert best(judged(0.0, 1.0, 1.0), min_reward=2.0).dropped == {"below min_reward": 3}


@pytest.mark.parametrize("rewards", [[0.0, 1.0, 3.0], [5.0, 5.0], [2.0]])
def test_rewards_are_standardised_without_bias(rewards: list[float]) -> None:
    found = standardised(rewards)
    assert statistics.fmean(found) == pytest.approx(0)
    if len(set(rewards)) > 1:
        assert statistics.stdev(found) == pytest.approx(1)
    else:
        assert found == [0.0] * len(rewards)
