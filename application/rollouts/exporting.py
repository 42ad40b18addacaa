"""Rows for training on examples, chosen from the rollouts of a run.

Pure. A reply is worth an example if it is whole: one branch of one turn that the model ended by itself, and in which no
secret is hidden. Does not own: where rollouts come from, and where rows go.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from attrs import field, frozen

from rollgrad.domain.algorithms.equality import differ
from rollgrad.domain.episodes.generation import StopReason
from rollgrad.domain.episodes.messages import Message, assistant_message

Row = dict[str, Any]


@frozen(kw_only=True)
class Reply:
    """A reply of a run: its group and sample, the prompt as text, as the conversation that was rendered (empty for a
    prompt that was text), what the model wrote, its score, and its branch, turns and end. `hidden`: a secret was taken
    out of it. `images`: those of a run that sees any, as a part of a row; None where one of them is no file."""

    group_id: int
    sample_id: int
    prompt: str
    messages: Sequence[Message]
    response: str
    score: float
    branch: int
    turns: int
    stop_reason: str
    hidden: bool
    images: Row | None = field(factory=dict)


@frozen
class Chosen:
    """Rows, and the number of replies or groups that gave none, by reason."""

    rows: list[Row] = field(factory=list)
    left_out: Counter[str] = field(factory=Counter)


def pairs(replies: Sequence[Reply], min_score: float | None) -> Chosen:
    """Returns a preference pair for each group: its best reply, of at least `min_score`, against its worst."""
    chosen = Chosen()
    for group in _groups(_usable(replies, chosen)):
        best, worst = max(group, key=_score), min(group, key=_score)
        if not differ([best.score, worst.score]):
            chosen.left_out["groups whose replies have one score"] += 1
        elif min_score is not None and best.score < min_score:
            chosen.left_out[f"groups without a score of {min_score:g}"] += 1
        elif best.response == worst.response:
            chosen.left_out["groups whose best and worst reply are the same text"] += 1
        else:
            chosen.rows.append(
                {
                    "prompt": _prompt(best),
                    "chosen": _reply(best),
                    "rejected": _reply(worst),
                    "score_chosen": best.score,
                    "score_rejected": worst.score,
                    **_images(best),
                }
            )
    return chosen


def best(replies: Sequence[Reply], min_score: float | None) -> Chosen:
    """Returns the best reply of each group, of at least `min_score`, as prompt and completion."""
    chosen = Chosen()
    for group in _groups(_usable(replies, chosen)):
        reply = max(group, key=_score)
        if min_score is not None and reply.score < min_score:
            chosen.left_out[f"groups without a score of {min_score:g}"] += 1
        else:
            row = {"prompt": _prompt(reply), "completion": _reply(reply), "score": reply.score}
            chosen.rows.append(row | _images(reply))
    return chosen


def conversations(replies: Sequence[Reply], min_score: float | None) -> Chosen:
    """Returns every reply of at least `min_score` with its prompt as one conversation."""
    chosen = Chosen()
    for reply in _usable(replies, chosen):
        if not reply.messages:
            chosen.left_out["replies to a prompt that was text, not messages"] += 1
        elif min_score is not None and reply.score < min_score:
            chosen.left_out[f"replies with a score below {min_score:g}"] += 1
        else:
            said = [*reply.messages, assistant_message(reply.response)]
            chosen.rows.append({"messages": said, "score": reply.score, **_images(reply)})
    return chosen


KINDS: Mapping[str, Callable[[Sequence[Reply], float | None], Chosen]] = {
    "pairs": pairs,
    "sft": best,
    "messages": conversations,
}
"""Kinds of rows, by name."""


def _usable(replies: Sequence[Reply], chosen: Chosen) -> Iterator[Reply]:
    """Yields whole replies, and counts the others."""
    branched = {(reply.group_id, reply.sample_id) for reply in replies if reply.branch > 0}
    for reply in replies:
        if reply.turns != 1 or (reply.group_id, reply.sample_id) in branched:
            chosen.left_out["rollouts of several turns or branches"] += 1
        elif reply.stop_reason == StopReason.ENVIRONMENT.value:  # it may answer more than the prompt
            chosen.left_out["rollouts of environments or agents"] += 1
        elif reply.stop_reason != StopReason.STOP.value:
            chosen.left_out["replies that were cut off"] += 1
        elif reply.hidden:
            chosen.left_out["replies with a hidden secret"] += 1
        elif not reply.response.strip():
            chosen.left_out["empty replies"] += 1
        elif reply.images is None:
            chosen.left_out["replies to images that are no files"] += 1
        else:
            yield reply


def _images(reply: Reply) -> Row:
    return dict(reply.images or {})


def _groups(replies: Iterable[Reply]) -> list[list[Reply]]:
    groups: dict[int, list[Reply]] = {}
    for reply in replies:
        groups.setdefault(reply.group_id, []).append(reply)
    return list(groups.values())


def _score(reply: Reply) -> tuple[float, int]:
    """Orders replies by score; of equal ones the first sample is the best, and the last the worst."""
    return reply.score, -reply.sample_id


def _prompt(reply: Reply) -> str | list[Message]:
    return list(reply.messages) or reply.prompt


def _reply(reply: Reply) -> str | list[Message]:
    return [assistant_message(reply.response)] if reply.messages else reply.response
