"""How is it written down that an attempt has ended? In its folder first, then in the index."""

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


def leave_word(run: Path, attempt: int, end: dict[str, Any], record: dict[str, Any] | None) -> None:
    """Writes ``exit.json`` of an attempt, and its line in the index of all results.

    Args:
        run: the run folder.
        attempt: which of its attempts.
        end: what ``exit.json`` holds.
        record: of the attempt, empty if it has none; None: the attempt measured nothing that
            belongs into a list of runs.

    Raises:
        RunError: ``exit.json`` cannot be written.
    """
    text = json.dumps(end, indent=1) + "\n"
    write_atomically(file_names.attempt_dir(run, attempt) / file_names.EXIT, text)
    if record is not None:
        _add_to_index(run, attempt, end, record)


def leave_cancelled(run: Path, attempt: int, cause: str) -> None:
    """Writes that an attempt was cancelled which nobody supervises: it waits, or its job is gone.

    If it made way and waits to go on, what it said then stays. If it begins in this very moment,
    its launcher writes its own end over this one.

    Args:
        run: the run folder.
        attempt: which of its attempts.
        cause: who or what cancelled it.

    Raises:
        RunError: ``exit.json`` cannot be written.
    """
    said = Attempt(run, attempt).exit
    end = {
        "state": "cancelled",
        "cause": f"{cause}; before that: {said['cause']}" if said.get("cause") else cause,
        "reason": None,
        "exit_codes": said.get("exit_codes") or {},
        "started": said.get("started"),
        "ended": said.get("ended") or provenance.now(),
    }
    leave_word(run, attempt, end, {})


def _add_to_index(run: Path, attempt: int, end: dict[str, Any], record: dict[str, Any]) -> None:
    """Adds the line of an attempt; a list finds the run without it, so no error stops anybody."""
    try:
        config = records.read_config(run)
        if run.parent.name != config.campaign:
            return  # the folder was copied: what lies two folders above is not ours to write into
        # Rank 0 may have written a record before the launcher that should have was killed.
        record = record or records.read_record(file_names.attempt_dir(run, attempt)) or {}
        run_index.append(
            run.parent.parent, run_index.entry(run, attempt, plain(config), record, end)
        )
    except HiresError as error:
        log.warning("%s", error)
