"""Names of the files in a run's directory; importable without torch."""

from pathlib import Path

METRICS_FILE = "metrics.jsonl"
SAMPLES_FILE = "samples.jsonl"
TRAJECTORIES = "trajectories"
"""Directory of the rollouts, a Parquet file for each update and each evaluation."""
PROFILE = "profile"
"""Directory of Chrome traces, a directory for each profiled step."""
RUN_FILE = "run.json"
TRACKERS_FILE = "trackers.json"
"""Ids by which experiment trackers know the run."""
CONFIG_FILE = "config.yaml"
TRAINING_STATE = "training_state_"
"""A directory of this name and the number of finished steps is a training state."""
OLD_TRAINING_STATE = "training_state.pt"
"""The only training state of a run by rollgrad 0.1, a file."""
MODEL_OF_STEP = "step_"
"""A directory of this name and the number of finished steps is a model."""


def numbered(directory: Path, prefix: str) -> list[tuple[int, Path]]:
    """Returns the directories called `prefix` and a number, newest first."""
    found = [(path.name.removeprefix(prefix), path) for path in directory.glob(f"{prefix}*") if path.is_dir()]
    return sorted(((int(number), path) for number, path in found if number.isdecimal()), reverse=True)


def state_paths(directory: Path) -> list[Path]:
    """Returns the training states in a directory, newest first."""
    paths = [path for _, path in numbered(directory, TRAINING_STATE)]
    old = directory / OLD_TRAINING_STATE
    return [*paths, old] if old.is_file() else paths
