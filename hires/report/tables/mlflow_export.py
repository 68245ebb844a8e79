"""How do runs get into an mlflow store? Through mlflow's own client, so that its layout is right.

A campaign becomes an experiment, and every complete attempt a run: the config its parameters, the
numbers its metrics, step times with their steps, code and machine its tags. An attempt that is
there already is left alone, so the same command can be given again.
"""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from hires.core.errors import ConfigError
from hires.core.store.attempts import Attempt
from hires.report.compare.differences import origin
from hires.report.compare.metrics import METRICS
from hires.report.load.plain_values import count, dicts, dig, number, spoken
from hires.report.load.runs import Run

TAG = "hires.attempt"
"""Tag that says which attempt a run of mlflow is."""
_BATCH = 1000
"""Metrics that one call of mlflow takes; of parameters and tags it takes a hundred."""
_FEW = 100
_NO_NAME = re.compile(r"[^A-Za-z0-9_.-]|\.(?=\.)|^\.|\.$")
"""What a name of mlflow, which becomes a file, may not hold."""
_LONGEST = 500
"""Characters of a parameter that every version of mlflow takes."""


def write_mlflow(runs: Sequence[Run], out: Path) -> tuple[int, int]:
    """Writes the complete attempts of some runs into a file store.

    Args:
        runs: what to write.
        out: folder of the store.

    Returns:
        How many were written, and how many were there already.

    Raises:
        ConfigError: mlflow is not installed, or cannot write.
    """
    client = _client(out)
    written = there = 0
    held: dict[str, dict[str, None]] = {}
    try:
        for run in runs:
            if run.complete and run.campaign not in held:
                held[run.campaign] = _known(client, run.campaign)
            for attempt in run.complete:
                name = f"{run.campaign}/{run.name}/a{attempt.number}"
                if name in held[run.campaign]:
                    there += 1
                    continue
                _write(client, run, attempt, name)
                held[run.campaign][name] = None
                written += 1
    except _errors() as error:
        raise ConfigError(f"mlflow cannot write into {out}: {error}") from error
    return written, there


def _client(out: Path) -> Any:
    """Returns mlflow's client of a file store."""
    # Versions of mlflow that prefer a database refuse a folder unless they are told to keep to it.
    os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # nothing leaves this machine unasked
    try:
        tracking = importlib.import_module("mlflow.tracking")
    except ImportError:
        raise ConfigError(
            "--to mlflow needs mlflow, which is not installed: pip install 'hires[mlflow]', or "
            "choose --to csv"
        ) from None
    return tracking.MlflowClient(tracking_uri=out.absolute().as_uri())


def _errors() -> tuple[type[Exception], ...]:
    """Returns what mlflow raises if it cannot write."""
    exceptions = importlib.import_module("mlflow.exceptions")
    return (exceptions.MlflowException, OSError)


def _known(client: Any, campaign: str) -> dict[str, None]:
    """Returns the attempts of a campaign that the store has."""
    experiment = client.get_experiment_by_name(campaign)
    if experiment is None:
        return {}
    found: dict[str, None] = {}
    token = None
    while True:
        page = client.search_runs([experiment.experiment_id], page_token=token)
        found.update(dict.fromkeys(run.data.tags.get(TAG, "") for run in page))
        token = page.token
        if not token:
            return found


def _write(client: Any, run: Run, attempt: Attempt, name: str) -> None:
    """Writes one attempt."""
    entities = importlib.import_module("mlflow.entities")
    experiment = client.get_experiment_by_name(run.campaign)
    number_of = experiment.experiment_id if experiment else client.create_experiment(run.campaign)
    started, ended = (_milliseconds(attempt.record, key) for key in ("started", "ended"))
    made = client.create_run(number_of, start_time=started, run_name=run.name)
    when = ended or started or 0
    config = {_NO_NAME.sub("_", key)[:_FEW]: spoken(v) for key, v in run.flat_config.items()}
    params = [entities.Param(key, value[:_LONGEST]) for key, value in config.items()]
    tags = [entities.RunTag(key, value) for key, value in _tags(run, attempt, name).items()]
    metrics = [entities.Metric(key, v, when, step) for key, v, step in _metrics(attempt.record)]
    for first in range(0, len(params), _FEW):
        client.log_batch(made.info.run_id, params=params[first : first + _FEW])
    for first in range(0, len(metrics), _BATCH):
        client.log_batch(made.info.run_id, metrics=metrics[first : first + _BATCH])
    # The tag by which an attempt is found again comes last: what was cut short is written again.
    client.set_terminated(made.info.run_id, end_time=ended)
    client.log_batch(made.info.run_id, tags=tags)


def _metrics(record: dict[str, Any]) -> list[tuple[str, float, int]]:
    """Returns name, value and step of every number; units end the names."""
    found: list[tuple[str, float, int]] = []
    for key in ("img_per_s", "step_s"):
        for part in ("median", "p10", "p90"):
            value = number(dig(record, "throughput", key, part))
            found += [] if value is None else [(f"{key}_{part}", value, 0)]
    found += [("peak_bytes_max", value, 0) for value in METRICS["memory"].values(record)]
    for part in ("first", "last"):
        value = number(dig(record, "loss", part))
        found += [] if value is None else [(f"loss_{part}", value, 0)]
    for sample in dicts(record.get("samples")):
        step, took = count(sample.get("step")), number(sample.get("step_s"))
        if step is not None and took is not None:
            found.append(("step_s", took, step))
    return found


def _tags(run: Run, attempt: Attempt, name: str) -> dict[str, str]:
    """Returns where an attempt comes from, and what makes it again."""
    facts = origin(attempt.record.get("provenance"))
    tags = {f"hires.{key}": value for key, value in facts.items() if value}
    return {**tags, "hires.reproduce": run.reproduce or "", TAG: name}


def _milliseconds(record: dict[str, Any], key: str) -> int | None:
    """Returns a time of the record in milliseconds since the epoch."""
    said = dig(record, "provenance", key)
    try:
        return int(datetime.fromisoformat(said).timestamp() * 1000)
    except (TypeError, ValueError, OverflowError):
        return None
