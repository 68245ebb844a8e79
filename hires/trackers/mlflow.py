"""Hands the numbers of a training to MLflow."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Mapping

from hires.core.store import files
from hires.core.trackers import DONE, FAILED, PREEMPTED, TRACKERS, TrackedRun, Tracker

STORE, TAG = "mlruns", "hires.id"
_ENDS = {DONE: "FINISHED", PREEMPTED: "KILLED", FAILED: "FAILED"}
_USUAL = {"MLFLOW_ALLOW_FILE_STORE": "true", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "3"}
"""Unless the user sets them: many runs at once write files without a database, and a server that is
away is given up after 15 s, not after minutes in which the other ranks wait at their start."""
_MOST, _MOST_LETTERS = 100, 500
"""Parameters of one request, and letters of one, that every MLflow takes."""


@TRACKERS.register("mlflow")
class MLflow(Tracker):
    """The server of MLFLOW_TRACKING_URI, or else `mlruns` of the folder of results."""

    package = extra = "mlflow"
    remedy = "check MLFLOW_TRACKING_URI"

    def open(self, run: TrackedRun) -> None:
        """Resumes the MLflow run of an earlier attempt, or starts one."""
        os.environ.update(_USUAL | os.environ)
        logging.getLogger("urllib3").setLevel(logging.ERROR)  # it warns of each try
        from mlflow import MlflowClient, entities

        uri, results = os.environ.get("MLFLOW_TRACKING_URI"), run.folder.parents[1]
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or run.campaign
        lock = files.lock(results / f".{STORE}.lock", "a start in MLflow's store", 60.0)
        with contextlib.nullcontext() if uri else lock:  # runs of one moment make one experiment
            self._client = MlflowClient(uri or (results / STORE).as_uri())
            known = self._client.get_experiment_by_name(name)
            group = known.experiment_id if known else self._client.create_experiment(name)
        held = self._client.search_runs([group], f"tags.`{TAG}` = '{run.id}'", max_results=1)
        runs = held or [self._client.create_run(group, tags={TAG: run.id}, run_name=run.name)]
        self._id, self._entities = runs[0].info.run_id, entities
        params = [entities.Param(key, str(one)[:_MOST_LETTERS]) for key, one in run.keys.items()]
        for first in range(0, len(params), _MOST):
            self._client.log_batch(self._id, params=params[first : first + _MOST])
        self._client.update_run(self._id, status="RUNNING")

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Sends the numbers of a step as one request."""
        now, metric = int(time.time() * 1000), self._entities.Metric
        metrics = [metric(name, number, now, step) for name, number in numbers.items()]
        self._client.log_batch(self._id, metrics=metrics)

    def close(self, status: str) -> None:
        """Ends the run; a later attempt reopens it."""
        self._client.set_terminated(self._id, _ENDS[status])
