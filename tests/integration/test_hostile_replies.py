"""Replies that attack their judges: each has no effect but its own verdict. The full form is tests.hostile_replies."""

from collections.abc import Iterator
from itertools import cycle, islice

import pytest

from rollgrad.adapters.data.reasoning_gym.source import ReasoningGymReward
from rollgrad.application.settings.sections.reward import Verifier
from rollgrad.domain.episodes.rewards import Reward
from tests.hostile_replies import (
    EVALUATING,
    LENIENT,
    NUMBERS,
    Traps,
    ask,
    certain,
    code,
    entry,
    forms,
    replies,
    score,
    tasks,
    traps,
    verifiers,
)

TIMEOUT, SHORT = 1.0, 0.25
"""Some replies use all of it. What must not be late is asked again; verifiers need less than scorers."""


@pytest.fixture
def set_traps(monkeypatch: pytest.MonkeyPatch) -> Iterator[Traps]:
    monkeypatch.setenv("ROLLGRAD_TEST_SECRET", "hunter2")
    with traps() as made:
        yield made


def earned(reply: str, reward: Reward) -> bool:
    """Returns whether an attack is worth as much as a right answer."""
    return reward.value >= 1.0 and reply not in NUMBERS


def test_there_are_enough_replies(set_traps: Traps) -> None:
    assert len(replies(set_traps)) >= 200


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "every"),
    [(Verifier.MATH, 2), *(pytest.param(kind, 1, marks=pytest.mark.wide) for kind in Verifier)],
)
def test_verifiers(kind: Verifier, every: int, set_traps: Traps) -> None:
    """Asked are all attacks, and of their wrapped forms and of other replies every one or every second."""
    judge, right, wrong = verifiers(SHORT)[kind]
    texts, attacks = replies(set_traps), len(code(set_traps))
    texts = texts[:attacks] + texts[attacks::every]
    asked = [ask(forms(reply)[n % 4], "7") for n, reply in enumerate(texts)]
    rewards = score(judge, asked)
    assert len(rewards) == len(asked)
    assert {reward.value for reward in rewards} <= {0.0, 1.0}
    assert set_traps.sprung() == []
    for _ in range(4):  # on every process
        assert certain(judge, ask(right, "7")).value == 1.0
        assert certain(judge, ask(wrong, "7")).value == 0.0
    judge.close()  # type: ignore[attr-defined]


@pytest.mark.slow
@pytest.mark.wide
def test_scorers_that_evaluate(set_traps: Traps) -> None:
    """Each reply goes to one of them."""
    judge = ReasoningGymReward("reasoning_gym:chain_sum", timeout=TIMEOUT)
    every = replies(set_traps)
    for n, task in enumerate(EVALUATING):
        made = entry(task)
        asked = [ask(f"<answer>{reply}</answer>", "", task=task, entry=made) for reply in every[n :: len(EVALUATING)]]
        assert max(reward.value for reward in score(judge, asked)) < 1.0
        assert set_traps.sprung() == [], task
        for _ in range(2):
            right = certain(judge, ask(f"<answer>{made['answer']}</answer>", "", task=task, entry=made))
            assert right.value == 1.0, task
            assert certain(judge, ask("<answer>no</answer>", "", task=task, entry=made)).value < 1.0
    judge.close()


@pytest.mark.slow
@pytest.mark.wide
def test_all_other_scorers(set_traps: Traps) -> None:
    judge = ReasoningGymReward("reasoning_gym:chain_sum", timeout=TIMEOUT)
    source = cycle(replies(set_traps))
    for task in sorted({*tasks()} - {*EVALUATING, *LENIENT}):
        made = entry(task)
        given = list(islice(source, 3))
        rewards = score(judge, [ask(f"<answer>{reply}</answer>", "", task=task, entry=made) for reply in given])
        assert not [reply for reply, reward in zip(given, rewards, strict=True) if earned(reply, reward)], task
        assert set_traps.sprung() == [], task
    judge.close()
