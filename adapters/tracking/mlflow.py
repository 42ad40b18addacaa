"""Metrics for MLflow."""

import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Metric, Param
from mlflow.utils.mlflow_tags import MLFLOW_RUN_NAME

from rollgrad.adapters.tracking.tracked_run import TrackedRun, flat
from rollgrad.domain.ports.run_tracker import RunTracker

MOST_PARAMS = 100
"""Parameters that MLflow takes in one request."""

FAILURE = "failure"
"""Tag with the reason of a run that failed."""

LONGEST_TAG = 5000
"""Characters of a tag's value that MLflow takes."""

LONGEST_PARAM = 6000
"""Characters of a parameter's value that MLflow takes."""


REFUSED = re.compile(r"[^\w.\-: /]", re.ASCII)
"""Characters that no name of MLflow may have."""


class MLflowSink(RunTracker):
    """Logs to a run of MLflow; MLFLOW_TRACKING_URI says where. The project is the experiment; `pass@4` is `pass_at_4`
    there, and another character that MLflow refuses in a name is `_`."""

    def __init__(self, run: TrackedRun) -> None:
        self._client = MlflowClient()
        self._status = "FINISHED"
        self._id = run.id_in("mlflow", lambda: self._begin(run))
        self._client.update_run(self._id, status="RUNNING")
        if FAILURE in self._client.get_run(self._id).data.tags:  # of a run that is continued
            self._client.delete_tag(self._id, FAILURE)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Logs the metrics of a step."""
        now = int(time.time() * 1000)
        named = [Metric(_allowed(name), value, now, step) for name, value in metrics.items()]
        self._client.log_batch(self._id, metrics=named)

    def samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Writes a file for each step: a table that grows would be sent whole each time."""
        self._client.log_dict(
            self._id, {"samples": [dict(sample) for sample in samples]}, f"samples/step_{step:06d}.json"
        )

    def fail(self, reason: str) -> None:
        """Marks the run as failed, with the reason as its tag `failure`."""
        self._status = "FAILED"
        self._client.set_tag(self._id, FAILURE, reason[:LONGEST_TAG])

    def close(self) -> None:
        """Marks the run as finished or failed."""
        self._client.set_terminated(self._id, self._status)

    def _begin(self, run: TrackedRun) -> str:
        experiment = self._client.get_experiment_by_name(run.project)
        experiment_id = experiment.experiment_id if experiment else self._client.create_experiment(run.project)
        tags = {MLFLOW_RUN_NAME: run.name} | ({"group": run.group} if run.group else {})
        begun = self._client.create_run(experiment_id, tags=tags, run_name=run.name)
        params = [Param(_allowed(name), str(value)[:LONGEST_PARAM]) for name, value in flat(run.settings).items()]
        for start in range(0, len(params), MOST_PARAMS):
            self._client.log_batch(begun.info.run_id, params=params[start : start + MOST_PARAMS])
        return str(begun.info.run_id)


def _allowed(name: str) -> str:
    return REFUSED.sub("_", name.replace("@", "_at_"))
