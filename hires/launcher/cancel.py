"""How is a run stopped that somebody else started? Its launcher is asked, or its scheduler.

The launcher's process is the one that the attempt wrote down, on this machine: it stops the ranks
and leaves ``exit.json``, as after Ctrl-C. Nobody else is ever signalled.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hires.core import provenance
from hires.core.errors import RunError
from hires.core.records import attempt_dir
from hires.launcher import scheduler, whois
from hires.launcher.attempt_files import launched_by, read_json
from hires.launcher.last_word import leave_word
from hires.launcher.scheduler import Job
from hires.launcher.state import PENDING, RUNNING, RunState

WAIT_S = 15.0
"""How long a launcher may take to stop its ranks and say so."""
_POLL_S = 0.05


def cancel(state: RunState, cancel_job: Callable[[Job], None] = scheduler.cancel) -> str:
    """Stops a run; returns what was done about it, in words.

    Args:
        state: how the run is doing.
        cancel_job: cancels a scheduler's job.

    Raises:
        RunError: it runs and cannot be stopped from here.
    """
    if state.state not in (PENDING, RUNNING) or state.path is None or state.attempt is None:
        return f"is {state.state}; there is nothing to cancel"
    folder = attempt_dir(state.path, state.attempt)
    job = read_json(folder / "job.json")
    if job is not None:
        cancel_job(job)
        name = scheduler.job_name(job)
        if state.state == PENDING:
            _write_end(folder, f"job {name} was cancelled while it waited")
        return f"job {name} was cancelled"
    launched = launched_by(folder)
    if launched is None:
        return "was not started yet; there is nothing to cancel"
    return _stop(launched, folder)


def _write_end(folder: Path, cause: str) -> None:
    """Writes ``exit.json`` of an attempt that nobody else will: it never began.

    If it did begin in this very moment, its launcher writes its own end over this one.
    """
    now = provenance.now()
    end: dict[str, Any] = {"state": "cancelled", "cause": cause, "reason": None, "exit_codes": {}}
    leave_word(folder.parent, int(folder.name[1:]), {**end, "started": None, "ended": now}, {})


def _stop(launched: dict[str, Any], folder: Path) -> str:
    """Stops the launcher of an attempt and waits until it has said so."""
    pid, host = launched.get("pid"), launched.get("host")
    if not _signal(launched):
        if whois.lives(launched) is None:
            raise RunError(
                f"{folder.parent.name} runs as process {pid} on {host}, which cannot be seen from "
                f"here; use `hires cancel` there"
            )
        return f"its process {pid} is gone already"
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        end = read_json(folder / "exit.json")
        if end is not None:
            return f"is {end.get('state')}: {end.get('cause')}"
        time.sleep(_POLL_S)
    return f"process {pid} was told to stop, and has not said so within {WAIT_S:g} s"


def _signal(launched: dict[str, Any]) -> bool:
    """Sends SIGTERM to a launcher; returns whether it is surely that process."""
    pid = launched.get("pid")
    if not isinstance(pid, int) or not whois.is_here(launched):
        return False
    with contextlib.suppress(ProcessLookupError):
        handle = os.pidfd_open(pid)  # from here on the number cannot come to mean another one
        try:
            if whois.lives(launched):
                signal.pidfd_send_signal(handle, signal.SIGTERM)
                return True
        except PermissionError:
            raise RunError(f"process {pid} belongs to another user, who must cancel it") from None
        finally:
            os.close(handle)
    return False
