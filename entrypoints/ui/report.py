"""The report of a run: the page with a choice of its data in one file, `report.html`.

Invariants: the file is at most `MOST_BYTES` large and appears whole; groups are chosen whole. Importable without torch.
"""

import base64
import hashlib
import json
import zlib
from collections.abc import Container, Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import structlog

from rollgrad.adapters.checkpoints.files import replace_file
from rollgrad.adapters.tracking.browse import trajectory
from rollgrad.adapters.tracking.browse.index import DEFAULT_SORT, Rollouts
from rollgrad.domain.errors import CheckpointError, DataError
from rollgrad.entrypoints.run_directory import is_run, no_run
from rollgrad.entrypoints.ui.inline import inline_page
from rollgrad.entrypoints.ui.run_view import RunView

REPORT_FILE = "report.html"
VERSION = 1
"""Version of the data in the file."""
MOST_BYTES = 3_000_000
MOST_ROLLOUTS = 200
MOST_PROMPTS = 40
"""Prompts of evaluations whose replies are kept whole."""
MOST_POINTS = 500
"""Points of each curve."""
DIGITS = 6
"""Significant digits of tokens' numbers: about as many as float32 has."""
BASE64 = 4 / 3
"""Growth of data that are written as base64."""

log = structlog.get_logger(__name__)


def write_run_report(run: Path, output: Path | None = None, *, title: str | None = None) -> Path:
    """Writes the report of a run, by default to `report.html` in its directory, and returns its path. `title` is by
    default the directory's name.

    Raises:
        DataError: there is no run.
        CheckpointError: the file cannot be written.
    """
    if not is_run(run):
        raise no_run(run)
    output = output or run / REPORT_FILE
    view = RunView(run, id=run.resolve().name, name=run.resolve().name)
    page = report_page(view, title or view.id)
    try:
        replace_file(output, page.encode())
    except OSError as error:
        raise CheckpointError(
            f"{output} cannot be written ({error.strerror or error}): name another file with --output."
        ) from error
    return output


def report_page(view: RunView, title: str) -> str:
    """Returns the page of a run with as many of its rollouts as there is room for."""
    room = int((MOST_BYTES - len(inline_page(title, "").encode())) / BASE64)
    data = report_data(view, room)
    return inline_page(title, base64.b64encode(zlib.compress(_json(data), 9)).decode())


def report_data(view: RunView, room: int) -> dict[str, Any]:
    """Returns the data of a report: a run as the server tells of it, and rollouts whose deflated size, with all else,
    is at most `room` bytes."""
    rollouts = view.rollouts()
    compare = trajectory.compared(rollouts)
    prompts = sorted(compare["prompts"], key=lambda prompt: -abs(prompt["change"]))[:MOST_PROMPTS]
    data: dict[str, Any] = {
        "version": VERSION,
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "run": view.overview(),
        "metrics": view.metrics(points=MOST_POINTS),
        "findings": view.findings(),
        "notes": view.notes()["notes"],
        "trajectory": {},
        "compare": compare | {"prompts": prompts},
        "compared": {},
    }
    left = room - len(zlib.compress(_json(data)))
    for prompt in prompts:
        # Asked of the rollouts, for the view would look for changed files each time.
        replies = trajectory.replies_to(rollouts, prompt["prompt_id"])
        left -= _size(replies)
        if left < room // 2:  # the rest is for rollouts
            break
        data["compared"][prompt["prompt_id"]] = replies
    data["trajectory"] = _whole_groups(view, rollouts, left)
    data["trajectories"] = _table(rollouts, data["trajectory"])
    return data


def _whole_groups(view: RunView, rollouts: Rollouts, room: int) -> dict[str, Any]:
    """Returns the rollouts of as many groups as there is room for, by their keys."""
    chosen: dict[str, Any] = {}
    for group in _groups(rollouts):
        if len(chosen) + len(group) > MOST_ROLLOUTS:
            continue
        try:
            whole = view.whole(rollouts, group)
        except DataError as error:  # a file that broke, or was removed, meanwhile
            log.warning("the report leaves a group out", reason=str(error))
            continue
        kept = {row["key"]: _shortened(row) for row in whole}
        room -= _size(kept) + _size(rollouts.rows([rollouts.places[key] for key in group]))
        if room < 0:
            break
        chosen |= kept
    return chosen


