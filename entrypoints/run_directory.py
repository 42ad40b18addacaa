"""The directory of a run: whether it may be written, its contents, and removing them.

Invariant: no file of an earlier run is replaced unless `ckpt.overwrite` is set, or the run continues the earlier one.
Importable without torch.
"""

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from rollgrad.adapters.checkpoints.files import remove_directory, replace_file, tidy
from rollgrad.adapters.checkpoints.lock import locked
from rollgrad.adapters.checkpoints.names import (
    CONFIG_FILE,
    METRICS_FILE,
    OLD_TRAINING_STATE,
    PROFILE,
    RUN_FILE,
    SAMPLES_FILE,
    TRACKERS_FILE,
    TRAINING_STATE,
    TRAJECTORIES,
    state_paths,
)
from rollgrad.adapters.checkpoints.states import load_description
from rollgrad.adapters.system.unwritable import remedy
from rollgrad.adapters.tracking.browse.notes import NOTES_FILE
from rollgrad.adapters.tracking.browse.rescored import RESCORED
from rollgrad.adapters.tracking.trajectory_files import PREFIXES, step_of, trajectory_files
from rollgrad.application.settings.sections.ckpt import CheckpointConfig, Resume
from rollgrad.domain.errors import CheckpointError, DataError, raise_together
from rollgrad.entrypoints.run_record import read_run

CONFIG_HEADER = "# The settings of a run by rollgrad"
OTHER_CONFIG_FILE = "config.run.yaml"
LOGS = (METRICS_FILE, SAMPLES_FILE)
REPORTS = ("report.html", "curves.png", RUN_FILE, TRACKERS_FILE, NOTES_FILE, RESCORED, f"{PROFILE}/step-*")
MODELS = ("model", "best", "best_[0-9]*", "step_*")
MODEL_SECTIONS = ("actor", "critic", "ref", "reward", "teacher")
"""Sections of settings that name a model."""
SHOWN_RUNS = 3
"""Runs that are named where a directory holds none."""


_NAME_ONE = "name the directory of one, its --ckpt.output_dir."


def is_run(directory: Path) -> bool:
    """Returns whether a directory has the files of a run."""
    return any((directory / name).is_file() for name in (RUN_FILE, *LOGS)) or (directory / TRAJECTORIES).is_dir()


def no_run(directory: Path) -> DataError:
    """Returns the error of a command that reads a run, for a directory that holds none."""
    near = [directory.parent] if is_run(directory.parent) else []
    if directory.is_dir():
        near += sorted(path for path in directory.iterdir() if path.is_dir() and is_run(path))
    more = len(near) - SHOWN_RUNS
    names = ", ".join(map(str, near[:SHOWN_RUNS])) + (f" or one of {more} more" if more > 0 else "")
    hint = f"name one of {names}." if len(near) > 1 else f"did you mean {names}?" if near else _NAME_ONE
    return DataError(f"{str(directory)!r} holds no run: {hint}")


def output_problem(ckpt: CheckpointConfig) -> str | None:
    """Returns why a run with these settings may not write to `ckpt.output_dir`, None if it may."""
    directory = Path(ckpt.output_dir)
    if ckpt.resume is Resume.ALWAYS:
        if ckpt.overwrite:
            return (
                "ckpt.overwrite and ckpt.resume are both set, but a run either continues the one in ckpt.output_dir or "
                "replaces it: leave --ckpt.overwrite or --ckpt.resume out."
            )
        if not has_state(ckpt):
            return (
                f"ckpt.resume is always, but {_state_directory(ckpt)} holds no training state: start anew without "
                "--ckpt.resume, set --ckpt.output_dir (and --ckpt.state_dir) to those of the run to continue, or take "
                "--ckpt.resume auto, which starts anew where there is none."
            )
        return None
    if not ckpt.overwrite and ckpt.resume is Resume.AUTO and (lost := _lost_state(ckpt)) is not None:
        return (
            f"ckpt.resume is auto, but {_state_directory(ckpt)} holds no training state, though the run in "
            f"{ckpt.output_dir} saved one after step {lost}: bring it back (is its disk mounted?), set "
            "--ckpt.state_dir to where it is, choose another --ckpt.output_dir, or replace it with --ckpt.overwrite."
        )
    if ckpt.overwrite or continues(ckpt) or not _found(directory, MODELS if ckpt.resume is Resume.AUTO else None):
        return None
    go_on = "continue it with --ckpt.resume, " if has_state(ckpt) else ""
    steps = last_step(directory)
    return (
        f"ckpt.output_dir is {ckpt.output_dir!r}, which holds a run of {steps} step{'' if steps == 1 else 's'}: "
        f"{go_on}choose another --ckpt.output_dir, or replace it with --ckpt.overwrite."
    )


