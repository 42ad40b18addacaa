"""The directory of a run: whether it may be written, what it holds already, and what is removed from it.

Invariant: nothing that an earlier run left is replaced unless `ckpt.overwrite` says so, or the run continues it.
Importable without torch.
"""

import json
import shutil
from pathlib import Path

from rollgrad.adapters.checkpoints.names import METRICS_FILE, SAMPLES_FILE, TRAINING_STATE
from rollgrad.application.choices import Resume
from rollgrad.application.config import CheckpointConfig

LOGS = (METRICS_FILE, SAMPLES_FILE)
REPORTS = ("report.html", "curves.png")
MODELS = ("model", "step_*")


def output_problem(ckpt: CheckpointConfig) -> str | None:
    """Why a run with these settings may not write to `ckpt.output_dir`, None if it may."""
    directory = Path(ckpt.output_dir)
    if ckpt.resume is Resume.ALWAYS:
        if ckpt.overwrite:
            return (
                "ckpt.overwrite and ckpt.resume are both set, but a run either continues the one in ckpt.output_dir or "
                "replaces it: leave --ckpt.overwrite or --ckpt.resume out."
            )
        if not state_file(ckpt).exists():
            return (
                f"ckpt.resume is always, but {state_file(ckpt).parent} holds no training state: start anew without "
                "--ckpt.resume, set --ckpt.output_dir (and --ckpt.state_dir) to those of the run to continue, or take "
                "--ckpt.resume auto, which starts anew where there is none."
            )
        return None
    if ckpt.overwrite or continues(ckpt) or not _found(directory, MODELS if ckpt.resume is Resume.AUTO else None):
        return None
    go_on = "continue it with --ckpt.resume, " if state_file(ckpt).exists() else ""
    return (
        f"ckpt.output_dir is {ckpt.output_dir!r}, which holds a run of {_steps(directory / METRICS_FILE)} steps: "
        f"{go_on}choose another --ckpt.output_dir, or replace it with --ckpt.overwrite."
    )


def state_file(ckpt: CheckpointConfig) -> Path:
    """Where the run's training state is, if it has one."""
    return Path(ckpt.state_dir or ckpt.output_dir) / TRAINING_STATE


def continues(ckpt: CheckpointConfig) -> bool:
    """Whether the run continues from a training state."""
    return ckpt.resume is not Resume.NEVER and state_file(ckpt).exists()


def remove_run(ckpt: CheckpointConfig) -> None:
    """Removes the models, states and reports of the run that `ckpt.output_dir` holds, and no other file. Its logs are
    emptied by `keep_steps`."""
    for path in (*_found(Path(ckpt.output_dir), (*MODELS, *REPORTS, "*.state.json")), state_file(ckpt)):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def keep_steps(log: Path, *, until: int) -> None:
    """Takes the lines of later steps out of a JSONL file, and a last one that was not written to its end; without any
    left, removes the file."""
    if not log.exists():
        return
    steps = ((line, _step(line)) for line in log.read_bytes().split(b"\n"))
    kept = [line for line, step in steps if step is not None and step <= until]
    if kept:
        fresh = log.with_name(f".{log.name}.new")
        fresh.write_bytes(b"".join(line + b"\n" for line in kept))
        fresh.replace(log)
    else:
        log.unlink()


def _found(directory: Path, patterns: tuple[str, ...] | None) -> list[Path]:
    """What there is by these patterns; by default, all that tells of a run."""
    patterns = (*MODELS, *LOGS, TRAINING_STATE) if patterns is None else patterns
    return [path for pattern in patterns for path in directory.glob(pattern)]


def _steps(log: Path) -> int:
    """The last step that a run logged."""
    lines = log.read_bytes().split(b"\n") if log.exists() else []
    return next((step for step in map(_step, reversed(lines)) if step is not None), 0)


def _step(line: bytes) -> int | None:
    """The step of a log's line; None of one that is empty, or whose process was killed while it wrote."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return None
