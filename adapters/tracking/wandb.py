"""Metrics for Weights & Biases."""

import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import structlog
import wandb

from rollgrad.adapters.tracking.tracked_run import TrackedRun
from rollgrad.domain.ports.run_tracker import RunTracker

_log = structlog.get_logger(__name__)

FAILURE = "failure"
"""Entry of the summary with the reason of a run that failed."""

INIT_SECONDS = 30.0
"""Longest time that the server has to begin a run."""


class WandbSink(RunTracker):
    """Logs to a run of Weights & Biases, which is recorded in the output directory where it cannot be sent.

    It is also recorded there without an API key (`wandb login`, WANDB_API_KEY); `wandb sync` sends it later.
    WANDB_MODE decides, if it is set.
    """

    def __init__(self, run: TrackedRun) -> None:
        self._tracked = run
        self._exit_code = 0
        try:
            # Asks nobody for a key, as init would: it is called from a thread.
            if not (os.environ.get("WANDB_MODE") or wandb.login(verify=False, prompt=False)):
                raise wandb.errors.AuthenticationError("no API key: wandb login, or set WANDB_API_KEY")
            self._run = self._begin(None)
        except Exception as error:  # a key that is none, a server that does not answer: of many kinds
            where = run.directory / "wandb"
            _log.warning(f"wandb records this run in {where}, which `wandb sync` sends", reason=str(error))
            wandb.teardown()  # which else keeps the id of the run that it could not begin
            self._run = self._begin("offline")
        del self._run.summary[FAILURE]  # of a run that is continued; nothing of another one
        # wandb's own count of steps refuses those that a continued run takes again.
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Logs the metrics beside `step`."""
        self._run.log({"step": step, **metrics})

    def samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Logs a table."""
        columns = list(samples[0])
        rows = [[sample[name] for name in columns] for sample in samples]
        self._run.log({"step": step, "samples": wandb.Table(columns=columns, data=rows)})

    def fail(self, reason: str) -> None:
        """Marks the run as failed, and keeps the reason in its summary."""
        self._exit_code = 1
        self._run.summary[FAILURE] = reason

    def close(self) -> None:
        """Sends what is left; idempotent."""
        self._run.finish(exit_code=self._exit_code)

    def _begin(self, mode: Literal["offline"] | None) -> wandb.Run:
        run = self._tracked
        return wandb.init(
            entity=run.organization,
            project=run.project,
            name=run.name,
            group=run.group,
            dir=run.directory,
            id=run.id_in("wandb"),
            resume="allow",
            mode=mode,
            config=dict(run.settings),
            # The console, the working tree and the command line, which wandb's metadata has, may hold what nobody meant
            # to send.
            settings=wandb.Settings(
                silent=True,
                console="off",
                disable_git=True,
                x_disable_meta=True,
                save_code=False,
                init_timeout=INIT_SECONDS,
            ),
        )