def check_output(run: Any) -> None:
    """Checks that a run with these settings, of any kind, may write to `ckpt.output_dir`, and reads no model that it
    replaces there: it could not be started again, and a reference that is loaded once more would be another one.

    Raises:
        CheckpointError, ManyProblemsError: it may not; the message says why.
    """
    problems = [output_problem(run.ckpt), *(_source_problem(run, section) for section in MODEL_SECTIONS)]
    raise_together([CheckpointError(problem) for problem in problems if problem is not None])


def _source_problem(run: Any, section: str) -> str | None:
    """Returns why the model of a section of settings, if a run has it, cannot be read from where it is."""
    name = getattr(getattr(run, section, None), "model_name_or_path", None)
    if not name:
        return None
    directory, model = Path(run.ckpt.output_dir).resolve(), Path(name).expanduser().resolve()
    if directory not in model.parents or not any(
        fnmatchcase(model.relative_to(directory).parts[0], pattern) for pattern in MODELS
    ):
        return None
    return (
        f"{section}.model_name_or_path is {name!r}, which the run would replace, as ckpt.output_dir is "
        f"{run.ckpt.output_dir!r}: choose another --ckpt.output_dir, or copy the model elsewhere."
    )


@contextmanager
def alone(ckpt: CheckpointConfig) -> Iterator[None]:
    """Keeps other runs out of the directories that this one writes.

    Raises:
        CheckpointError: another run is writing there, or they cannot be written.
    """
    directory, states = Path(ckpt.output_dir), _state_directory(ckpt)
    with locked(directory, "--ckpt.output_dir"):
        if states.resolve() == directory.resolve():
            yield
            return
        with locked(states, "--ckpt.state_dir"):
            yield


def has_state(ckpt: CheckpointConfig) -> bool:
    """Returns whether there is a training state."""
    return bool(state_paths(_state_directory(ckpt)))


def begun(ckpt: CheckpointConfig) -> Mapping[str, Any] | None:
    """Returns the description of the run that continues, as it is in its training state; None where that has none.

    Raises:
        CheckpointError: no training state can be used.
    """
    return load_description(_state_directory(ckpt))


def _lost_state(ckpt: CheckpointConfig) -> int | None:
    """Returns the step of the newest training state of the run in `ckpt.output_dir`, if there is none any more; None
    where there is one, or never was."""
    facts = None if has_state(ckpt) else read_run(Path(ckpt.output_dir))
    step = None if facts is None else facts.get("training_state")
    return step if isinstance(step, int) else None


def continues(ckpt: CheckpointConfig) -> bool:
    """Returns whether the run continues from a training state."""
    return ckpt.resume is not Resume.NEVER and has_state(ckpt)


def remove_run(ckpt: CheckpointConfig) -> None:
    """Removes the models, states and reports of the run that `ckpt.output_dir` holds, and no other file. Its logs are
    emptied by `keep_steps`.

    Raises:
        CheckpointError: something cannot be removed.
    """
    directory = Path(ckpt.output_dir)
    found = _found(directory, (*MODELS, *REPORTS, "*.state.json"))
    with _changing(directory):
        _remove((*found, *state_paths(_state_directory(ckpt))))
        profile = directory / PROFILE
        if profile.is_dir() and not any(profile.iterdir()):  # else it is the directory of a run, which has its name
            profile.rmdir()


def remove_states(directory: Path) -> None:
    """Removes the training states from a directory, if it is there.

    Raises:
        CheckpointError: one cannot be removed.
    """
    with _changing(directory):
        _remove(state_paths(directory))


