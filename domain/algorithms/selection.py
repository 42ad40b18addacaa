"""Selection of judged replies that a model learns from: the best of each prompt, the best against the worst, or all of
them, each with what it is worth.

Replies that were cut off, that are empty or that nothing judged are left out first: learning from a reply that was cut
off would teach to end there. Every reply or group that is left out is counted by its reason.
"""

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence

from attrs import frozen

from rollgrad.domain.algorithms.equality import are_apart, differ, reaches

MIN_STD = 1e-8
"""Least standard deviation that rewards are divided by: equal ones become 0."""


@frozen(kw_only=True)
class Judged:
    """A reply, sample `sample` of prompt `row`, with its text and its reward (None: none applies). `truncated`: it was
    cut off."""

    row: int
    sample: int
    text: str
    reward: float | None
    truncated: bool = False


@frozen(kw_only=True)
class Selected:
    """Selected replies, `kept`, and the number of replies, or of prompts, that were left out, by the reason."""

    kept: tuple[Judged, ...]
    dropped: "Counter[str]"


@frozen(kw_only=True)
class Pairs:
    """The chosen and the rejected reply to each prompt, `kept`, and the number of replies, or of prompts, that were
    left out, by the reason."""

    kept: tuple[tuple[Judged, Judged], ...]
    dropped: "Counter[str]"


def usable(replies: Iterable[Judged]) -> Selected:
    """Returns the replies that can be learned from."""
    kept: list[Judged] = []
    dropped: Counter[str] = Counter()
    for reply in replies:
        if reply.reward is None:
            dropped["not judged"] += 1
        elif reply.truncated:
            dropped["cut off"] += 1
        elif not reply.text.strip():
            dropped["empty"] += 1
        else:
            kept.append(reply)
    return Selected(kept=tuple(kept), dropped=dropped)


def best(
    replies: Iterable[Judged], *, top_k: int = 1, min_reward: float | None = None, min_margin: float = 0.0
) -> Selected:
    """Returns the `top_k` best different replies to each prompt, the earlier one of two that are equally good.

    Args:
        replies: replies to any number of prompts.
        top_k: replies to each prompt that are kept.
        min_reward: least reward of a kept reply; None keeps any.
        min_margin: least difference between the best and the worst reply to a prompt; of others none is kept.

    >>> rewards = [0.0, 1.0, 0.5]
    >>> replies = [Judged(row=0, sample=i, text=str(i), reward=reward) for i, reward in enumerate(rewards)]
    >>> [reply.sample for reply in best(replies, top_k=2).kept]
    [1, 2]
    """
    first = usable(replies)
    kept: list[Judged] = []
    dropped = Counter(first.dropped)
    for group in _groups(first.kept):
        ranked = _ranked(group)
        if not are_apart(_reward(ranked[-1]), _reward(ranked[0]), min_margin):
            dropped["prompts below min_margin"] += 1
            continue
        different = list({reply.text: reply for reply in reversed(ranked)}.values())[::-1]
        dropped["repeated"] += len(ranked) - len(different)
        good = [reply for reply in different if min_reward is None or reaches(_reward(reply), min_reward)]
        dropped["below min_reward"] += len(different) - len(good)
        dropped["not among the best"] += max(0, len(good) - top_k)
        kept += good[:top_k]
    return Selected(kept=tuple(kept), dropped=+dropped)


def best_against_worst(replies: Iterable[Judged], *, min_margin: float = 0.0) -> Pairs:
    """Returns the best and the worst reply to each prompt; prompts whose replies are all equally good have no pair.

    `min_margin`: least difference between the two rewards.

    >>> rewards = {0: [0.5, 1.0], 1: [1.0, 1.0]}
    >>> pairs = best_against_worst(
    ...     Judged(row=row, sample=i, text=str(i), reward=reward)
    ...     for row, group in rewards.items()
    ...     for i, reward in enumerate(group)
    ... )
    >>> [(chosen.sample, rejected.sample) for chosen, rejected in pairs.kept], dict(pairs.dropped)
    ([(1, 0)], {'prompts without spread': 1})
    """
    first = usable(replies)
    kept: list[tuple[Judged, Judged]] = []
    dropped = Counter(first.dropped)
    for group in _groups(first.kept):
        ranked = _ranked(group)
        chosen, rejected = ranked[0], ranked[-1]
        if not differ([_reward(chosen), _reward(rejected)]):
            dropped["prompts without spread"] += 1
        elif not are_apart(_reward(rejected), _reward(chosen), min_margin):
            dropped["prompts below min_margin"] += 1
        elif chosen.text == rejected.text:
            dropped["prompts whose pair is equal"] += 1
        else:
            kept.append((chosen, rejected))
    return Pairs(kept=tuple(kept), dropped=dropped)


def standardised(rewards: Sequence[float]) -> list[float]:
    """Returns rewards minus their mean, over their unbiased standard deviation.

    >>> standardised([1.0, 2.0, 3.0])
    [-1.0, 0.0, 1.0]
    >>> standardised([2.0])
    [0.0]
    """
    mean = statistics.fmean(rewards)
    std = statistics.stdev(rewards) if len(rewards) > 1 else 0.0
    return [(reward - mean) / max(std, MIN_STD) for reward in rewards]


def _groups(replies: Iterable[Judged]) -> list[list[Judged]]:
    groups: dict[int, list[Judged]] = {}
    for reply in replies:
        groups.setdefault(reply.row, []).append(reply)
    return list(groups.values())


def _ranked(group: Iterable[Judged]) -> list[Judged]:
    return sorted(group, key=lambda reply: (-_reward(reply), reply.sample))


def _reward(reply: Judged) -> float:
    assert reply.reward is not None  # `usable`
    return reply.reward
