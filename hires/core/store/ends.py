"""Writes how attempts ended: ``exit.json``."""

from __future__ import annotations

import json
from pathlib import Path

from hires.core.store import file_names, provenance
from hires.core.store.attempts import Attempt
from hires.core.store.files import write_atomically
from hires.core.store.reading import Values


def write_exit(run: Path, attempt: int, end: Values) -> None:
    """Writes ``exit.json`` of an attempt; a RunError: it cannot.

    ``end`` has ``state`` and ``cause``, and may have ``reason`` (the cause in one word),
    ``exit_codes`` by rank, ``started`` and ``ended``.
    """
    codes = sorted((int(rank), code) for rank, code in (end.get("exit_codes") or {}).items())
    end = {"reason": None, "started": None, "ended": provenance.now(), **end}
    end["exit_codes"] = {str(rank): code for rank, code in codes}
    folder = file_names.attempt_dir(run, attempt)
    write_atomically(folder / file_names.EXIT, json.dumps(end, indent=1) + "\n")


def write_cancelled(run: Path, attempt: int, cause: str) -> None:
    """Writes the end of a cancelled attempt without a supervisor: it waits, or its job is gone.

    The cause of an earlier end, as of a preemption, is kept behind the new one. If the attempt
    begins at this moment, its launcher writes its own end over this one. Errors are those of
    :func:`write_exit`.
    """
    before = Attempt(run, attempt).exit
    if before.get("cause"):
        cause = f"{cause}; before that: {before['cause']}"
    facts = {key: before[key] for key in ("exit_codes", "started", "ended") if before.get(key)}
    write_exit(run, attempt, {"state": "cancelled", "cause": cause, **facts})
