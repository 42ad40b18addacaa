"""Curves and report of a run, written when it ends and on its way. Importable without torch."""

import os
import subprocess
import sys
from pathlib import Path

import structlog

import rollgrad
from rollgrad.adapters.checkpoints.lock import keep_locked
from rollgrad.adapters.checkpoints.names import METRICS_FILE
from rollgrad.adapters.tracking.curves import draw_curves
from rollgrad.entrypoints.ui.report import write_run_report

log = structlog.get_logger(__name__)

CURVES_FILE = "curves.png"
ASIDE = """
import pathlib, sys
from rollgrad.entrypoints.reporting import write
from rollgrad.entrypoints.ui.without_pandas import without_pandas
with without_pandas():
    write(pathlib.Path(sys.argv[1]), sys.argv[2])
"""
ASIDE_SECONDS = 600.0
"""Longest that a report on the way may take."""


def write(output_dir: Path, title: str) -> Path | None:
    """Writes the curves of a run as an image, and its report; returns the report's path, None if nothing was logged.

    Raises:
        Exception: of the disk, or of the drawing library.
    """
    metrics_path = output_dir / METRICS_FILE
    if not metrics_path.exists():
        return None
    draw_curves(metrics_path, output_dir / CURVES_FILE, title=title)
    return write_run_report(output_dir, title=title)


def report_run(output_dir: Path, title: str) -> Path | None:
    """Does as `write`; that no report can be written is no reason to fail."""
    try:
        keep_locked(output_dir)
        return write(output_dir, title)
    except Exception as error:  # of any kind
        _say_none(str(error))
        return None


def report_aside(output_dir: Path, title: str) -> None:
    """Does as `report_run` in a process of its own, for a run that goes on: what draws and reads would keep 100 MB of
    this one to its end."""
    places = os.pathsep.join([str(Path(rollgrad.__file__).parents[1]), *filter(None, sys.path)])
    try:
        keep_locked(output_dir)
        ended = subprocess.run(
            [sys.executable, "-P", "-c", ASIDE, str(output_dir), title],
            env={**os.environ, "PYTHONPATH": places},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=ASIDE_SECONDS,
            start_new_session=True,  # Ctrl-C is the run's
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        _say_none(str(error))
        return
    if ended.returncode:
        _say_none((ended.stderr.strip() or f"its process ended with {ended.returncode}").splitlines()[-1])


def _say_none(reason: str) -> None:
    log.warning("no report could be written", reason=reason)
