"""Appends what happens in an attempt, and builds its record at the end.

    ranks, launcher --append--> metrics.jsonl, events.jsonl --finish--> a<k>/record.json
                                                                        record.json of the run

Pure Python: rank 0 calls :func:`finish` when all went well, the launcher when ranks died.
"""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path
from typing import Any

from hires.core.config.run_config import RunConfig, from_dict
from hires.core.errors import ConfigError, RunError
from hires.core.store import file_names, provenance, reading, summary
from hires.core.store.attempts import Attempt
from hires.core.store.file_names import StrPath, attempt_dir
from hires.core.store.files import OPTION, append_line, write_atomically
from hires.core.store.naming import SCHEMA

STATES = ("done", "failed", "cancelled")


def require_seen(run_dir: StrPath) -> None:
    """Refuses to go on where a run folder cannot be seen, as on another node of a cluster.

    Raises:
        RunError: names the node and what would work.
    """
    if not (Path(run_dir) / file_names.CONFIG).is_file():
        node = os.environ.get("SLURMD_NODENAME") or platform.node()
        raise RunError(
            f"node {node} does not see {run_dir}: keep runs on a file system that all nodes mount "
            f"at the same place, with {OPTION}"
        )


def append(path: StrPath, line: dict[str, Any]) -> None:
    """Appends one JSON object as one line; processes may do so at the same time.

    Raises:
        RunError: the line could not be written, as on a full disk.
    """
    append_line(path, json.dumps(line))  # a loss may be NaN: these files are read by Python


def event(run_dir: StrPath, attempt: int, name: str, **fields: Any) -> None:
    """Appends an event with its time to the attempt's ``events.jsonl``.

    A rank that fails records ``event(..., "rank_failed", rank=r, type="CommError", text="...")``
    before it ends: the launcher separates causes from consequences by it.
    """
    line = {"time": provenance.now(), "event": name, **fields}
    append(attempt_dir(run_dir, attempt) / file_names.EVENTS, line)


def read_lines(path: StrPath) -> list[dict[str, Any]]:
    """Returns the objects of a JSON-lines file, without lines that were only half written.

    A file that is not there holds no lines. The content of a torn line is missing; :func:`finish`
    counts what is missing.
    """
    return list(reading.read_lines(path))


def read_config(run_dir: StrPath) -> RunConfig:
    """Returns the frozen config of a run folder.

    Raises:
        RunError: there is none, or it cannot be read.
        ConfigError: its values are of another hires, or wrong.
    """
    path = Path(run_dir) / file_names.CONFIG
    values = reading.read_yaml(path)
    try:
        return from_dict(values)
    except ConfigError as error:
        raise ConfigError(f"{path} is of another hires, or was edited: {error}") from None


def read_plan(run_dir: StrPath) -> dict[str, Any]:
    """Returns the frozen plan of a run folder.

    Raises:
        RunError: there is none, or it cannot be read.
    """
    return reading.read_json(Path(run_dir) / file_names.PLAN)


def read_record(run_dir: StrPath) -> dict[str, Any] | None:
    """Returns the record of a run folder, or None if no attempt has ended yet.

    Raises:
        RunError: it cannot be read, or another version of hires wrote it.
    """
    path = Path(run_dir) / file_names.RECORD
    if not path.exists():
        return None
    record = reading.read_json(path)
    if record.get("schema", SCHEMA) != SCHEMA:
        raise RunError(f"{path}: {other_schema(record)}")
    return record


def other_schema(record: dict[str, Any]) -> str:
    """Returns why a record of another version of hires is not read."""
    return (
        f"it has schema {record.get('schema')!r} and this hires reads {SCHEMA}: read it with the "
        f"hires that made it, or run the experiment again"
    )


def finish(run_dir: StrPath, attempt: int, state: str, cause: str | None = None) -> dict[str, Any]:
    """Builds the record of an attempt that ended and writes ``record.json``, twice.

    The attempt's own folder keeps it whatever later attempts do; the run's record is that of the
    last attempt that completed the run, or else of the last one.
    ``done`` is checked: if a rank lacks a step the record says ``failed`` and why. A record that
    is ``done`` stays when a later attempt fails or is cancelled; the attempt's own
    ``exit.json`` describes that one.

    Returns:
        The record of this attempt, whether or not it became ``record.json``.

    Raises:
        RunError: config, plan or environment cannot be read, or the record cannot be written.
    """
    assert state in STATES, state
    run_dir = Path(run_dir)
    own = Attempt(run_dir, attempt, strict=True)
    lines = own.metrics
    record = summary.build(
        summary.RecordInputs(
            own,
            read_config(run_dir),
            read_plan(run_dir),
            lines,
            _steps_before(run_dir, attempt, lines),
        ),
        state,
        cause,
    )
    text = json.dumps(record, indent=1, allow_nan=False) + "\n"
    write_atomically(own.folder / file_names.RECORD, text)
    if record["state"] == "done" or not _has_other_done(run_dir, attempt):
        write_atomically(run_dir / file_names.RECORD, text)
    return record


def _steps_before(run_dir: Path, attempt: int, lines: list[dict[str, Any]]) -> summary.StepsBefore:
    """Returns the steps that an attempt did not repeat, from the attempts that it goes on with."""
    steps: list[dict[str, Any]] = []
    begin = summary.begin_of(lines)
    while begin is not None and begin["attempt"] is not None and begin["attempt"] < attempt:
        attempt = begin["attempt"]
        before = read_lines(attempt_dir(run_dir, attempt) / file_names.METRICS)
        steps += [s for s in before if s.get("kind") == "step" and s["step"] < begin["step"]]
        begin = summary.begin_of(before)
    return summary.StepsBefore(steps, begin["step"] if begin else 0)


def _has_other_done(run_dir: Path, attempt: int) -> bool:
    """Returns whether the record is of another attempt, which was complete."""
    try:
        record = read_record(run_dir)
    except RunError:
        return False
    return record is not None and record.get("state") == "done" and record["attempt"] != attempt
