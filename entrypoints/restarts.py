"""A run of the command line that has lost a process of its actor or critic starts again from its training state.

Importable without torch.
"""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import TypeVar

from attrs import evolve

from rollgrad.application.settings.offline import OfflineRun
from rollgrad.application.settings.run import RLConfig
from rollgrad.application.settings.sections.ckpt import Resume
from rollgrad.domain.control.engine_health import FleetBounds
from rollgrad.domain.errors import START_AGAIN, LostProcessError
from rollgrad.entrypoints.run_directory import has_state, output_problem

Run = TypeVar("Run", RLConfig, OfflineRun)
Result = TypeVar("Result")

LONG_LIFE = FleetBounds().healed_after
"""Seconds after whose training a start counts as the first, as for engines: a run of weeks loses a process now and
then, one that cannot go on loses it again and again."""


def until_finished(run: Run, train: Callable[[Run], Result]) -> Result:
    """Trains by `train`, which ends all processes of a run that has lost one; starts again after that, up to
    `cluster.max_restarts` times.

    Raises:
        LostProcessError: no start is left, or none may continue what is in `ckpt.output_dir`.
    """
    spent = 0
    begun: Callable[[], AbstractContextManager[None]] = nullcontext
    while True:
        started = time.monotonic()
        try:
            with begun():
                return train(run)
        except LostProcessError as error:
            if time.monotonic() - started >= LONG_LIFE:
                spent = 0
            again = evolve(run.ckpt, resume=Resume.AUTO, overwrite=run.ckpt.overwrite and not has_state(run.ckpt))
            if spent >= run.cluster.max_restarts or output_problem(again):
                raise
            spent += 1
            run = evolve(run, ckpt=again)
            import structlog

            from rollgrad.entrypoints.run_record import starting_again  # it imports the log, which --help does without

            reason, most = str(error).removesuffix(START_AGAIN), run.cluster.max_restarts
            begun = partial(
                starting_again, Path(run.ckpt.output_dir), f"starts again, {spent} of {most} times: {reason}"
            )
            structlog.get_logger(__name__).warning(
                "a process is lost, so that the run starts again from its last training state",
                start=spent,
                of=most,
                reason=reason,
            )
