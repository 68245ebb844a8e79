"""Queries Slurm about jobs and nodes and cancels jobs, with Slurm's own tools and no shell.

    squeue     jobs that wait, run, or ended lately
    sacct      jobs that ended long ago, where the site keeps accounts
    scontrol   jobs that neither of them lists

Arrays are queried by their number alone, so one call of squeue serves thousands of tasks; those
that wait come back together, as ``5-9``. A tool that is missing or fails gives no answer at all,
and no answer never means that the job is gone.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Iterator, Sequence

from hires.core import programs, units
from hires.core.config.run_config import RunConfig
from hires.core.errors import RunError
from hires.core.store.attempts import Attempt, job_name
from hires.core.store.ends import State
from hires.launcher.interface import ENDED, GONE, UNKNOWN, Job, JobStatus

NOTHING = ("", "(null)", "None", "N/A", "Unknown")
"""Slurm's words for a value that is not set."""
_PENDING = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT")
_RUNNING = ("RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING")
_STOPPED = {
    "STOPPED": "stopped by a signal; `scancel --signal=CONT` lets it go on",
    "SUSPENDED": "suspended by Slurm; `scontrol resume` lets it go on",
}
_TIMEOUT_S = 30.0
_MANY = 1000
"""Most jobs in one call: Linux lets one word have 128 KiB."""
_SINGLE = 32
"""Most jobs and arrays that ``scontrol`` is queried about, one by one."""
_UNLISTED = ("Invalid job id", "not found")
"""Slurm's words for a job that it does not list, as a task that was cancelled while it waited."""


class UnlistedError(RunError):
    """Slurm does not list the job."""


def ask(*command: str, most_s: float | None = None) -> str:
    """Returns what one of Slurm's tools prints within ``most_s``; None: half a minute.

    A RunError: it failed, is not installed, does not answer, or lists no such job (UnlistedError).
    """
    environ = {**os.environ, "LC_ALL": "C", "SLURM_TIME_FORMAT": "standard"}
    environ["SLURM_BITSTR_LEN"] = "0"  # or lists of tasks would be cut after 64 characters
    try:
        done = programs.run(*command, most_s=most_s or _TIMEOUT_S, environ=environ)
    except programs.MissingProgramError as error:
        raise RunError(f"{error}; use a machine of the cluster") from None
    if done.returncode:
        why = " ".join((done.stderr or done.stdout).split()) or f"exit code {done.returncode}"
        is_unlisted = any(words in done.stdout + done.stderr for words in _UNLISTED)
        raise (UnlistedError if is_unlisted else RunError)(f"{command[0]} failed: {why}")
    return done.stdout


def show(kind: str, names: str, most_s: float | None = None) -> list[dict[str, str]]:
    """Returns the fields of some jobs or nodes, as ``State``; raises as :func:`ask`."""
    text = ask("scontrol", "show", kind, names, "--oneliner", most_s=most_s)
    return [dict(re.findall(r"(\w+)=(\S*)", line)) for line in text.splitlines()]


def config() -> dict[str, str]:
    """Returns the values of Slurm's own config, as ``ClusterName``; raises as :func:`ask`."""
    lines = ask("scontrol", "show", "config").splitlines()
    return {k.strip(): v.strip() for k, _, v in (line.partition("=") for line in lines)}


def job_states(jobs: Iterable[Job]) -> dict[str, JobStatus]:
    """Returns the state of each job, by its name."""
    names: dict[str, list[str]] = {}
    for job in jobs:
        names.setdefault(str(job["job"]), []).append(job_name(job))

    def missing() -> list[str]:
        return [number for number, some in names.items() if any(n not in listed for n in some)]

    try:
        listed = _squeue(list(names)) if names else {}
    except RunError as error:
        unknown = JobStatus(UNKNOWN, str(error))
        return {name: unknown for some in names.values() for name in some}
    if missing():
        listed = {**_sacct(missing()), **listed}
    for number in missing()[:_SINGLE]:
        try:
            more = _scontrol(number)
        except RunError as error:
            more = dict.fromkeys(names[number], JobStatus(UNKNOWN, str(error)))
        listed = {**more, **listed}
    states = {}
    cancelled = JobStatus(ENDED, "CANCELLED")
    for number, some in names.items():
        # Of an array that is cancelled, the tasks that waited are listed under its number alone.
        rest = cancelled if listed.get(number) == cancelled else JobStatus(GONE)
        states.update({name: listed.get(name, rest) for name in some})
    return states


