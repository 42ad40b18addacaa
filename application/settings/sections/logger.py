"""The section `logger`: where metrics go."""

from collections.abc import Iterable

from attrs import define

from rollgrad.application.settings.function_path import FunctionPath
from rollgrad.domain.settings import COUNT, NOT_NEGATIVE, Condition, Range, setting

TRACKERS = ("wandb", "trackio", "mlflow", "swanlab")
"""Experiment trackers that metrics can be reported to."""


def is_own_tracker(name: str) -> bool:
    """Returns whether a name is the place of a user's own class, `FILE:NAME` or `MODULE:NAME`.

    >>> is_own_tracker("track.py:Mine"), is_own_tracker("my_lib.track:Mine"), is_own_tracker("wandb")
    (True, True, False)
    """
    return FunctionPath.parse(name).name is not None


def _names(value: str | Iterable[str] | None) -> tuple[str, ...]:
    """Returns names that stand alone, in a list, or with commas between them; "none" is no name.

    >>> _names("WandB, track.py:Mine"), _names(["mlflow"]), _names("none")
    (('wandb', 'track.py:Mine'), ('mlflow',), ())
    """
    texts = (value,) if isinstance(value, str) else value or ()
    names = [name.strip() for text in texts for name in text.split(",")]
    names = [name if is_own_tracker(name) else name.lower() for name in names]
    return tuple(dict.fromkeys(name for name in names if name not in ("", "none")))


OF_TRACKERS = Condition(
    lambda here, run: here.report_to, "metrics are reported to no tracker", "set --{at}report_to to one of its names"
)


REPORTS = Condition(
    lambda here, run: bool(here.report_to) or here.tensorboard_dir is not None,
    "metrics are reported neither to a tracker nor to TensorBoard",
    "set --{at}report_to or --{at}tensorboard_dir",
)


@define(kw_only=True)
class LoggerConfig:
    """Sinks of metrics besides metrics.jsonl in the output directory."""

    report_to: tuple[str, ...] = setting(
        (),
        f"Experiment trackers that get the metrics and the settings: {', '.join(TRACKERS)} (extras of these names), "
        "and classes of your own (FILE:NAME). What they cannot send is kept in the output directory; none of them can "
        "stop the run.",
        Range(
            lambda names: all(name in TRACKERS or is_own_tracker(name) for name in names),
            f"of {', '.join(TRACKERS)} and FILE:NAME, with commas between",
        ),
        converter=_names,
    )
    project: str = setting("rollgrad", "Project of the trackers' run (MLflow: experiment).", only_if=OF_TRACKERS)
    run_name: str | None = setting(
        None, "Name of the trackers' run; default: that of the output directory.", only_if=OF_TRACKERS
    )
    group: str | None = setting(None, "Group of the trackers' run.", only_if=OF_TRACKERS)
    organization: str | None = setting(
        None, "Team of Weights & Biases, or workspace of SwanLab; default: one's own.", only_if=OF_TRACKERS
    )
    tensorboard_dir: str | None = setting(None, "TensorBoard log directory (extra: tracking).")
    logging_steps: int = setting(
        1,
        "Steps from one report to trackers and TensorBoard to the next. They are told of every evaluation, and "
        "metrics.jsonl has all steps.",
        COUNT,
        only_if=REPORTS,
    )
    console: bool = setting(True, "Progress bar on a terminal and a table at the end.")
    log_samples: int = setting(
        1, "Sampled texts written to samples.jsonl each step, and sent to trackers.", NOT_NEGATIVE
    )
    trajectories_max_gib: float = setting(
        2.0,
        "Most GiB of trajectories/, which has all rollouts token by token; the oldest are removed beyond. 0 writes "
        "none.",
        NOT_NEGATIVE,
    )
