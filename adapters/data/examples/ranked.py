"""Rows of ranked replies: the best against the worst is a preference pair.

Does not own: how a pair is read (`formats`).
"""

from collections.abc import Mapping, Sequence
from typing import Any

from rollgrad.adapters.data.examples.rows import Reason, RowError, broken, read_number
from rollgrad.application.foreign import shown

REPLIES: Mapping[str, str] = {"completions": "completion", "answers": "answer"}
"""Columns with ranked replies, and the key of a reply in each: of NeMo-RL's data and of Nectar."""
PROMPTS: Mapping[str, str] = {"completions": "context", "answers": "prompt"}
"""Column of their prompt."""


def ranked_column(columns: Mapping[str, Any] | set[str]) -> str | None:
    """Returns the column with ranked replies; None if a row with these columns has none, or already has a pair."""
    if "chosen" in columns or "rejected" in columns:
        return None
    return next((name for name, prompt in PROMPTS.items() if name in columns and prompt in columns), None)


def best_and_worst(row: Mapping[str, Any], column: str) -> dict[str, Any]:
    """Returns the row as a pair, with `prompt`, `chosen` and `rejected`: the first reply of the lowest rank, and the
    last of the highest.

    Raises:
        RowError: there are no two replies of different ranks, or one is not as ranked replies are.
    """
    key, replies = REPLIES[column], row[column]
    if isinstance(replies, str | Mapping) or not isinstance(replies, Sequence):
        raise broken(f"{column} holds {shown(replies)}, which is no list of replies.")
    ranked = []
    for reply in replies:
        if not isinstance(reply, Mapping) or reply.get(key) is None or reply.get("rank") is None:
            raise broken(f"{column} holds {shown(reply)}: a ranked reply has {key} and rank.")
        ranked.append((read_number(reply["rank"], "rank"), reply[key]))
    ranks = [rank for rank, _ in ranked]
    if len(set(ranks)) < 2:
        raise RowError(Reason.TIED, f"No reply of {column} has a better rank than another.")
    best, worst = ranks.index(min(ranks)), len(ranks) - 1 - ranks[::-1].index(max(ranks))
    kept = {name: value for name, value in row.items() if name != column}  # the prompt's column may be named
    return {**kept, "prompt": row[PROMPTS[column]], "chosen": ranked[best][1], "rejected": ranked[worst][1]}
