"""Queries Slurm about jobs and cancels them, with Slurm's own tools and no shell.

    squeue     jobs that wait, run, or ended lately
    sacct      jobs that ended long ago, where the site keeps accounts
    scontrol   jobs that neither of them lists

Arrays are queried by their number alone, so one call of squeue serves thousands of tasks; those
that wait come back together, as ``5-9``. A tool that is missing or fails gives no answer at all,
and no answer never means that the job is gone.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterable, Iterator, Sequence

from hires.core.errors import RunError
from hires.launcher.interface import (
    ENDED,
    GONE,
    PENDING,
    RUNNING,
    UNKNOWN,
    Job,
    JobStatus,
    job_name,
)

_PENDING = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT")
_RUNNING = ("RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING")
_TIMEOUT_S = 30.0
_AT_ONCE = 8000
"""Numbers of jobs on one command line, a word of which Linux lets have 128 KiB."""
_SINGLE = 32
"""Most jobs and arrays that ``scontrol`` is queried about, one by one."""
_RANGES = 500
"""Ranges of tasks in one word for scancel."""
_MISSING = ("Invalid job id", "not found")
"""Slurm's words for a job that it does not list, as a task that was cancelled while it waited."""
_NOTHING = ("", "(null)", "None", "N/A", "Unknown")


def job_states(jobs: Iterable[Job]) -> dict[str, JobStatus]:
    """Returns the state of each job, by its name."""
    names: dict[str, list[str]] = {}
    for job in jobs:
        names.setdefault(str(job["job"]), []).append(job_name(job))
    numbers = list(names)
    states: dict[str, JobStatus] = {}
    for first in range(0, len(numbers), _AT_ONCE):
        some = {number: names[number] for number in numbers[first : first + _AT_ONCE]}
        states.update(_states_of(some))
    return states


def scripts_of_all() -> Iterator[tuple[str, str]]:
    """Yields this user's jobs that wait or run, by name, and the script of each.

    A script's path may hold blanks, and one word may stand behind it: each job is yielded with both
    readings. Nothing comes if squeue does not answer.
    """
    try:
        done = _run("squeue", "--noheader", f"--user={os.getuid()}", "--format=%F|%K|%o")
    except RunError:
        return
    for job, index, command in _rows(done, 3):
        words = command.split(" ")
        for name in _names(job, index):
            # After the script may stand the number of an attempt, or of a task.
            yield from ((name, " ".join(words[: len(words) - cut])) for cut in (0, 1))


def exit_code(name: str) -> int | None:
    """Returns the exit code of a job that has just ended; None if Slurm does not say."""
    try:
        match = re.search(r"\bExitCode=(\d+):", _run("scontrol", "show", "job", name).stdout)
    except RunError:
        return None
    return int(match[1]) if match else None


def is_unknown(name: str) -> bool:
    """Whether Slurm answers that it does not list a job, an array or a task."""
    number, _, index = name.partition("_")
    try:
        listed = _squeue([number]) or _sacct([number]) or _scontrol(number)
    except RunError:
        return False
    return name not in listed if index else not listed


def cancel(jobs: Iterable[Job]) -> None:
    """Cancels jobs and tasks of arrays, with as few calls as the command line allows.

    Raises:
        RunError: Slurm refused, or its tools are not here.
    """
    tasks: dict[str, set[int | None]] = {}
    for job in jobs:
        tasks.setdefault(str(job["job"]), set()).add(job.get("index"))
    words = [word for job, indices in tasks.items() for word in _scancel_words(job, indices)]
    for first in range(0, len(words), _AT_ONCE):
        some = words[first : first + _AT_ONCE]
        named = f"job{'s' if len(some) > 1 else ''} {', '.join(some[:3])}"
        named += f" and {len(some) - 3} more" if len(some) > 3 else ""
        try:
            done = _run("scancel", *some)
        except RunError as error:
            raise RunError(f"{named} cannot be cancelled: {error}") from None
        if done.returncode:
            raise RunError(f"{named} cannot be cancelled: {_complaint(done)}")


def _scancel_words(job: str, indices: set[int | None]) -> Iterator[str]:
    """Yields a job, or some tasks of an array as ``123_[0-4,7]``."""
    if None in indices:
        yield job
        return
    ranges: list[list[int]] = []
    for index in sorted(index for index in indices if index is not None):
        if ranges and index == ranges[-1][1] + 1:
            ranges[-1][1] = index
        else:
            ranges.append([index, index])
    texts = [str(a) if a == b else f"{a}-{b}" for a, b in ranges]
    for first in range(0, len(texts), _RANGES):
        text = ",".join(texts[first : first + _RANGES])
        yield f"{job}_{text}" if text.isdecimal() else f"{job}_[{text}]"


