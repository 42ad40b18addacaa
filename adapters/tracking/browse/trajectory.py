"""Single rollouts with their tokens, whole groups, and the replies to one prompt over a run's evaluations.

Only the row groups that hold the rows are read.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy

from rollgrad.adapters.tracking.browse.index import Rollouts, stamp
from rollgrad.adapters.tracking.browse.summaries import KEY_KINDS
from rollgrad.adapters.tracking.trajectory_files import read_rows, read_trajectories
from rollgrad.adapters.tracking.trajectory_schema import TOKEN_NUMBERS
from rollgrad.domain.errors import DataError

if TYPE_CHECKING:
    import pyarrow

WHOLE = ("prompt", "messages", "label", "response", "answer", "feedback")
"""Texts of which summary rows have the beginning only, or nothing."""
TOKENS = ("token", "token_text", "token_kind", "token_turn", "token_version", *TOKEN_NUMBERS, "token_clipped")
LARGEST = 2**63 - 1
"""Greatest number that a column holds."""
OF_GROUPS = ("token", "token_text", "token_kind", "token_turn", "token_logprob", "token_advantage", "token_weight")
"""Columns of tokens that the tree of a group shows."""


def trajectories(rollouts: Rollouts, keys: Sequence[str]) -> list[dict[str, Any]]:
    """Returns rollouts of one file with whole texts, their tokens, their groups, and what their step adds up to but the
    logged loss.

    Raises:
        DataError: one is not there, or the file cannot be read.
    """
    rows = [_row_of(rollouts, key) for key in keys]
    stored: Sequence[Mapping[str, Any]] = [{"messages": None, "tokens": None, "step_totals": None}] * len(rows)
    if rollouts.files:
        places = [rollouts.file_of(row) for row in rows]
        file = places[0][0]
        read = _with_tokens(file, [place for _, place in places], (*WHOLE, *TOKENS))
        sums = totals(file, stamp(file))
        stored = [row | {"step_totals": sums and dict(sums)} for row in read]
    found = []
    for row, summary, whole in zip(rows, rollouts.rows(rows), stored, strict=True):
        neighbours = {
            name: rollouts.keys[number] if 0 <= number < len(rollouts) else None
            for name, number in (("previous", row - 1), ("next", row + 1))
        }
        found.append({**summary, **whole, "group": rollouts.rows(_same_group(rollouts, summary)), **neighbours})
    return found


def group(rollouts: Rollouts, kind: str, step: int, group_id: int) -> dict[str, Any]:
    """Returns all rollouts of a group with what the tree shows of their tokens.

    Raises:
        DataError: there is no such group, or its file cannot be read.
    """
    names = {word: name for name, word in KEY_KINDS.items()}
    rows = []
    if max(step, group_id) <= LARGEST:
        rows = _same_group(rollouts, {"kind": names.get(kind, kind), "step": step, "group_id": group_id})
    if not rows:
        raise DataError(f"There is no group {group_id} in {kind} {step} of this run.")
    summaries = rollouts.rows(rows)
    first: Mapping[str, Any] = {name: summaries[0].get(name) for name in WHOLE}
    if rollouts.files:
        file, place = rollouts.file_of(rows[0])
        stored = _with_tokens(file, [place + row - rows[0] for row in rows], (*WHOLE, *OF_GROUPS))
        first = stored[0]
        summaries = [row | {"tokens": whole["tokens"]} for row, whole in zip(summaries, stored, strict=True)]
    named = {name: first.get(name) for name in ("prompt", "messages", "label")}
    return {"kind": kind, "step": step, "group_id": group_id, **named, "rows": summaries}


def compared(rollouts: Rollouts) -> dict[str, Any]:
    """Returns the prompts of evaluations with their mean scores by step."""
    sums: dict[str, dict[int, list[float]]] = {}
    steps = set()
    for name, step, score in _evaluated(rollouts):
        sums.setdefault(name, {}).setdefault(step, []).append(score)
        steps.add(step)
    order = sorted(steps)
    texts = dict(zip(*(rollouts.table[name].to_pylist() for name in ("prompt_id", "prompt")), strict=True))
    labels = dict(zip(*(rollouts.table[name].to_pylist() for name in ("prompt_id", "label")), strict=True))
    prompts = []
    for name, by_step in sums.items():
        means = {step: sum(scores) / len(scores) for step, scores in by_step.items()}
        known = [means[step] for step in order if step in means]
        prompts.append(
            {
                "prompt_id": name,
                "prompt": texts[name],
                "label": labels[name],
                "scores": [means.get(step) for step in order],
                "first": known[0],
                "last": known[-1],
                "change": known[-1] - known[0],
                "flips": sum((after > 0) != (before > 0) for before, after in pairwise(known)),
            }
        )
    return {"metric": "score", "steps": order, "prompts": prompts}


def replies_to(rollouts: Rollouts, prompt_id: str) -> dict[str, Any]:
    """Returns the whole replies to one prompt in a run's evaluations, by step.

    Raises:
        DataError: no evaluation has it, or a file cannot be read.
    """
    kinds, names = rollouts.table["kind"].to_pylist(), rollouts.table["prompt_id"].to_pylist()
    rows = [
        row
        for row, (kind, name) in enumerate(zip(kinds, names, strict=True))
        if (kind, name) == ("evaluation", prompt_id)
    ]
    if not rows:
        raise DataError("No evaluation of the run has this prompt: choose another run, or another prompt.")
    summaries = rollouts.rows(rows)
    whole = _whole_rows(rollouts, {row: summary["key"] for row, summary in zip(rows, summaries, strict=True)})
    steps: dict[int, list[dict[str, Any]]] = {}
    for summary in summaries:
        shown = {name: summary[name] for name in ("key", "reward", "score", "stop_reason", "action_tokens", "failure")}
        reply = shown | {"response": whole[summary["key"]]["response"]}
        steps.setdefault(summary["step"], []).append(reply)
    first = whole[summaries[0]["key"]]
    return {
        "prompt": first["prompt"],
        "messages": messages_of(first["messages"]),
        "label": first["label"],
        "steps": [{"step": step, "replies": replies} for step, replies in sorted(steps.items())],
    }


def _whole_rows(rollouts: Rollouts, keys: Mapping[int, str]) -> dict[str, Mapping[str, Any]]:
    """Returns the columns `WHOLE` of rows, by the keys that `keys` has of their numbers; opens each file once."""
    by_file: dict[Path, list[tuple[int, str]]] = {}
    for row, key in keys.items():
        file, place = rollouts.file_of(row)
        by_file.setdefault(file, []).append((place, key))
    texts: dict[str, Mapping[str, Any]] = {}
    for file, places in by_file.items():
        found = read_rows(file, [place for place, _ in places], WHOLE).to_pylist()
        texts |= {key: text for (_, key), text in zip(places, found, strict=True)}
    return texts


@lru_cache(maxsize=16)
def totals(file: Path, changed: tuple[int, int]) -> Mapping[str, Any] | None:
    """Returns sums over the tokens of an update: `signal`, of |weight x advantage|, `loss`, minus that of weight x
    advantage, and their number; None for rollouts without weights. `changed` is the file's `stamp`, by which the sums
    are kept.

    Raises:
        DataError: the file cannot be read.
    """
    table = read_trajectories(file, ["token_weight", "token_advantage"])
    weights, advantages = (_flat(table[name]) for name in ("token_weight", "token_advantage"))
    if not len(weights) or len(weights) != len(advantages):
        return None
    products = weights.astype(numpy.float64) * advantages
    return {"signal": float(abs(products).sum()), "loss": float(-products.sum()), "tokens": len(products)}


def messages_of(text: str | None) -> Any:
    """Returns the conversation that a row has as JSON; None if there is none."""
    try:
        return None if text is None else json.loads(text)
    except (ValueError, RecursionError):
        return None


def _row_of(rollouts: Rollouts, key: str) -> int:
    row = rollouts.places.get(key)
    if row is None:
        raise DataError(f"This run has no rollout {key!r}: a run with a size limit removes the oldest.")
    return row


def _same_group(rollouts: Rollouts, row: Mapping[str, Any]) -> list[int]:
    import pyarrow.compute as pc

    chosen: Any = None
    for name in ("kind", "step", "group_id"):
        equal = pc.equal(rollouts.table[name], row[name])
        chosen = equal if chosen is None else pc.and_(chosen, equal)
    rows: list[int] = pc.indices_nonzero(chosen).to_pylist()
    return rows


def _evaluated(rollouts: Rollouts) -> Iterable[tuple[str, int, float]]:
    """Yields prompt, step and score of each evaluated rollout."""
    columns = [rollouts.table[name].to_pylist() for name in ("kind", "branch", "prompt_id", "step", "score")]
    for kind, branch, name, step, score in zip(*columns, strict=True):
        if kind == "evaluation" and branch == 0 and score is not None:
            yield name, step, score


def _with_tokens(file: Path, rows: Sequence[int], columns: Sequence[str]) -> list[dict[str, Any]]:
    """Returns whole texts and tokens of some rows of a file."""
    table = read_rows(file, rows, columns)
    texts = table.select([name for name in WHOLE if name in table.column_names]).to_pylist()
    return [
        row | {"messages": messages_of(row.get("messages")), "tokens": _tokens(table, number, columns)}
        for number, row in enumerate(texts)
    ]


def _tokens(table: "pyarrow.Table", row: int, columns: Sequence[str]) -> dict[str, Any] | None:
    """Returns the tokens of a row, a list for each column; None for an episode that failed."""
    if not table["token"][row].is_valid:
        return None
    made: dict[str, Any] = {"count": len(table["token"][row])}
    for column in columns:
        if not column.startswith("token"):
            continue
        name = column.removeprefix("token_") if column != "token" else "id"
        value = table[column][row] if column in table.column_names else None
        if value is None or not value.is_valid:
            made[name] = None
        elif column == "token_text":
            made[name] = _texts(value.values)
        else:
            made[name] = _numbers(value.values.to_numpy(zero_copy_only=False))
    return made


def _texts(values: Any) -> dict[str, Any]:
    """Returns the distinct texts of tokens, and for each token the number of its text."""
    import pyarrow as pa

    coded = values if pa.types.is_dictionary(values.type) else values.dictionary_encode()
    used, index = numpy.unique(coded.indices.to_numpy(zero_copy_only=False), return_inverse=True)
    return {"index": index.tolist(), "texts": coded.dictionary.take(pa.array(used)).to_pylist()}


def _numbers(values: Any) -> list[Any]:
    listed: list[Any] = values.tolist()
    if numpy.issubdtype(values.dtype, numpy.floating) and not numpy.isfinite(values).all():
        listed = [
            value if known else None for value, known in zip(listed, numpy.isfinite(values).tolist(), strict=True)
        ]
    return listed


def _flat(column: Any) -> Any:
    return column.combine_chunks().flatten().to_numpy(zero_copy_only=False)


def check_key(rollouts: Rollouts, key: str) -> None:
    """Checks that there is such a rollout.

    Raises:
        DataError: there is none.
    """
    _row_of(rollouts, key)
