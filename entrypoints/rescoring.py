"""`rollgrad rescore`: the rewards of a run's rollouts anew, without training.

Invariant: the stored rewards stay as they are; the new ones are written beside them.
"""

import json
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from attrs import frozen

from rollgrad.adapters.data.replies import Row, read_rows, rows_text
from rollgrad.adapters.tracking.browse.rescored import summary, with_changes, write_rescored
from rollgrad.adapters.tracking.browse.summaries import KEY_KINDS
from rollgrad.adapters.tracking.trajectory_files import HIDDEN_TOKEN, read_trajectories, trajectory_files
from rollgrad.application.settings.run import RLConfig
from rollgrad.domain.errors import DataError, RewardError
from rollgrad.domain.ports.reward_source import RewardSource
from rollgrad.entrypoints.description import flat_settings
from rollgrad.entrypoints.generation import score

COLUMNS = (
    *("kind", "step", "group_id", "sample_id", "branch", "datasource", "prompt", "messages", "label", "source"),
    *("response", "reward", "stop_reason", "failure", "turns", "version_last", "token", "token_kind"),
)


@frozen(kw_only=True)
class Rescored:
    """New rewards: the file, the summary of its rows, what was left out, by reason, and why files could not be read."""

    path: Path
    summary: dict[str, int]
    left_out: Counter[str]
    unread: tuple[str, ...] = ()


def rescore(
    run: Path, config: RLConfig, *, reward: RewardSource | Callable[..., Any] | None = None, **adapters: Any
) -> Rescored:
    """Judges the rollouts of a run's updates again, and writes old and new rewards to `RUN/rescored/TIME.json`.

    Args:
        run: directory of the run.
        config: settings, of which `reward` and the model, whose tokenizer is used, are read.
        reward: as for `rollgrad.train`.
        adapters: as for `rollgrad.score`.

    Raises:
        DataError: the run has no rollouts that can be judged.
        RewardError: too many replies could not be judged; the rewards until then are written.
        RollgradError: a setting is wrong.
    """
    left_out: Counter[str] = Counter()
    unread: list[str] = []
    with tempfile.TemporaryDirectory(prefix="rollgrad-rescore-") as directory:
        source, judged = Path(directory) / "replies.jsonl", Path(directory) / "judged.jsonl"
        with source.open("wb") as file:
            for number, row in enumerate(_replies(run, left_out, unread)):
                file.write(rows_text([row | {"row": number}]))
        if not source.stat().st_size:
            reasons = [*unread, *(f"{count} {reason}" for reason, count in left_out.most_common())]
            raise DataError(f"Nothing of {str(run)!r} can be judged: {'; '.join(reasons) or 'it has no rollouts'}.")
        too_many: RewardError | None = None
        try:
            score(config, source, judged, reward=reward, **adapters)
        except RewardError as error:
            too_many = error
        if too_many is not None and not judged.stat().st_size:
            raise RewardError(str(too_many.__cause__)) from too_many
        rows = [
            {"key": row["key"], "old": row["old"], "new": row["reward"]} for row in read_rows(judged, flag="--output")
        ]
    changes = with_changes(rows)
    name = datetime.now(UTC).strftime("%Y-%m-%dT%H-%M-%S.%f")
    content = {"name": name, "reward": _described(config, reward), "summary": summary(changes), "rows": changes}
    path = write_rescored(run, name, content)
    if too_many is not None:
        raise RewardError(
            f"{str(too_many.__cause__).rstrip('.')}. What was judged until then is in {path}."
        ) from too_many
    return Rescored(path=path, summary=summary(changes), left_out=left_out, unread=tuple(unread))


def _replies(run: Path, left_out: Counter[str], unread: list[str]) -> Iterator[Row]:
    """Yields the rollouts of all updates as `score` reads them, with their keys and rewards."""
    for path in trajectory_files(run):
        if not path.name.startswith("step-"):
            continue
        try:
            table = read_trajectories(path, COLUMNS)
        except DataError as error:
            unread.append(str(error))
            continue
        rows = table.to_pylist()
        branched = {(row["group_id"], row["sample_id"]) for row in rows if row["branch"]}
        for stored in rows:
            reason = _reason(stored, branched)
            if reason is not None:
                left_out[reason] += 1
                continue
            yield _row(stored)


def _reason(stored: dict[str, Any], branched: set[tuple[int, int]]) -> str | None:
    """Returns why a row cannot be judged again; None if it can. `branched`: group and sample of rollouts of several
    branches."""
    if stored["failure"] is not None:
        return "that failed"
    if stored["turns"] != 1 or (stored["group_id"], stored["sample_id"]) in branched:
        return "of several turns, whose rewards depend on what happened in between"
    if HIDDEN_TOKEN in stored["token"]:
        return "in which a secret is hidden"
    return None


def _row(stored: dict[str, Any]) -> Row:
    tokens = {0: list[int](), 1: list[int]()}
    for token, kind in zip(stored["token"], stored["token_kind"], strict=True):
        tokens[min(kind, 1)].append(token)
    source = json.loads(stored.get("source") or "{}")
    key = (KEY_KINDS[stored["kind"]], *(stored[name] for name in ("step", "group_id", "sample_id", "branch")))
    row: Row = {
        "sample": 0,
        "key": "/".join(map(str, key)),
        "old": stored["reward"],
        "prompt": stored["prompt"],
        "messages": json.loads(stored["messages"] or "[]"),
        "prompt_tokens": tokens[0],
        "tokens": tokens[1],
        "completion": stored["response"],
        "stop_reason": stored["stop_reason"],
        "version": stored["version_last"],
        "label": source["label"] if "label" in source else stored["label"],
        "datasource": stored["datasource"],
        "metadata": source.get("row", {}),
    }
    return row


def _described(config: RLConfig, reward: Any) -> str:
    """Returns a text that says which reward judged."""
    if reward is not None:
        return str(getattr(reward, "__name__", type(reward).__name__))
    defaults = flat_settings(RLConfig())
    named = {
        name: value
        for name, value in flat_settings(config).items()
        if name.startswith("reward.") and value != defaults.get(name)
    }
    return ", ".join(f"--{name} {value}" for name, value in named.items())