def keep_best_apart(directory: Path, step: int) -> Path | None:
    """Renames the model `best`, of a step, to `best_STEP`, so that a best one by another measure does not replace it;
    returns where it is, None if there is none, or one has that name already.

    Raises:
        CheckpointError: it cannot be renamed.
    """
    best, apart = directory / "best", directory / f"best_{step}"
    if apart.exists() or not best.is_dir():
        return None
    with _changing(directory):
        state = directory / "best.state.json"
        if state.exists():
            state.rename(directory / f"{apart.name}.state.json")
        best.rename(apart)
    return apart


def bring_best_back(directory: Path, step: int) -> None:
    """Undoes `keep_best_apart`, where the run that did it was killed before it saved a training state.

    Raises:
        CheckpointError: it cannot be undone.
    """
    apart = directory / f"best_{step}"
    if not apart.is_dir():
        return
    with _changing(directory):
        remove_directory(directory / "best")
        apart.rename(directory / "best")
        state = directory / f"{apart.name}.state.json"
        if state.exists():
            state.replace(directory / "best.state.json")


def keep_steps(log: Path, *, until: int) -> None:
    """Removes the lines of later steps from a JSONL file, and an incomplete last line; removes the file if no line is
    left.

    Raises:
        CheckpointError: it cannot be written.
    """
    if not log.exists():
        return
    with _changing(log.parent):
        content = log.read_bytes()
        steps = ((line, _step(line)) for line in content.split(b"\n"))
        kept = b"".join(line + b"\n" for line, step in steps if step is not None and step <= until)
        if not kept:
            log.unlink()
        elif kept != content:  # else a full disk, which has no room for another file, would keep a run from going on
            replace_file(log, kept)


def keep_trajectories(directory: Path, *, until: int) -> None:
    """Removes the trajectories of later steps from a run's directory, and what a killed process was writing.

    Raises:
        CheckpointError: they cannot be removed.
    """
    with _changing(directory):
        tidy(directory / TRAJECTORIES, ["*.parquet"])
        for path in trajectory_files(directory):
            if step_of(path) > until:
                path.unlink(missing_ok=True)


def last_step(directory: Path) -> int:
    """Returns the last step that a run logged, or kept rollouts of; 0 if there is none.

    Raises:
        OSError: a log cannot be read.
    """
    logged = (_last_logged(directory / name) for name in LOGS)
    return max(*logged, *map(step_of, trajectory_files(directory)))


def write_config(directory: Path, text: str) -> None:
    """Writes the settings of a run, YAML after the line `CONFIG_HEADER`, to `config.yaml`; to `config.run.yaml` if a
    user's own file has the first name.

    Raises:
        CheckpointError: it cannot be written.
    """
    with _changing(directory):
        target = directory / CONFIG_FILE
        if target.exists() and not target.read_bytes().startswith(CONFIG_HEADER.encode()):
            target = directory / OTHER_CONFIG_FILE
        replace_file(target, f"{CONFIG_HEADER}\n{text}".encode())


def _remove(paths: Iterable[Path]) -> None:
    for path in paths:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


@contextmanager
def _changing(directory: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"{error.filename or directory} cannot be changed ({error.strerror or error}): "
            f"{remedy(error)}, or choose another --ckpt.output_dir."
        ) from error


def _state_directory(ckpt: CheckpointConfig) -> Path:
    return Path(ckpt.state_dir or ckpt.output_dir)


def _found(directory: Path, patterns: tuple[str, ...] | None) -> list[Path]:
    """Returns the paths that match these patterns; by default, all files of a run."""
    updates = f"{TRAJECTORIES}/{PREFIXES['update']}*.parquet"
    patterns = (*MODELS, *LOGS, updates, f"{TRAINING_STATE}*", OLD_TRAINING_STATE) if patterns is None else patterns
    return [path for pattern in patterns for path in directory.glob(pattern)]


def _last_logged(log: Path) -> int:
    lines = log.read_bytes().split(b"\n") if log.exists() else []
    return next((step for step in map(_step, reversed(lines)) if step is not None), 0)


def _step(line: bytes) -> int | None:
    """Returns the step of a log's line; None for an empty or incomplete line."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None
