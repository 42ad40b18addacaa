"""One run as the page shows it, read from its directory, also while the run goes on; nothing but notes is written.

Every answer is what JSON holds. Importable without torch.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from attrs import frozen

from rollgrad.adapters.checkpoints.files import size_of
from rollgrad.adapters.checkpoints.names import CONFIG_FILE, METRICS_FILE, TRAJECTORIES
from rollgrad.adapters.tracking.browse import trajectory
from rollgrad.adapters.tracking.browse.index import DEFAULT_SORT, Rollouts, RunIndex
from rollgrad.adapters.tracking.browse.notes import NOTES_FILE, read_notes, write_note
from rollgrad.adapters.tracking.browse.rescored import RESCORED, read_rescored, rescored_files, rewards_of
from rollgrad.adapters.tracking.browse.summaries import TEXTS, names_in
from rollgrad.adapters.tracking.metrics_file import LoggedMetrics, MetricsReader, read_logged, thinned
from rollgrad.domain.control.findings import Finding, LearningWatch
from rollgrad.domain.errors import DataError
from rollgrad.entrypoints.inspection import learning_settings
from rollgrad.entrypoints.run_directory import OTHER_CONFIG_FILE
from rollgrad.entrypoints.run_record import RunStatus, read_run
from rollgrad.entrypoints.ui.in_short import in_short
from rollgrad.entrypoints.ui.run_settings import read_settings, trainer_of

MOST_ROWS = 1000
"""Rows of a page of the list."""
MOST_TIMES = 3
"""Times of a finding that comes and goes which are listed, the newest."""
EVIDENCE: Mapping[str, tuple[str, str | None]] = {
    "constant_reward": ("reward/mean", None),
    "no_spread": ("rollout/zero_spread_share", "zero_spread"),
    "truncated": ("rollout/truncated_share", "stop_reason = length"),
    "no_gradient": ("policy/grad_norm", "advantage = 0"),
    "no_step": ("train/grad_norm", None),
    "reference_kept": ("train/chosen_reward", None),
    "chosen_fell": ("train/chosen_fell_share", None),
    "reference_left": ("policy/ref_kl", None),
    "kl_outweighs": ("policy/kl_coef", None),
    "entropy_collapsed": ("rollout/entropy", None),
    "reward_follows_length": ("rollout/reward_length_correlation", None),
    "mismatch_grows": ("policy/mismatch_kl", None),
    "stale": ("rollout/rejected_stale", None),
    "failing": ("rollout/samples", "failure is not null"),
    "duplicates": ("rollout/duplicate_share", None),
    "clipped": ("policy/clip_high_share", None),
    "part_falls": ("reward/mean", None),
    "tools_fail": ("reward/tool_errors", None),
    "evaluation_falls": ("eval/mean_stderr", None),
    "memory_full": ("memory/host_share", None),
    "recomputing": ("rollout/recomputed_share", None),
    "time_lost": ("time/step_s", None),
}
"""Metric of each finding, and the filter of rollouts that show it."""

Made = TypeVar("Made")


@frozen
class _Watch:
    """A watch over a run's metrics, and how far it has come."""

    begun: Any
    """Settings that it began with, and how often steps were replaced until then."""
    watch: LearningWatch
    last_step: int
    """The last step that it has seen."""


