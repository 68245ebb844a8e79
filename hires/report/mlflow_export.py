"""Exports runs into an mlflow file store, through mlflow's own client.

A campaign becomes an experiment, and every complete attempt a run, with its config as parameters,
its numbers and steps as metrics, and code and machine as tags. What the store has is skipped.
"""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from hires.core.config.validate_config import METRICS as EVALUATION
from hires.core.errors import ConfigError
from hires.core.store.attempts import Attempt
from hires.core.store.step_lines import VALIDATED_LINE
from hires.report.columns import ACCURACY, RATES, STEP_TIMES, values
from hires.report.compare.comparison import origin
from hires.report.compare.metrics import METRICS
from hires.report.read.plain_values import dig, number, steps_of, value_text
from hires.report.read.runs import Run
from hires.report.read.step_curves import loss_by_step, number_by_step

TAG = "hires.attempt"  # tag that holds campaign, run and attempt
_MAX_METRICS = 1000  # per call of mlflow
_MAX_PARAMS = 100  # per call of mlflow; also the characters of a name that are kept
_INVALID = re.compile(r"[^A-Za-z0-9_.-]|\.(?=\.)|^\.|\.$")
"""What a name must not hold, because mlflow makes files of names."""
_MAX_VALUE = 500  # characters of a parameter that every version of mlflow takes


def write_mlflow(runs: Sequence[Run], out: Path) -> tuple[int, int]:
    """Writes the complete attempts of some runs into the file store in a folder.

    Returns how many were written, and how many the store had already; ConfigError: mlflow is not
    installed, or cannot write.
    """
    mlflow = _mlflow()
    client = mlflow.MlflowClient(tracking_uri=out.absolute().as_uri())
    written = skipped = 0
    experiments: dict[str, tuple[str, set[str]]] = {}
    try:
        for run, attempt in ((one, attempt) for one in runs for attempt in one.complete):
            if run.campaign not in experiments:
                experiments[run.campaign] = _experiment(client, run.campaign)
            experiment_id, names = experiments[run.campaign]
            name = f"{run.campaign}/{run.name}/a{attempt.number}"
            if name in names:
                skipped += 1
                continue
            _write(client, mlflow.entities, experiment_id, run, attempt, name)
            names.add(name)
            written += 1
    except (mlflow.exceptions.MlflowException, OSError) as error:
        raise ConfigError(f"mlflow cannot write into {out}: {error}") from error
    return written, skipped


def _mlflow() -> Any:
    # Versions of mlflow that prefer a database refuse a folder without this.
    os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # nothing leaves this machine unasked
    try:
        return importlib.import_module("mlflow")
    except ImportError:
        raise ConfigError(
            "--to mlflow needs mlflow, which is not installed: pip install 'hires[mlflow]', or "
            "choose --to csv"
        ) from None


def _experiment(client: Any, campaign: str) -> tuple[str, set[str]]:
    """Returns the id of a campaign's experiment, and the attempts that it holds."""
    experiment = client.get_experiment_by_name(campaign)
    if experiment is None:
        return client.create_experiment(campaign), set()
    names: set[str] = set()
    token = None
    while True:
        page = client.search_runs([experiment.experiment_id], page_token=token)
        names |= {run.data.tags.get(TAG, "") for run in page}
        token = page.token
        if not token:
            return experiment.experiment_id, names


def _write(
    client: Any, entities: Any, experiment_id: str, run: Run, attempt: Attempt, name: str
) -> None:
    started, ended = (_milliseconds(attempt.record, key) for key in ("started", "ended"))
    run_id = client.create_run(experiment_id, start_time=started, run_name=run.name).info.run_id
    when = ended or started or 0
    config = {_INVALID.sub("_", k)[:_MAX_PARAMS]: value_text(v) for k, v in run.flat_config.items()}
    params = [entities.Param(key, value[:_MAX_VALUE]) for key, value in config.items()]
    metrics = [entities.Metric(key, v, when, step) for key, v, step in _metrics(run, attempt)]
    for first in range(0, len(params), _MAX_PARAMS):
        client.log_batch(run_id, params=params[first : first + _MAX_PARAMS])
    for first in range(0, len(metrics), _MAX_METRICS):
        client.log_batch(run_id, metrics=metrics[first : first + _MAX_METRICS])
    client.set_terminated(run_id, end_time=ended)
    # The tag that marks an attempt as written comes last: an interrupted one is written again.
    facts = origin(attempt.record.get("provenance"))
    tags = {f"hires.{key}": value for key, value in facts.items() if value}
    tags |= {"hires.reproduce": run.reproduce or "", TAG: name}
    client.log_batch(run_id, tags=[entities.RunTag(key, value) for key, value in tags.items()])


def _metrics(run: Run, attempt: Attempt) -> list[tuple[str, float, int]]:
    """Returns name, value and step of every number."""
    record = attempt.record
    numbers = values((*RATES, *STEP_TIMES), record)
    numbers |= {f"loss_{p}": number(dig(record, "loss", p)) for p in ("first", "last")}
    numbers |= {f"evaluation_{key}": cell for key, cell in values(ACCURACY, record).items()}
    for name in ("best", "last"):
        found = {"evaluation": dig(record, "validation", name)}
        numbers |= {
            f"validation_{name}_{key}": cell for key, cell in values(ACCURACY, found).items()
        }
    metrics = [(key, value, 0) for key, value in numbers.items() if value is not None]
    metrics += [("peak_bytes_max", value, 0) for value in METRICS["memory"].values(record)]
    metrics += [("step_s", took, step) for step, took, _ in steps_of(record) if took is not None]
    curves = {"loss": loss_by_step(run.lines("step", attempt))}
    validated = run.lines(VALIDATED_LINE, attempt)
    curves |= {f"validation_{key}": number_by_step(validated, key) for key in EVALUATION}
    metrics += [(key, v, step) for key, curve in curves.items() for step, v in curve.items()]
    return metrics


def _milliseconds(record: dict[str, Any], key: str) -> int | None:
    time = dig(record, "provenance", key)
    try:
        return int(datetime.fromisoformat(time).timestamp() * 1000)
    except (TypeError, ValueError, OverflowError):
        return None