def _states_of(names: dict[str, list[str]]) -> dict[str, JobStatus]:
    """Returns the states of jobs and tasks, whose names are given by their numbers."""
    try:
        listed = _squeue(list(names))
    except RunError as error:
        unknown = JobStatus(UNKNOWN, str(error))
        return {name: unknown for some in names.values() for name in some}
    missing = _missing(names, listed)
    if missing:
        listed = {**_sacct(missing), **listed}
    for number in _missing(names, listed)[:_SINGLE]:
        try:
            more = _scontrol(number)
        except RunError as error:
            more = dict.fromkeys(names[number], JobStatus(UNKNOWN, str(error)))
        listed = {**more, **listed}
    cancelled = JobStatus(ENDED, "CANCELLED")
    states = {}
    for number, some in names.items():
        # Of an array that is cancelled, the tasks that waited are listed under its number alone.
        rest = cancelled if listed.get(number) == cancelled else JobStatus(GONE)
        states.update({name: listed.get(name, rest) for name in some})
    return states


def _missing(names: dict[str, list[str]], listed: dict[str, JobStatus]) -> list[str]:
    """Returns the numbers of jobs and arrays of which some name is not listed."""
    return [number for number, some in names.items() if any(name not in listed for name in some)]


def _squeue(numbers: Sequence[str]) -> dict[str, JobStatus]:
    """Returns the jobs that squeue lists.

    Raises:
        RunError: it does not answer.
    """
    wanted = ("--states=all", f"--jobs={','.join(numbers)}", "--format=%F|%K|%T|%S|%r")
    done = _run("squeue", "--noheader", *wanted)
    if done.returncode and not _is_missing(done):
        raise RunError(_complaint(done))
    states = {}
    for job, index, state, start, reason in _rows(done, 5):
        states.update(dict.fromkeys(_names(job, index), _status(state, reason, start)))
    return states


def _sacct(numbers: Sequence[str]) -> dict[str, JobStatus]:
    """Returns the jobs that the accounts list; none where there are no accounts."""
    wanted = (f"--jobs={','.join(numbers)}", "--format=JobID,State,Reason")
    try:
        done = _run("sacct", "--noheader", "--parsable2", "--allocations", *wanted)
    except RunError:
        return {}
    states: dict[str, JobStatus] = {}
    for name, state, reason in _rows(done, 3) if done.returncode == 0 else ():
        job, _, index = name.partition("_")
        states.update(dict.fromkeys(_names(job, index), _status(state, reason, "")))
    return states


def _scontrol(number: str) -> dict[str, JobStatus]:
    """Returns the tasks of a job or an array that scontrol shows.

    Raises:
        RunError: it does not answer.
    """
    done = _run("scontrol", "--oneliner", "show", "job", number)
    if done.returncode:
        if _is_missing(done):
            return {}
        raise RunError(_complaint(done))
    states: dict[str, JobStatus] = {}
    for line in done.stdout.splitlines():
        words = (word.partition("=") for word in line.split())
        fields = {key: value for key, equals, value in words if equals}
        reason, start = fields.get("Reason", ""), fields.get("StartTime", "")
        status = _status(fields.get("JobState", ""), reason, start)
        states.update(dict.fromkeys(_names(number, fields.get("ArrayTaskId", "")), status))
    return states


def _names(job: str, index: str) -> Iterator[str]:
    """Yields the names of a job, or of all tasks that ``4`` or ``5-9,12-20:2%3`` means."""
    text = index.strip("[]").partition("%")[0]
    if text in _NOTHING:
        yield job
        return
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+)(?::(\d+))?)?", part)
        if match is not None:
            first, last, step = match.groups()
            for number in range(int(first), int(last or first) + 1, int(step or 1)):
                yield f"{job}_{number}"


def _status(state: str, reason: str, start: str) -> JobStatus:
    """Returns the status that Slurm's words mean; ``CANCELLED by 0`` is ``CANCELLED``."""
    word = state.split()[0].rstrip("+") if state.split() else ""
    why = None if reason in _NOTHING else reason
    if word in _PENDING:
        return JobStatus(PENDING, why, None if start in _NOTHING else start)
    if word in _RUNNING:
        return JobStatus(RUNNING, why)
    return JobStatus(ENDED, word) if word else JobStatus(UNKNOWN, f"no state in {state!r}")


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    """Runs one of Slurm's tools, whatever its exit code.

    Raises:
        RunError: it is not installed, or does not answer.
    """
    environ = {**os.environ, "LC_ALL": "C", "SLURM_TIME_FORMAT": "standard"}
    environ["SLURM_BITSTR_LEN"] = "0"  # or lists of tasks would be cut after 64 characters
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
        why = f"{command[0]} is not installed here; ask on a machine of the cluster"
    except subprocess.TimeoutExpired:
        why = f"{command[0]} did not answer within {_TIMEOUT_S:g} s"
    except OSError as error:
        why = f"{command[0]} cannot be run: {error.strerror}"
    raise RunError(why)


def _rows(done: subprocess.CompletedProcess[str], count: int) -> Iterator[list[str]]:
    """Yields the lines that have so many columns."""
    rows = (line.strip().split("|", count - 1) for line in done.stdout.splitlines())
    yield from (row for row in rows if len(row) == count)


def _is_missing(done: subprocess.CompletedProcess[str]) -> bool:
    return any(words in done.stdout + done.stderr for words in _MISSING)


def _complaint(done: subprocess.CompletedProcess[str]) -> str:
    """Returns the last line of a tool's errors, or else its exit code."""
    lines = (done.stderr or done.stdout).strip().splitlines()
    return lines[-1] if lines else f"{done.args[0]} exited with code {done.returncode}"
