"""Reading of the file of replies that an evaluation has written until it ended early, so that it can continue.

Invariants: a prompt is kept with all its episodes or not at all; one of which an episode failed is not kept, unless no
reward applies to it. Does not own: writing (`samples.ReplyWriter`), nor what the replies depend on (`reply_log`).
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rollgrad.adapters.checkpoints.files import replace_lines
from rollgrad.adapters.data.replies import FAILURE, Row, parsed
from rollgrad.application.rollouts.results import EpisodeResult, PromptResult
from rollgrad.domain.episodes.generation import StopReason
from rollgrad.domain.episodes.rewards import FailureKind, RolloutFailure
from rollgrad.domain.errors import DataError

TEXTS = ("prompt", "response", "label", "feedback")
"""Parts of a line that no metric is made of, which are long."""


def kept_results(path: Path, model: str, samples: int) -> list[PromptResult]:
    """Returns the results of a model's prompts, each with `samples` episodes, and removes all other lines of the model
    from the file, and an incomplete last one.

    Raises:
        DataError: a line is none of an evaluation.
        OSError: the file cannot be read, or written.
    """
    groups: dict[int, list[Row]] = defaultdict(list)
    broken = False
    for _, row in _rows(path):
        if row is None:
            broken = True
        elif row["model"] == model:
            groups[row["group_id"]].append(row)
    kept = {number: result for number, rows in groups.items() if (result := _result(number, rows, samples, path))}
    if broken or len(kept) < len(groups):
        _keep(path, model, kept)
    return [*kept.values()]


def _rows(path: Path) -> Iterator[tuple[bytes, Row | None]]:
    """Yields lines, and what they say but for long texts; None of an incomplete one."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                yield line, None
                return
            row = parsed(line, where := f"Line {number} of {path}")
            if not {"model", "group_id", "sample_id"} <= row.keys():
                raise DataError(f"{where} has no model, group_id and sample_id: remove the line.")
            yield line, {name: value for name, value in row.items() if name not in TEXTS}


def _result(number: int, rows: Sequence[Row], samples: int, path: Path) -> PromptResult | None:
    """Returns the result that the lines of a prompt tell; None where it has to be played again."""
    try:
        failures = tuple(map(_failure, (row for row in rows if FAILURE in row)))
        branches: dict[int, list[Row]] = defaultdict(list)
        for row in rows:
            if FAILURE not in row:
                branches[row["sample_id"]].append(row)
        whole = [own for own in branches.values() if [row["branch"] for row in own] == [*range(own[0]["branches"])]]
        if len(whole) + len(failures) != samples or any(f.kind is not FailureKind.NOT_APPLICABLE for f in failures):
            return None
        source = rows[0]["datasource"]
        ordered = sorted(whole, key=lambda own: own[0]["sample_id"])
        episodes = tuple(EpisodeResult.of_episode([*map(_branch, own)]) for own in ordered)
        return PromptResult(group_id=number, datasource=source, episodes=episodes, failures=failures)
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"The lines of group_id {number} in {path} are no replies of an evaluation ({error!r}): remove them."
        ) from error


def _failure(row: Row) -> RolloutFailure:
    return RolloutFailure(
        kind=FailureKind(row["failure_kind"]),
        message=row[FAILURE],
        group_id=row["group_id"],
        sample_id=row["sample_id"],
    )


def _branch(row: Row) -> EpisodeResult:
    return EpisodeResult(
        score=float(row["score"]),
        sampled_tokens=row["sampled_tokens"],
        truncated=StopReason(row["stop_reason"]).truncated,
        role=row["role"],
        answer=row["answer"],
        reward_parts=row["reward_parts"],
        metrics=row["metrics"],
    )


def _keep(path: Path, model: str, kept: Mapping[int, Any]) -> None:
    """Removes the lines of a model's prompts that are not kept, and an incomplete one; a process that is killed
    meanwhile leaves the file as it was."""
    others = (
        line for line, row in _rows(path) if row is not None and (row["model"] != model or row["group_id"] in kept)
    )
    replace_lines(path, others)