def is_unknown(name: str) -> bool:
    """Whether Slurm answers that it does not list a job, an array or a task."""
    number, _, index = name.partition("_")
    try:
        listed = _squeue([number]) or _sacct([number]) or _scontrol(number)
    except RunError:
        return False
    return name not in listed if index else not listed


def cancel(jobs: Iterable[Job]) -> None:
    """Cancels jobs and tasks of arrays, many in one call; a RunError says why Slurm does not."""
    for some in _parts([job_name(job) for job in jobs]):
        try:
            ask("scancel", *some)
        except RunError as error:
            named = f"job{'s' if len(some) > 1 else ''} {units.listed(some)}"
            raise RunError(f"{named} cannot be cancelled: {error}") from None


def avoided_nodes(failed: Iterable[Attempt], configs: Sequence[RunConfig]) -> list[str]:
    """Returns the nodes that the next attempts of runs should avoid, sorted.

    Those that failed because of a node ran on nodes that their events name: all of these, as long
    as enough others are up.
    """
    events = [event for attempt in failed for event in attempt.events]
    starts = [event for event in events if event.get("event") == "starter_started"]
    suspects = {str(node) for event in starts for node in event.get("nodes") or ()}
    partitions = {config.partition for config in configs}
    # If all runs are of one partition, only its nodes count.
    only = [f"--partition={name}" for name in partitions if name and len(partitions) == 1]
    words = ("--noheader", "--Node", "--format=%N", "--states=idle,mixed,allocated", *only)
    others: set[str] = set()
    with contextlib.suppress(RunError):
        others = {*ask("sinfo", *words).split()} - suspects if suspects else others
    are_enough = len(others) >= max(config.launcher.nodes for config in configs)
    return sorted(suspects) if are_enough else []


def _squeue(numbers: Sequence[str]) -> dict[str, JobStatus]:
    rows = []
    for some in _parts(numbers):
        wanted = ("--states=all", f"--jobs={','.join(some)}", "--format=%F|%K|%T|%S|%r")
        with contextlib.suppress(UnlistedError):
            rows += _rows(ask("squeue", "--noheader", *wanted), 5)
    return _statuses((job, index, state, why, start) for job, index, state, start, why in rows)


def _sacct(numbers: Sequence[str]) -> dict[str, JobStatus]:
    rows = []
    with contextlib.suppress(RunError):  # the site keeps no accounts
        for some in _parts(numbers):
            wanted = (f"--jobs={','.join(some)}", "--format=JobID,State,Reason")
            rows += _rows(ask("sacct", "--noheader", "--parsable2", "--allocations", *wanted), 3)
    return _statuses((*job.partition("_")[::2], state, why, "") for job, state, why in rows)


def _parts(words: Sequence[str]) -> list[Sequence[str]]:
    """Returns the words in parts that fit on a command line."""
    return [words[first : first + _MANY] for first in range(0, len(words), _MANY)]


def _scontrol(number: str) -> dict[str, JobStatus]:
    keys = ("ArrayTaskId", "JobState", "Reason", "StartTime")
    try:
        jobs = show("job", number)
    except UnlistedError:
        return {}
    return _statuses((number, *(job.get(key, "") for key in keys)) for job in jobs)


def _statuses(rows: Iterable[tuple[str, ...]]) -> dict[str, JobStatus]:
    """Returns the status of jobs, by name, from number, index, state, reason and start of each."""
    return {
        name: _status(state, reason, start)
        for job, index, state, reason, start in rows
        for name in _names(job, index)
    }


def _names(job: str, index: str) -> Iterator[str]:
    """Yields the names of a job, or of all tasks that ``4`` or ``5-9,12-20:2%3`` means."""
    text = index.strip("[]").partition("%")[0]
    if text in NOTHING:
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
    why = None if reason in NOTHING else reason
    if word in _PENDING:
        return JobStatus(State.PENDING, why, None if start in NOTHING else start)
    if word in _RUNNING:
        return JobStatus(State.RUNNING, _STOPPED.get(word, why))
    return JobStatus(ENDED, word) if word else JobStatus(UNKNOWN, f"no state in {state!r}")


def _rows(text: str, count: int) -> list[list[str]]:
    rows = (line.strip().split("|", count - 1) for line in text.splitlines())
    return [row for row in rows if len(row) == count]
