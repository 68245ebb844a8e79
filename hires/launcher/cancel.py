"""Cancels runs that another command started: their job, or the process that launched them.

a job                            request file, scheduler's cancel; a waiting attempt is closed
a process of this machine        request file, which its supervisor reads
a process of another machine     refused: only there does it show whether it still runs
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence

from hires.core.errors import RunError
from hires.core.store import file_names, provenance
from hires.core.store.attempts import Attempt
from hires.core.store.ends import End, State
from hires.core.store.files import write_atomically
from hires.launcher.interface import cancel_jobs
from hires.launcher.status.state import RunState

WAIT_S = 15.0
"""How long a launcher may take to stop its ranks and write its end."""
_POLL_S = 0.05


def cancel_all(states: Sequence[RunState]) -> Iterator[tuple[RunState, str, bool]]:
    """Stops runs; yields each with what was done about it, in words, and whether that worked."""
    attempts = [
        Attempt(s.path, s.attempt)
        if s.path is not None
        and s.attempt is not None
        and s.state in (State.PENDING, State.RUNNING)
        else None
        for s in states
    ]
    submitted = [
        attempt for attempt in attempts if attempt is not None and attempt.job_name is not None
    ]
    requests = [attempt.folder / file_names.CANCEL for attempt in submitted]
    why, written = None, []
    try:
        for path in requests:  # first: an attempt that begins just now must not seem to have failed
            write_atomically(path, "")
            written.append(path)
        cancel_jobs([attempt.job for attempt in submitted])
    except RunError as error:  # a job that the scheduler does not cancel ends at its request
        why = f"{error}; the request to cancel it stays, so it ends once its job runs"
        if len(written) < len(requests):
            why = str(error)
            for path in written:
                with contextlib.suppress(OSError):
                    path.unlink()
    for state, attempt in zip(states, attempts, strict=True):
        waits = state.state == State.PENDING
        try:
            if attempt is None:
                yield state, f"is {state.state}; there is nothing to cancel", True
            elif attempt.job_name is None:
                yield state, _stop_process(attempt), True
            elif why is not None:
                yield state, why, False
            else:
                cause = f"job {attempt.job_name} was cancelled"
                if waits:  # no supervisor will write its end
                    end = attempt.exit or End(State.CANCELLED)
                    end = end.cancelled(f"{cause} while it waited")
                    end.write(attempt.run, attempt.number)
                yield state, cause, True
        except RunError as error:
            yield state, str(error), False


def _stop_process(attempt: Attempt) -> str:
    """Stops the launcher of an attempt and waits until it has written its end."""
    launched = attempt.launched
    if not launched:
        return "was not started yet; there is nothing to cancel"
    process, lives = f"process {launched.get('pid')}", provenance.lives(launched)
    if lives is None:
        raise RunError(
            f"{attempt.run.name} runs as {process} on {launched.get('host')}, which cannot be seen "
            f"from here; use `hires cancel` there"
        )
    if not lives:
        return f"its {process} is gone already"
    write_atomically(attempt.folder / file_names.CANCEL, "")
    provenance.wake(launched)
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        end = Attempt(attempt.run, attempt.number).exit
        if end:
            return f"is {end.state}: {end.cause}"
        time.sleep(_POLL_S)
    others = "" if launched.get("thread") in (None, launched.get("pid")) else ", all its other runs"
    raise RunError(
        f"{attempt.run.name}: {process} was asked to end, and has not ended within {WAIT_S:g} s; "
        f"`kill -9 {launched.get('pid')}` ends it{others} and all their ranks"
    )
