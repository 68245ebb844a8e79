"""What does Slurm know about the jobs of a campaign? Its own tools are asked, without a shell.

``squeue`` tells of jobs that wait, run, or ended lately; ``sacct`` of those that ended long ago,
where the site keeps accounts; ``scontrol`` of single jobs that neither lists. A tool that is
missing or fails is no answer at all, and no answer is never taken for "the job is gone".
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from hires.core.errors import RunError

PENDING, RUNNING, ENDED, GONE, UNKNOWN = "pending", "running", "ended", "gone", "unknown"

_PENDING = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT")
_RUNNING = ("RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING")
_TIMEOUT_S = 30.0
_AT_ONCE = 400
"""Numbers of jobs on one command line."""
_SINGLE = 32
"""Jobs about which ``scontrol`` is asked, one by one, at most."""
_MISSING = ("Invalid job id", "not found")
"""Slurm's words for a job that it does not know, as an element of an array that was cancelled
while it waited."""
_NOTHING = ("", "(null)", "None", "N/A", "Unknown")

Job = dict[str, Any]
"""``job.json`` of an attempt."""


@dataclass(frozen=True)
class Answer:
    """What the scheduler says of one job."""

    state: str
    """``PENDING``, ``RUNNING``, ``ENDED``, ``GONE`` (it knows no such job) or ``UNKNOWN`` (it did
    not answer)."""
    reason: str | None = None
    """Why the job waits or how it ended, in Slurm's words; why there is no answer."""
    expected: str | None = None
    """When it is expected to start, as Slurm says it."""


def job_name(job: Job) -> str:
    """Returns a job as Slurm writes it, ``123`` or ``123_4``."""
    index = job.get("index")
    return f"{job['job']}" if index is None else f"{job['job']}_{index}"


def ask_slurm(jobs: Iterable[Job]) -> dict[str, Answer]:
    """Returns what Slurm says of each job, by its name."""
    names = list(dict.fromkeys(job_name(job) for job in jobs))
    answers: dict[str, Answer] = {}
    for first in range(0, len(names), _AT_ONCE):
        answers.update(_ask_some(names[first : first + _AT_ONCE]))
    return answers


def cancel(job: Job) -> None:
    """Cancels one job.

    Raises:
        RunError: Slurm refused, or its tools are not here.
    """
    done = _run("scancel", job_name(job))
    if isinstance(done, str):
        raise RunError(f"job {job_name(job)} cannot be cancelled: {done}")
    if done.returncode:
        raise RunError(f"job {job_name(job)} cannot be cancelled: {_said(done)}")


def _ask_some(names: Sequence[str]) -> dict[str, Answer]:
    """Returns what Slurm says of a handful of jobs."""
    found, why = _squeue(names)
    if why is not None:
        return {name: Answer(UNKNOWN, why) for name in names}
    missing = [name for name in names if name not in found]
    if missing:
        found.update(_sacct(missing))
    for name in [name for name in missing if name not in found][:_SINGLE]:
        found[name] = _scontrol(name)
    return {name: found.get(name, Answer(GONE)) for name in names}


def _squeue(names: Sequence[str]) -> tuple[dict[str, Answer], str | None]:
    """Returns the jobs that squeue lists, and why it did not answer if it did not."""
    done = _run(
        "squeue",
        "--noheader",
        "--array",
        "--states=all",
        f"--jobs={','.join(names)}",
        "--format=%F|%K|%T|%S|%r",
    )
    if isinstance(done, str):
        return {}, done
    if done.returncode and not _is_missing(done):
        return {}, _said(done)
    found = {}
    for line in done.stdout.splitlines():
        parts = line.strip().split("|", 4)
        if len(parts) == 5:
            job, index, state, start, reason = parts
            name = job if index in _NOTHING else f"{job}_{index}"
            found[name] = _answer(state, reason, start)
    return found, None


def _sacct(names: Sequence[str]) -> dict[str, Answer]:
    """Returns the jobs that the accounts list; none where there are no accounts."""
    done = _run(
        "sacct",
        "--noheader",
        "--parsable2",
        "--allocations",
        f"--jobs={','.join(names)}",
        "--format=JobID,State,Reason",
    )
    if isinstance(done, str) or done.returncode:
        return {}
    found = {}
    for line in done.stdout.splitlines():
        parts = line.strip().split("|", 2)
        if len(parts) == 3 and parts[0] in names:
            found[parts[0]] = _answer(parts[1], parts[2], "")
    return found


def _scontrol(name: str) -> Answer:
    """Returns what scontrol says of one job."""
    done = _run("scontrol", "--oneliner", "show", "job", name)
    if isinstance(done, str):
        return Answer(UNKNOWN, done)
    if done.returncode:
        return Answer(GONE) if _is_missing(done) else Answer(UNKNOWN, _said(done))
    words = (word.partition("=") for word in done.stdout.split())
    fields = {key: value for key, equals, value in words if equals}
    state = fields.get("JobState", "")
    return _answer(state, fields.get("Reason", ""), fields.get("StartTime", ""))


def _answer(state: str, reason: str, start: str) -> Answer:
    """Returns the answer that Slurm's words mean; ``CANCELLED by 0`` is ``CANCELLED``."""
    word = state.split()[0].rstrip("+") if state.split() else ""
    why = None if reason in _NOTHING else reason
    if word in _PENDING:
        return Answer(PENDING, why, None if start in _NOTHING else start)
    if word in _RUNNING:
        return Answer(RUNNING, why)
    return Answer(ENDED, word) if word else Answer(UNKNOWN, f"no state in {state!r}")


def _run(*command: str) -> subprocess.CompletedProcess[str] | str:
    """Returns what a tool answered, or in words why it could not be asked."""
    environ = {**os.environ, "LC_ALL": "C", "SLURM_TIME_FORMAT": "standard"}
    try:
        return subprocess.run(
            command,
            env=environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TIMEOUT_S,
            check=False,
        )
    except FileNotFoundError:
        return f"{command[0]} is not installed here; ask on a machine of the cluster"
    except subprocess.TimeoutExpired:
        return f"{command[0]} did not answer within {_TIMEOUT_S:g} s"
    except OSError as error:
        return f"{command[0]} cannot be run: {error.strerror}"


def _is_missing(done: subprocess.CompletedProcess[str]) -> bool:
    """Whether a tool answered that there is no such job."""
    return any(words in done.stdout + done.stderr for words in _MISSING)


def _said(done: subprocess.CompletedProcess[str]) -> str:
    """Returns the last line that a tool said, or else its exit code."""
    lines = (done.stderr or done.stdout).strip().splitlines()
    return lines[-1] if lines else f"{done.args[0]} exited with code {done.returncode}"
