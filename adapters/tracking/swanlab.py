"""Metrics for SwanLab."""

from collections.abc import Mapping, Sequence
from typing import Any

import structlog
import swanlab

from rollgrad.adapters.tracking.tracked_run import TrackedRun
from rollgrad.domain.ports.run_tracker import RunTracker

_log = structlog.get_logger(__name__)


class SwanLabSink(RunTracker):
    """Logs to a run of SwanLab, which is recorded in the output directory where it cannot be sent, as without an API
    key (`swanlab login`, SWANLAB_API_KEY); `swanlab sync` sends it later. SWANLAB_MODE decides, if it is set."""

    def __init__(self, run: TrackedRun) -> None:
        self._tracked = run
        self._reason: str | None = None
        try:
            self._run = self._begin({})
        except RuntimeError as error:  # no key, or no network
            where = run.directory / "swanlab"
            _log.warning(f"swanlab records this run in {where}, which `swanlab sync` sends", reason=str(error))
            self._run = self._begin({"mode": "offline"})

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Logs the metrics of a step."""
        self._run.log(dict(metrics), step=step)

    def samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Logs each as a text, under which the numbers stand."""
        texts = [
            swanlab.Text(
                f"{sample['prompt']}\n\n{sample['response']}",
                caption=f"reward {sample['reward']:g}, label {sample['label']}, {sample['stop_reason']}",
            )
            for sample in samples
        ]
        self._run.log({"samples": texts}, step=step)

    def fail(self, reason: str) -> None:
        """Marks the run as crashed."""
        self._reason = reason

    def close(self) -> None:
        """Sends what is left."""
        if self._reason is None:
            self._run.finish()
        else:
            self._run.finish(state="crashed", error=self._reason)

    def _begin(self, mode: Mapping[str, str]) -> swanlab.Run:
        run = self._tracked
        return swanlab.init(
            workspace=run.organization,
            project=run.project,
            name=run.name,
            group=run.group,
            log_dir=str(run.directory / "swanlab"),
            id=run.id_in("swanlab"),
            resume="allow",
            config=dict(run.settings),
            # The console, the working tree and the command line, which the runtime's description has, may hold what
            # nobody meant to send, and nobody may be there to answer.
            settings=swanlab.Settings(
                interactive=False, terminal={"proxy_type": "none"}, probe={"git": False, "runtime": False}
            ),
            **mode,
        )