class RunView:
    """A run's directory. All methods may be called from any thread.

    Args:
        directory: directory of the run.
        id: its name in URLs.
        name: name that is shown.
    """

    def __init__(self, directory: Path, *, id: str, name: str) -> None:
        self.directory = directory
        self.id = id
        self._name = name
        self._index = RunIndex(directory)
        self._metrics = MetricsReader(directory / METRICS_FILE)
        self._kept: dict[str, tuple[Any, Any]] = {}
        self._lock = threading.Lock()
        self._watch: _Watch | None = None
        self._watching = threading.Lock()

    def row(self) -> dict[str, Any]:
        """Returns the run as the list of runs has it, which keeps no series in memory: there may be many runs."""
        path = self.directory / METRICS_FILE
        return self._row(self._keep("summary", _stamp(path), lambda: self._summary(_read(partial(read_logged, path)))))

    def _summary(self, logged: LoggedMetrics) -> dict[str, Any]:
        found = self._findings(logged)
        return in_short(logged) | {"findings": [finding["evidence"] for finding in found if finding["holds"]]}

    def _row(self, logged: Mapping[str, Any]) -> dict[str, Any]:
        facts, settings = self._facts(), self.settings()
        return {
            "id": self.id,
            "name": self._name,
            "path": str(self.directory),
            **facts,
            **logged,
            # Of a run that continues the record has the last process's, and a clock may have been set back.
            "seconds": max(filter(None, (_seconds(facts), logged["seconds"])), default=None),
            "model": Path(str(settings.get("actor.model_name_or_path") or "")).name or None,
            "dataset": Path(str(settings.get("data.prompt_dataset") or settings.get("data.dataset") or "")).name
            or None,
            "trainer": trainer_of(settings),
            "trajectories": (self.directory / TRAJECTORIES).is_dir(),
        }

    def overview(self) -> dict[str, Any]:
        """Returns all of a run but its series and rollouts."""
        rollouts, logged = self.rollouts(), self._logged()
        row = self._row(in_short(logged))
        settings = self.settings()
        steps = {kind: set[int]() for kind in ("update", "evaluation")}
        for kind, step in zip(*(rollouts.table[name].to_pylist() for name in ("kind", "step")), strict=True):
            steps[kind].add(step)
        facts = read_run(self.directory) or {}
        return row | {
            "settings": settings,
            "versions": facts.get("versions") or {},
            "files": self._files(),
            "commands": self._commands(row["trainer"]),
            "metrics": sorted(logged.series),
            "rows": len(rollouts),
            "update_steps": sorted(steps["update"]),
            "eval_steps": sorted(steps["evaluation"]),
            "parts": names_in(rollouts.table, "reward_parts"),
            "metric_columns": names_in(rollouts.table, "metrics"),
            "columns": [
                {"name": name, "type": kind.value, "text": TEXTS.get(name, "")} for name, kind in rollouts.kinds.items()
            ],
            "rescored": self._rescored(),
            "problems": [*row["problems"], *rollouts.problems],
        }

    def metrics(self, since: int = 0, names: Sequence[str] = (), points: int = 0) -> dict[str, Any]:
        """Returns series of metrics: those of later steps than `since`, by default all, and of `names`, by default
        all; of each about `points` at most, 0 for all."""
        logged = self._logged()
        series = {}
        for name in names or logged.series:
            values = logged.series.get(name, {})
            later = {step: value for step, value in values.items() if step > since} if since else values
            series[name] = thinned(list(later), list(later.values()), points)
        return {
            "series": series,
            "last_step": logged.last_step,
            "broken_lines": len(logged.broken),
            "problems": logged.problems,
        }

    def findings(self) -> dict[str, Any]:
        """Returns what keeps the run from learning, with the metric and the rollouts that show it; `before`: how often
        the same was found before the first that is listed."""
        return {"findings": self._findings(self._logged())}

    def _findings(self, logged: LoggedMetrics) -> list[dict[str, Any]]:
        found = self._watched(logged).findings()
        by_name: dict[str, list[Finding]] = {}
        for finding in found:
            by_name.setdefault(finding.name, []).append(finding)
        newest = {name: times[-MOST_TIMES:] for name, times in by_name.items()}
        unlisted = {newest[name][0]: len(times) - len(newest[name]) for name, times in by_name.items()}
        listed = []
        for finding in found:
            if finding not in newest[finding.name]:
                continue
            metric, condition = EVIDENCE[finding.name]
            steps = f"step >= {finding.since} and step <= {finding.until}"
            listed.append(
                {
                    "name": finding.name,
                    "evidence": finding.evidence,
                    "look_at": finding.look_at,
                    "since": finding.since,
                    "until": finding.until,
                    "before": unlisted.get(finding, 0),
                    "holds": finding.until == logged.last_step,
                    "metric": metric,
                    "filter": None if condition is None else f"{condition} and kind = update and {steps}",
                }
            )
        return listed

    def trajectories(self, condition: str, sort: str, page: int, size: int) -> dict[str, Any]:
        """Returns a page of summary rows that a filter chooses.

        Raises:
            FilterError: filter or order cannot be understood.
        """
        rollouts = self.rollouts()
        size = max(1, min(size, MOST_ROWS))
        found = rollouts.find(condition, sort or DEFAULT_SORT)
        rows = rollouts.rows(found.slice(max(0, page) * size, size))
        return {
            "total": len(rollouts),
            "matched": len(found),
            "page": max(0, page),
            "size": size,
            "rows": rows,
            "problems": list(rollouts.problems),
        }

    def points(self, condition: str, x: str, y: str, color: str | None) -> dict[str, Any]:
        """Returns the points of a scatter; `Rollouts.points` says how."""
        return self.rollouts().points(condition, x, y, color)

    def trajectory(self, key: str) -> dict[str, Any]:
        """Returns a rollout with its tokens.

        Raises:
            DataError: it is not there, or cannot be read.
        """
        (found,) = self.whole(self.rollouts(), [key])
        return found

    def whole(self, rollouts: Rollouts, keys: Sequence[str]) -> list[dict[str, Any]]:
        """Returns rollouts of one step with their tokens.

        Raises:
            DataError: one is not there, or cannot be read.
        """
        losses = self._logged().series.get("policy/policy_loss", {})
        found = trajectory.trajectories(rollouts, keys)
        for row in found:
            if row["step_totals"] is not None:
                row["step_totals"]["logged_loss"] = losses.get(row["step"])
        return found

    def group(self, kind: str, step: int, group_id: int) -> dict[str, Any]:
        """Returns all rollouts of a group; `browse.trajectory.group` says how."""
        return trajectory.group(self.rollouts(), kind, step, group_id)

    def compared(self) -> dict[str, Any]:
        """Returns the prompts of evaluations with their scores."""
        return trajectory.compared(self.rollouts())

    def replies_to(self, prompt_id: str) -> dict[str, Any]:
        """Returns the replies to one prompt of the evaluations.

        Raises:
            DataError: there is none.
        """
        return trajectory.replies_to(self.rollouts(), prompt_id)

    def notes(self) -> dict[str, Any]:
        """Returns all notes by key."""
        return {"notes": {key: note.as_dict() for key, note in read_notes(self.directory).items()}}

    def note(self, key: str, change: Mapping[str, Any]) -> dict[str, Any]:
        """Changes a rollout's note, and returns it.

        Raises:
            DataError: there is no such rollout, or the change is of another form.
            CheckpointError: it cannot be written.
        """
        trajectory.check_key(self.rollouts(), key)
        return {"key": key, **write_note(self.directory, key, change).as_dict()}

    def rescored(self, name: str) -> dict[str, Any]:
        """Returns old and new rewards of a rescoring.

        Raises:
            DataError: there is none of this name.
        """
        for path in rescored_files(self.directory):
            if path.stem == name:
                return read_rescored(path)
        raise DataError(f"This run has no rescoring {name!r}.")

    def state(self) -> dict[str, Any]:
        """Returns what tells whether anything changed: cheap enough to be asked every second."""
        facts = self._facts()
        parts = {
            "status": [facts["status"], facts["reason"]],
            "metrics": _stamp(self.directory / METRICS_FILE),
            "trajectories": _stamp(self.directory / TRAJECTORIES),
            "notes": _stamp(self.directory / NOTES_FILE),
            "rescored": _stamp(self.directory / RESCORED),
        }
        return {
            "status": facts["status"],
            "step": self._logged().last_step,
            "heartbeat_age": facts["heartbeat_age"],
            "version": "-".join(str(part) for part in parts.values()),
            "parts": parts,
        }

    def settings(self) -> dict[str, Any]:
        """Returns the run's settings by their dotted names; none of a run without a readable file of them."""
        for name in (OTHER_CONFIG_FILE, CONFIG_FILE):
            path = self.directory / name
            if path.is_file():
                return self._keep(name, _stamp(path), partial(read_settings, path))
        return {}

    def rollouts(self) -> Rollouts:
        """Returns the rollouts that are there now."""
        files = rescored_files(self.directory)
        if not files:
            return self._index.rollouts()
        try:
            new = self._keep("rescored", _stamp(files[-1]), lambda: rewards_of(read_rescored(files[-1])))
        except DataError:  # it is named where it is listed
            return self._index.rollouts()
        return self._index.rollouts(new)

    def _rescored(self) -> list[dict[str, Any]]:
        """Returns name, reward and summary of each rescoring; a file that cannot be read has its problem instead."""
        listed = []
        for path in rescored_files(self.directory):
            try:
                content = self._keep(path.name, _stamp(path), partial(read_rescored, path))
                listed.append({"name": path.stem, "reward": content.get("reward"), **content["summary"]})
            except DataError as error:
                listed.append({"name": path.stem, "problem": str(error)})
        return listed

    def _facts(self) -> dict[str, Any]:
        """Returns state and times of the run, from `run.json`."""
        found = read_run(self.directory) or {"status": "unknown"}
        status = "crashed" if found["status"] is RunStatus.DIED else str(found["status"])
        names = ("heartbeat_age", "reason", "started", "ended", "steps", "host", "heartbeat")
        return {"status": status, **{name: found.get(name) for name in names}}

    def _logged(self) -> LoggedMetrics:
        path = self.directory / METRICS_FILE
        return self._keep(METRICS_FILE, _stamp(path), partial(_read, self._metrics.read))

    def _watched(self, logged: LoggedMetrics) -> LearningWatch:
        """Returns the watch after all that was logged: of a run that goes on only the newest steps are looked at."""
        begun = learning_settings(read_run(self.directory) or {}, logged.last_step), logged.replaced
        with self._watching:
            known = self._watch
            if known is None or known.begun != begun or known.last_step > logged.last_step:
                known = _Watch(begun, LearningWatch(begun[0]), last_step=0)
            watch = known.watch.after(logged.series, known.last_step)
            self._watch = _Watch(begun, watch, logged.last_step)
            return watch

    def _keep(self, name: str, stamp: Any, make: Callable[[], Made]) -> Made:
        """Returns what was made of a file, which is made again if the file changed."""
        with self._lock:
            if self._kept.get(name, (None, None))[0] != stamp:
                self._kept[name] = stamp, make()
            made: Made = self._kept[name][1]
            return made

    def _files(self) -> list[dict[str, Any]]:
        names = [path for path in sorted(self.directory.iterdir()) if not path.name.startswith(".")]
        return [{"name": path.name + ("/" if path.is_dir() else ""), "bytes": size_of(path)} for path in names]

    def _commands(self, trainer: str | None) -> dict[str, str]:
        from shlex import quote

        run = quote(str(self.directory))
        commands = {"inspect": f"rollgrad inspect {run}"}
        if trainer is not None and (self.directory / CONFIG_FILE).is_file():
            commands["continue"] = f"rollgrad train {trainer} --config {run}/{CONFIG_FILE} --ckpt.resume"
        if (self.directory / "model").is_dir() and trainer not in ("rm", "prm"):
            commands["chat"] = f"rollgrad chat --model {run}/model"
            commands["serve"] = f"rollgrad serve agent --model {run}/model"
        return commands


def _stamp(path: Path) -> list[int]:
    """Returns numbers that change when a file, or the list of a directory's files, does."""
    try:
        status = path.stat()
    except OSError:
        return []
    return [status.st_mtime_ns, status.st_size, status.st_ino]


def _seconds(facts: Mapping[str, Any]) -> float | None:
    try:
        started = datetime.fromisoformat(facts["started"])
        return (datetime.fromisoformat(facts["ended"] or facts["heartbeat"]) - started).total_seconds()
    except (TypeError, ValueError):
        return None


def _read(read: Callable[[], LoggedMetrics]) -> LoggedMetrics:
    """Returns what a run has logged; nothing of one without such a file."""
    try:
        return read()
    except FileNotFoundError:
        return LoggedMetrics(series={}, broken=())
