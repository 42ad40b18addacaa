"""`rollgrad export`: rollouts of a run as rows that `train sft` and `train dpo` read.

Invariants: no file is overwritten; the file appears whole or not at all; no row is written twice.
"""

import fcntl
import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

import yaml
from attrs import evolve, frozen

from rollgrad.adapters.chat.pictures import bare, image_sources
from rollgrad.adapters.checkpoints.names import CONFIG_FILE
from rollgrad.adapters.tracking.trajectory_files import HIDDEN_TOKEN, read_trajectories, trajectory_files
from rollgrad.application.rollouts.exporting import KINDS, Reply
from rollgrad.domain.episodes.messages import Message
from rollgrad.domain.errors import CheckpointError, DataError

COLUMNS = (
    *("kind", "group_id", "sample_id", "branch", "prompt", "messages", "response", "score", "turns", "stop_reason"),
    *("failure", "token"),
)


@frozen(kw_only=True)
class Exported:
    """An exported file, its number of rows, whether prompts in it are plain texts, what was left out, by reason, and
    why files could not be read."""

    path: Path
    rows: int
    plain: bool
    left_out: Counter[str]
    unread: tuple[str, ...] = ()


def export(kind: str, run: Path, output: Path | None = None, *, min_score: float | None = None) -> Exported:
    """Writes rows of a run's updates to a JSONL file. A file of trajectories that cannot be read is named and left out.

    Args:
        kind: `pairs` (the best and the worst reply of each group), `sft` (the best), or `messages` (all).
        run: directory of the run.
        output: the file; by default `KIND.jsonl` in the run's directory.
        min_score: least score of replies that are to be imitated; None takes all.

    Raises:
        CheckpointError: the file is there already, cannot be written, or another export writes it.
        DataError: the run has no trajectories, or there is nothing to export.
    """
    output = output or run / f"{kind}.jsonl"
    _check_new(output)
    files = trajectory_files(run)
    if not files:
        raise DataError(
            f"{str(run)!r} has no trajectories: name the output directory of a run by train rl with "
            "--logger.trajectories_max_gib above 0."
        )
    fresh = output.with_name(f".{output.name}.new")
    try:
        with fresh.open("a", encoding="utf-8") as file:
            _lock(file)
            try:
                _check_new(output)  # again: another export may have written it until now
                exported = _write(kind, files, file, min_score, sees_images=_sees_images(run))
                if not exported.rows:
                    raise DataError(f"Nothing of {str(run)!r} can be exported as {kind}: {_reasons(exported)}.")
                file.flush()
                fresh.rename(output)
            finally:
                fresh.unlink(missing_ok=True)
    except CheckpointError:
        raise
    except BlockingIOError as error:
        raise CheckpointError(
            f"--output is {str(output)!r}, which another export is writing: wait for its end, or name another file."
        ) from error
    except OSError as error:
        raise CheckpointError(
            f"--output is {str(output)!r}, which cannot be written ({error.strerror or error}): name another file."
        ) from error
    return evolve(exported, path=output)


def _check_new(output: Path) -> None:
    if output.exists():
        raise CheckpointError(f"--output is {str(output)!r}, which is there already: remove it, or name another file.")


def _lock(file: TextIO) -> None:
    """Keeps other exports out for as long as `file` is open, and empties it.

    Raises:
        BlockingIOError: another one is writing.
    """
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    file.truncate(0)  # one that was killed left it


def _reasons(exported: Exported) -> str:
    left_out = (f"{count} {reason}" for reason, count in exported.left_out.most_common())
    return "; ".join([*(reason.removesuffix(".") for reason in exported.unread), *left_out]) or "it is empty"


def _write(kind: str, files: Sequence[Path], output: TextIO, min_score: float | None, *, sees_images: bool) -> Exported:
    left_out: Counter[str] = Counter()
    seen: set[bytes] = set()
    unread: list[str] = []
    plain = False
    for file in files:
        try:
            replies = list(_replies(file, sees_images=sees_images))
        except DataError as error:
            unread.append(str(error))
            continue
        chosen = KINDS[kind](replies, min_score)
        left_out += chosen.left_out
        for row in chosen.rows:
            content = {name: value for name, value in row.items() if not name.startswith("score")}
            known = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).digest()
            if known in seen:
                left_out["rows that are there already"] += 1
                continue
            seen.add(known)
            plain = plain or isinstance(row.get("prompt"), str)
            output.write(json.dumps(row) + "\n")
    return Exported(path=Path(output.name), rows=len(seen), plain=plain, left_out=left_out, unread=tuple(unread))


def _sees_images(run: Path) -> bool:
    """Returns whether the prompts of a run may have images, by its settings."""
    try:
        settings = yaml.safe_load((run / CONFIG_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return False
    data = settings.get("data") if isinstance(settings, dict) else None
    return isinstance(data, dict) and data.get("image_key") is not None


def _separated(messages: Sequence[Message]) -> tuple[Sequence[Message], dict[str, Any] | None]:
    """Returns messages with bare parts in the place of images, and these as a part of a row; None where one of them is
    no file."""
    sources = image_sources(messages)
    named = all(isinstance(source, str) for source in sources)
    return [*map(bare, messages)], {"images": sources} if named else None


def _replies(path: Path, *, sees_images: bool) -> Iterator[Reply]:
    """Yields the replies of an update's file; none of an evaluation, on whose prompts nothing may be trained."""
    if not path.name.startswith("step-"):
        return
    rows: list[dict[str, Any]] = read_trajectories(path, COLUMNS).to_pylist()
    for row in rows:
        if row["failure"] is None:
            messages: Sequence[Message] = json.loads(row["messages"] or "[]")
            messages, images = _separated(messages) if sees_images else (messages, {})
            yield Reply(
                group_id=row["group_id"],
                sample_id=row["sample_id"],
                prompt=row["prompt"],
                messages=tuple(messages),
                images=images,
                response=row["response"],
                score=row["score"],
                branch=row["branch"],
                turns=row["turns"],
                stop_reason=row["stop_reason"],
                hidden=HIDDEN_TOKEN in row["token"],
            )
