"""Which replies of a run become rows to learn from."""

from typing import Any

import pytest
from attrs import evolve

from rollgrad.application.rollouts.exporting import KINDS, Reply, best, conversations, pairs

ASKED = ({"role": "user", "content": "2+2?"},)
REPLY = Reply(
    group_id=0,
    sample_id=0,
    prompt="<user>2+2?",
    messages=ASKED,
    response="4",
    score=1.0,
    branch=0,
    turns=1,
    stop_reason="stop",
    hidden=False,
)
UNUSABLE: dict[str, dict[str, Any]] = {
    "rollouts of several turns or branches": {"turns": 2},
    "rollouts of environments or agents": {"stop_reason": "environment"},
    "replies that were cut off": {"stop_reason": "length"},
    "replies with a hidden secret": {"hidden": True},
    "empty replies": {"response": " \n"},
}


def group(*scores: float, group_id: int = 0) -> list[Reply]:
    return [
        evolve(REPLY, group_id=group_id, sample_id=10 * group_id + i, score=score, response=f"reply {i}")
        for i, score in enumerate(scores)
    ]


def said(messages: Any) -> list[str]:
    return [message["content"] for message in messages]


def test_the_best_reply_is_preferred_to_the_worst() -> None:
    (row,) = pairs(group(0.5, 0.0, 1.0, 0.2), None).rows
    assert row["prompt"] == list(ASKED)
    assert (said(row["chosen"]), said(row["rejected"])) == (["reply 2"], ["reply 1"])
    assert (row["score_chosen"], row["score_rejected"]) == (1.0, 0.0)


def test_a_group_without_a_difference_gives_no_pair() -> None:
    chosen = pairs([*group(0.5, 0.5), *group(0.1, 0.4, group_id=1), *group(0.0, 1.0, group_id=2)], 0.5)
    assert [said(row["chosen"]) for row in chosen.rows] == [["reply 1"]]
    assert chosen.left_out == {"groups whose replies have one score": 1, "groups without a score of 0.5": 1}
    rounded = pairs(group(0.1 + 0.2, 0.3), None)
    assert rounded.left_out == {"groups whose replies have one score": 1}
    same = [evolve(reply, response="4") for reply in group(0.0, 1.0)]
    assert pairs(same, None).left_out == {"groups whose best and worst reply are the same text": 1}


def test_of_equally_good_replies_the_first_is_imitated() -> None:
    (row,) = best(group(0.5, 1.0, 1.0), None).rows
    assert (said(row["prompt"]), said(row["completion"]), row["score"]) == (["2+2?"], ["reply 1"], 1.0)


def test_every_good_reply_is_a_conversation() -> None:
    chosen = conversations(group(0.5, 1.0, 0.7), 0.6)
    assert [said(row["messages"]) for row in chosen.rows] == [["2+2?", "reply 1"], ["2+2?", "reply 2"]]
    assert chosen.left_out == {"replies with a score below 0.6": 1}


def test_a_prompt_that_was_text_stays_text() -> None:
    texts = [evolve(reply, messages=()) for reply in group(0.0, 1.0)]
    (row,) = pairs(texts, None).rows
    assert (row["prompt"], row["chosen"], row["rejected"]) == ("<user>2+2?", "reply 1", "reply 0")
    assert conversations(texts, None).left_out == {"replies to a prompt that was text, not messages": 2}


@pytest.mark.parametrize("reason", UNUSABLE)
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_a_whole_reply_is_left_out_and_counted(kind: str, reason: str) -> None:
    replies = [*group(0.0, 0.5), evolve(REPLY, sample_id=9, score=9.0, **UNUSABLE[reason])]
    chosen = KINDS[kind](replies, None)
    assert chosen.left_out == {reason: 1}
    assert all(9.0 not in row.values() for row in chosen.rows)
    assert len(chosen.rows) == (2 if kind == "messages" else 1)


def test_no_branch_of_a_rollout_stands_for_it() -> None:
    chosen = best([*group(0.0), REPLY, evolve(REPLY, branch=1)], None)
    assert chosen.rows == []
    assert chosen.left_out == {"rollouts of several turns or branches": 3}
