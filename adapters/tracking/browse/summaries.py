"""Summary rows of rollouts: all but its tokens and whole texts, and what a row's group tells of it."""

import hashlib
import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy

from rollgrad.adapters.system.plain_values import finite, row_as_utf8
from rollgrad.adapters.tracking.browse.filters import Kind
from rollgrad.adapters.tracking.trajectory_files import PREFIXES, read_trajectories
from rollgrad.adapters.tracking.trajectory_schema import SHOWN, schema

if TYPE_CHECKING:
    import pyarrow

NOTHING = 1e-6
"""Advantage that is none: what rounding leaves of equal rewards less their mean."""

TEXTS: Mapping[str, str] = {
    "kind": "update or evaluation",
    "datasource": "origin of the prompt",
    "prompt": "prompt of the dataset, as the chat template renders it",
    "label": "what the reward compares with",
    "response": "all after the prompt",
    "answer": "what the reply answered, by which evaluations vote",
    "feedback": "what the reward says of the reply in words",
    "stop_reason": "why the reply ended: stop, length, environment, turn_limit, timeout or aborted",
    "failure": "kind of a failed episode: infrastructure, environment, reward, not_applicable or data",
    "failure_message": "why an episode failed",
    "step": "number of the update that learned from the rollout, or after which it was evaluated",
    "group_id": "the rollouts of one prompt share it",
    "sample_id": "the branches of one rollout share it",
    "branch": "number of the branch within the rollout",
    "role": "who of several players of an episode sampled the branch",
    "reward": "sum of the branch's rewards",
    "score": "outcome for filters and evaluation",
    "baseline": "reward of the prompt's greedy rollout",
    "advantage": "mean over the sampled tokens",
    "seconds": "duration of the episode with its reward",
    "turns": "number of turns",
    "prompt_tokens": "number of tokens of the prompt",
    "action_tokens": "number of sampled tokens",
    "version_first": "updates behind the weights that sampled the oldest token",
    "version_last": "updates behind the weights that sampled the newest token",
    "group_size": "number of rollouts in the group",
    "group_spread": "greatest reward less the least one in the group",
    "zero_spread": "whether all rollouts of the group had the same reward and no advantage, so that it taught nothing",
    "new_reward": "reward by the newest rollgrad rescore",
    "star": "whether it was starred",
    "tag": "its tags",
    "note": "its note",
}
"""Meaning of each column that filters know, in their words."""

MAPS = {"part": "reward_parts", "metric": "metrics"}
"""Columns of named numbers, by the word before the name in a filter."""
STORED = [
    name
    for name in (*TEXTS, *MAPS.values())
    if name not in {"group_size", "group_spread", "zero_spread", "new_reward", "star", "tag", "note"}
]
IDS = ("kind", "step", "group_id", "role", "sample_id")
"""Columns that a rollout is known by; all but the last one are its group's."""
CUT = ("prompt", "response", "label", "answer", "feedback")
"""Texts of which a summary row has the beginning."""
KEY_KINDS = {kind: prefix.removesuffix("-") for kind, prefix in PREFIXES.items()}
"""First word of a key, by the kind of the rollout."""


def kinds_of(table: "pyarrow.Table") -> dict[str, Kind]:
    """Returns what each column holds that a filter may name."""
    import pyarrow as pa

    found = {"new_reward": Kind.NUMBER, "star": Kind.FLAG, "tag": Kind.TEXTS, "note": Kind.TEXT}
    for name in TEXTS:
        if name in table.column_names:
            kind = table.schema.field(name).type
            found[name] = (
                Kind.TEXT
                if pa.types.is_string(kind)
                else Kind.FLAG
                if pa.types.is_boolean(kind)
                else Kind.INTEGER
                if pa.types.is_integer(kind)
                else Kind.NUMBER
            )
    for word, column in MAPS.items():
        found |= {f"{word}.{name}": Kind.NUMBER for name in names_in(table, column)}
    return {name: found[name] for name in (*(name for name in TEXTS if name in found), *found)}


def names_in(table: "pyarrow.Table", column: str) -> list[str]:
    """Returns the names in a column of named numbers."""
    import pyarrow.compute as pc

    keys = (key for chunk in table[column].chunks for key in pc.unique(chunk.keys).to_pylist())
    return sorted(set(keys))


def read_summaries(path: Path) -> "pyarrow.Table":
    """Returns what `summaries` takes of a file of rollouts.

    Raises:
        DataError: it cannot be read, or has other columns than rollouts.
    """
    table = read_trajectories(path, ["response_start" if name == "response" else name for name in STORED])
    if "response_start" in table.column_names:
        return shortened(table.rename_columns({"response_start": "response"}))
    return shortened(read_trajectories(path, STORED))  # a file of an earlier version has whole responses alone


