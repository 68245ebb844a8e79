"""Writes how an attempt ended: ``exit.json`` in its folder first, then its line in the index."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from hires.core.errors import HiresError
from hires.core.store import file_names, provenance, records, run_index
from hires.core.store.attempts import Attempt
from hires.core.store.files import write_atomically
from hires.core.store.naming import plain

log = logging.getLogger(__name__)


def write_exit(run: Path, attempt: int, end: dict[str, Any], record: dict[str, Any] | None) -> None:
    """Writes ``exit.json`` of an attempt, and its line in the index of all results.

    Args:
        run: the run folder.
        attempt: which of its attempts.
        end: what ``exit.json`` holds.
        record: of the attempt, empty if it has none; None: the attempt measured nothing that
            belongs in a list of runs.

    Raises:
        RunError: ``exit.json`` cannot be written.
    """
    text = json.dumps(end, indent=1) + "\n"
    write_atomically(file_names.attempt_dir(run, attempt) / file_names.EXIT, text)
    if record is not None:
        _add_to_index(run, attempt, end, record)


def write_cancelled(run: Path, attempt: int, cause: str) -> None:
    """Writes the end of a cancelled attempt without a supervisor: it waits, or its job is gone.

    The cause of an earlier end, as of a preemption, is kept behind the new one. If the attempt
    begins at this moment, its launcher writes its own end over this one.

    Args:
        run: the run folder.
        attempt: which of its attempts.
        cause: what cancelled it.

    Raises:
        RunError: ``exit.json`` cannot be written.
    """
    before = Attempt(run, attempt).exit
    end = {
        "state": "cancelled",
        "cause": f"{cause}; before that: {before['cause']}" if before.get("cause") else cause,
        "reason": None,
        "exit_codes": before.get("exit_codes") or {},
        "started": before.get("started"),
        "ended": before.get("ended") or provenance.now(),
    }
    write_exit(run, attempt, end, {})


def _add_to_index(run: Path, attempt: int, end: dict[str, Any], record: dict[str, Any]) -> None:
    """Adds the line of an attempt; lists read the folder without it, so an error is logged only."""
    try:
        config = records.read_config(run)
        if run.parent.name != config.campaign:
            return  # the folder was copied: what lies two folders above belongs to other runs
        # Rank 0 may have written a record before the launcher that should have was killed.
        record = record or records.read_record(file_names.attempt_dir(run, attempt)) or {}
        run_index.append(
            run.parent.parent, run_index.entry(run, attempt, plain(config), record, end)
        )
    except HiresError as error:
        log.warning("%s", error)