def _table(rollouts: Rollouts, keys: Container[str]) -> dict[str, Any]:
    """Returns the page of the table that has the rollouts of these keys."""
    found = rollouts.find("", DEFAULT_SORT).to_pylist()
    rows = rollouts.rows([row for row in found if rollouts.keys[row] in keys])
    return {
        "total": len(rollouts),
        "matched": len(rows),
        "page": 0,
        "size": len(rows),
        "rows": rows,
        "chosen": len(rows),
        "problems": list(rollouts.problems),
    }


def _groups(rollouts: Rollouts) -> Iterable[Sequence[str]]:
    """Yields the keys of whole groups. Groups with notes come first; then one group of each step in turn, from steps
    that lie evenly over the run. Within a step, those with the greatest spread, most truncated replies and most
    failures come first."""
    names = ("kind", "step", "group_id", "failure", "stop_reason", "group_spread", "key")
    groups: dict[tuple[str, int, int], list[dict[str, Any]]] = {}
    for values in zip(*(rollouts.table[name].to_pylist() for name in names), strict=True):
        row = dict(zip(names, values, strict=True))
        groups.setdefault((row["kind"], row["step"], row["group_id"]), []).append(row)
    noted = [rows for rows in groups.values() if any(row["key"] in rollouts.notes for row in rows)]
    by_step: dict[int, list[list[dict[str, Any]]]] = {}
    for (kind, step, _), rows in groups.items():
        if kind == "update":
            by_step.setdefault(step, []).append(rows)
    queues = [_telling(by_step[step]) for step in _spread_out(sorted(by_step))]
    told = set()
    for rows in (*noted, *(rows for turn in _in_turns(queues) for rows in turn)):
        keys = [row["key"] for row in rows]
        if keys[0] not in told:
            told.add(keys[0])
            yield keys


def _telling(groups: list[list[dict[str, Any]]]) -> list[list[dict[str, Any]]]:
    """Returns the groups of a step in the order in which they are chosen."""

    def chance(rows: list[dict[str, Any]]) -> bytes:
        return hashlib.sha256(rows[0]["key"].encode()).digest()

    shuffled = sorted(groups, key=chance)
    first = [
        max(shuffled, key=lambda rows: rows[0]["group_spread"] or 0.0),
        max(shuffled, key=lambda rows: sum(row["stop_reason"] == "length" for row in rows)),
        max(shuffled, key=lambda rows: sum(row["failure"] is not None for row in rows)),
    ]
    return [*first, *shuffled]


def _spread_out(steps: Sequence[int]) -> list[int]:
    """Returns steps in an order whose beginnings lie about evenly over the run: last, first, middle, and so on."""
    if not steps:
        return []
    order, ranges = [len(steps) - 1, 0], [(0, len(steps) - 1)]
    while ranges:
        low, high = ranges.pop(0)
        middle = (low + high) // 2
        if middle > low:
            order.append(middle)
            ranges += [(low, middle), (middle, high)]
    return [steps[place] for place in dict.fromkeys(order)]


def _in_turns(queues: Sequence[Sequence[Any]]) -> Iterable[list[Any]]:
    """Yields the first items of all sequences, then the second ones, as long as one has any."""
    for place in range(max(map(len, queues), default=0)):
        yield [queue[place] for queue in queues if place < len(queue)]


def _shortened(row: dict[str, Any]) -> dict[str, Any]:
    """Returns a rollout without what other rows have, too, and with numbers of `DIGITS` digits."""
    tokens = row["tokens"]
    if tokens is not None:
        row["tokens"] = {
            name: [_rounded(value) for value in values] if isinstance(values, list) else values
            for name, values in tokens.items()
        }
    return row


def _rounded(value: Any) -> Any:
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


def _json(value: Any) -> bytes:
    return json.dumps(value, allow_nan=False, separators=(",", ":")).encode()


def _size(value: Any) -> int:
    return len(zlib.compress(_json(value)))