def shortened(table: "pyarrow.Table") -> "pyarrow.Table":
    """Returns the columns of `STORED`, null where `table` has none, with the beginnings of texts, and `prompt_id`.

    Raises:
        pyarrow.ArrowException: a column has another type.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    made: dict[str, Any] = {}
    for field in _stored():
        column = table[field.name] if field.name in table.column_names else pa.nulls(len(table), field.type)
        made[field.name] = column if column.type == field.type else column.cast(field.type)
    made["prompt_id"] = _prompt_ids(made["prompt"])
    for name in CUT:
        made[name] = pc.utf8_slice_codeunits(made[name], 0, SHOWN)
    return pa.table(made)


def summaries(table: "pyarrow.Table") -> "pyarrow.Table":
    """Returns the rows of all files, as `shortened` gives them, with `key` and what their groups tell: of many files at
    once, as each of Arrow's calls takes longer than its work on the rows of one."""
    import pyarrow as pa
    import pyarrow.compute as pc

    made = {name: column.combine_chunks() for name, column in zip(table.column_names, table.columns, strict=True)}
    made["branch"] = pc.fill_null(made["branch"], -1)  # failed episodes have none
    made["key"] = pc.binary_join_element_wise(
        pc.if_else(pc.equal(made["kind"], "update"), KEY_KINDS["update"], KEY_KINDS["evaluation"]),
        *(made[name].cast(pa.string()) for name in ("step", "group_id", "sample_id", "branch")),
        "/",
    )
    made["group_size"], made["group_spread"], learned = _groups(made)
    same = pc.and_(pc.equal(made["group_spread"], 0.0), pc.greater(made["group_size"], 1))
    made["zero_spread"] = pc.and_(same, pc.invert(learned))
    return pa.table(made)


@cache
def _stored() -> "pyarrow.Schema":
    import pyarrow as pa

    whole = schema()
    return pa.schema([whole.field(name) for name in STORED])


def prompt_id(prompt: str | None) -> str:
    """Returns a name of a prompt, equal in all runs."""
    return hashlib.sha256((prompt or "").encode()).hexdigest()[:16]


def _prompt_ids(prompts: Any) -> Any:
    import pyarrow as pa
    import pyarrow.compute as pc

    whole = prompts.combine_chunks() if isinstance(prompts, pa.ChunkedArray) else prompts
    coded = pc.dictionary_encode(whole, null_encoding="encode")
    ids = [prompt_id(text) for text in coded.dictionary.to_pylist()]
    return pa.array(ids, type=pa.string()).take(coded.indices)


def _groups(columns: Mapping[str, Any]) -> tuple[Any, Any, Any]:
    """Returns the number of rollouts, the spread of their rewards, and whether one has an advantage, of each row's
    group: a critic, or a mean over other groups, gives some to a group without spread."""
    import pyarrow as pa
    import pyarrow.compute as pc

    # Numbers in the place of texts: a file may have none, and texts cannot be ordered among none.
    texts = {name: pc.dictionary_encode(columns[name], null_encoding="encode").indices for name in ("kind", "role")}
    coded = {**columns, **texts}
    numbers = {name: coded[name].to_numpy(zero_copy_only=False) for name in (*IDS, "reward", "advantage")}
    group_N = _numbered(*(numbers[name] for name in IDS[:-1]))
    rollout_N = _numbered(group_N, numbers[IDS[-1]])
    count, rollouts = (int(ids.max(initial=-1)) + 1 for ids in (group_N, rollout_N))
    group_R = numpy.zeros(rollouts, dtype=numpy.int64)
    group_R[rollout_N] = group_N
    known_N = numpy.isfinite(numbers["reward"])  # null is NaN here
    rewards_R = numpy.bincount(rollout_N[known_N], numbers["reward"][known_N], rollouts)  # branches add up
    known_R = numpy.bincount(rollout_N[known_N], minlength=rollouts) > 0
    low, high = numpy.full(count, numpy.inf), numpy.full(count, -numpy.inf)
    numpy.minimum.at(low, group_R[known_R], rewards_R[known_R])
    numpy.maximum.at(high, group_R[known_R], rewards_R[known_R])
    learned = numpy.bincount(group_N[abs(numbers["advantage"]) > NOTHING], minlength=count) > 0
    sizes = numpy.bincount(group_R, minlength=count).astype(numpy.int32)
    without = high < low  # no rollout has a reward
    spread = pa.array((high - low)[group_N], mask=without[group_N])
    return pa.array(sizes[group_N]), spread, pa.array(learned[group_N])


def _numbered(*columns: Any) -> Any:
    """Returns for each row the number of its combination of values: 0 of the first one in their order, and so on."""
    numbers = numpy.zeros(len(columns[0]), dtype=numpy.int64)
    for column in columns:
        values = numpy.unique(column, return_inverse=True)[1]
        numbers = numpy.unique(numbers << 32 | values, return_inverse=True)[1]
    return numbers


def sample_rows(path: Path) -> "pyarrow.Table":
    """Returns the rows of `samples.jsonl`, for a run without files of rollouts: each is a group of its own.

    Raises:
        OSError: it cannot be read.
    """
    import pyarrow as pa

    rows: list[dict[str, Any]] = []
    for number, line in enumerate(path.read_bytes().split(b"\n")):
        try:
            row = json.loads(line)
            rows.append(
                {
                    "kind": "update",
                    "step": int(row["step"]),
                    "group_id": number,
                    "sample_id": number,
                    "branch": 0,
                    "prompt": str(row["prompt"]),
                    "response": str(row["response"]),
                    "label": str(row.get("label")),
                    "reward": float(row["reward"]),
                    "score": float(row["reward"]),
                    "feedback": None if row.get("feedback") is None else str(row["feedback"]),
                    "stop_reason": str(row.get("stop_reason")),
                }
            )
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
            continue  # an incomplete last line, or what is no sample
    clean = [*map(row_as_utf8, rows)]
    return pa.Table.from_pylist(clean, schema=_stored())


def plain(row: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a row as JSON holds it: named numbers as objects, numbers that are not finite as null."""
    maps = MAPS.values()
    return {name: _named(value) if name in maps else finite(value) for name, value in row.items()}


def _named(pairs: Any) -> dict[str, Any]:
    return {name: finite(value) for name, value in pairs or ()}
