"""Queries Slurm about jobs, nodes and the job that this process is in; cancels jobs. No shell.

    squeue     jobs that wait, run, or ended lately
    sacct      jobs that ended long ago, where the site keeps accounts

Arrays are queried by their number alone, so one call of squeue serves thousands of tasks; those
that wait come back together, as ``5-9``. A tool that is missing or fails gives no answer at all,
and no answer never means that the job is gone.

Some clusters send SIGUSR2 some time before they end a job early, as ``--signal`` asks; many send
SIGTERM, as ``scancel`` does too, and SIGKILL soon afterwards. The logs of the ranks and the state
of the job at that moment show which of the two it was.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from hires.core import programs, units
from hires.core.config.launcher_config import spread
from hires.core.config.run_config import RunConfig
from hires.core.errors import RunError
from hires.core.ranks import mpi_starter
from hires.core.store.attempts import Attempt, job_name
from hires.core.store.ends import State
from hires.launcher.interface import ENDED, GONE, UNKNOWN, Job, JobStatus
from hires.launcher.ranks.places import LOOPBACK, Preemption, RankPlaces, loopback, meeting
from hires.launcher.status.run_progress import last_lines

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
PATIENCE_S = 3.0
"""How long Slurm may take to answer after SIGTERM: soon it sends SIGKILL."""
_EARLY_S = 75
"""Slurm may send a signal by as much earlier than ``--signal`` says."""
_END_S = 5
"""Kept for the supervisor's own end."""
_FAILED_NODE = re.compile(r"^srun: error: Node failure on (\S+)", re.MULTILINE)
_ENDED = re.compile(
    r"^slurmstepd-\S+ error: \*\*\* .* CANCELLED AT \S+ DUE TO ([A-Z ]+)", re.MULTILINE
)
_CAUSES = {
    "NODE FAILURE": ("node", "lost its nodes: {} went down"),
    "PREEMPTION": ("preempted", "was preempted at once (SIGTERM)"),
    "JOB REQUEUE": ("requeued", "was stopped and queued again (scontrol requeue)"),
    "TIME LIMIT": ("timeout", "reached its time limit"),
}
"""Why Slurm's daemons end a job, in their words -> reason, and cause in ours."""
_STATES = {"NODE_FAIL": "NODE FAILURE", "PREEMPTED": "PREEMPTION", "TIMEOUT": "TIME LIMIT"}
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
    try:
        listed = _squeue(list(names)) if names else {}
    except RunError as error:
        unknown = JobStatus(UNKNOWN, str(error))
        return {name: unknown for some in names.values() for name in some}
    if missing := [number for number, some in names.items() if not listed.keys() >= {*some}]:
        listed = {**_sacct(missing), **listed}
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
        listed = _squeue([number]) or _sacct([number])
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
        wanted = ("--all", "--states=all", f"--jobs={','.join(some)}", "--format=%F|%K|%T|%S|%r")
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


class JobNode(NamedTuple):
    """One node of the job."""

    name: str
    """As Slurm calls it."""
    host: str
    """The machine's own name."""
    address: str
    """Name or address at which Slurm reaches it."""


@dataclass(frozen=True)
class Allocation:
    """The job that this process is part of."""

    job: str
    """Number of the job; every task of an array has its own."""
    array: tuple[str, int] | None
    """Number of the array and index in it, if it is a task of one."""
    nodes: tuple[JobNode, ...]
    """In Slurm's order; the batch step runs on the first, a shell of salloc perhaps on none."""

    @property
    def name(self) -> str:
        """As Slurm calls it, ``123`` or ``123_4``: an array's last task has the array's number."""
        return self.job if self.array is None else f"{self.array[0]}_{self.array[1]}"

    def places(self, num_ranks: int, config: RunConfig) -> RankPlaces:
        """Returns where the ranks of a world run: evenly over the nodes, neighbours together.

        One ``srun``, or one command of an MPI, starts all. A RunError: this machine is not the
        first node, the others cannot reach it, or ``cluster.modules`` or ``setup`` failed on it.
        """
        if (line := os.environ.get(mpi_starter.FAILED_SETUP)) is not None:
            raise RunError(
                f"`{line}` failed on {socket.gethostname()}: job.log shows why; try it there, and "
                f"change cluster.modules (`module avail`) or cluster.setup"
            )
        address, interface = self._meeting(config)
        names = [node.name for node in self.nodes]
        shares = zip(names, spread(num_ranks, len(names)), strict=False)
        hosts = [mpi_starter.Host(name, size) for name, size in shares]
        starter = mpi_starter.starter(config, hosts, in_slurm=True)
        names = [host.name for host in hosts]
        return RankPlaces(num_ranks, config.launcher.port, address, interface, names, starter)

    def _meeting(self, config: RunConfig) -> tuple[str, str | None]:
        # Where the ranks meet, and their interface.
        node, other = self.nodes[0], self.nodes[min(1, len(self.nodes) - 1)]
        one_host = len({node.host for node in self.nodes}) == 1
        if config.interface is None and one_host:
            return LOOPBACK, loopback()
        name = f"{other.name} ({other.address})"
        return meeting(config, f"node {node.name}", name, other.address)

    def after_sigusr2(self, signal_s: int) -> Preemption:
        """Returns why Slurm sent SIGUSR2: its time limit if little is left, else a preemption."""
        left_s = _seconds_left(self.name)
        if left_s is not None and left_s <= signal_s + _EARLY_S:
            reason, cause = "timeout", f"the time limit of job {self.name} came near"
        else:
            reason, cause = "preempted", f"job {self.name} was preempted (SIGUSR2)"
            left_s = signal_s
        return Preemption(reason, cause, patience_s=max(left_s - _END_S, _END_S))

    def after_sigterm(self, logs: Iterable[Path] = ()) -> Preemption | None:
        """Returns why Slurm ends the job; None: it shows no other than a user's scancel.

        ``logs`` of the ranks end with the words of srun and of Slurm's daemons.
        """
        text = "\n".join(line for log in logs for line in last_lines(log))
        nodes, words = _FAILED_NODE.findall(text), _ENDED.findall(text)
        try:
            job = show("job", self.name, PATIENCE_S)[-1]
        except (RunError, IndexError):
            job = {}
        requeued = int(job.get("Restarts", 0)) > int(os.environ.get("SLURM_RESTART_COUNT") or 0)
        words += [_STATES.get(job.get("JobState", ""), "")]
        word = "NODE FAILURE" if nodes else words[0].strip()
        if word not in _CAUSES and not requeued:
            return None
        reason, cause = _CAUSES.get(word, ("requeued", "was stopped and queued again by Slurm"))
        cause = cause.format(" and ".join(sorted({*nodes})) or "a node")
        return Preemption(reason, f"job {self.name} {cause}", requeued=requeued)


def current_job() -> Allocation:
    """Returns the job that this process is part of, or raises a RunError."""
    environ = os.environ
    job, names = environ.get("SLURM_JOB_ID"), environ.get("SLURM_JOB_NODELIST")
    if not job or not names:
        raise RunError("this is no Slurm job; submit the run with `sbatch job.sbatch`")
    index = environ.get("SLURM_ARRAY_TASK_ID")
    array = (environ["SLURM_ARRAY_JOB_ID"], int(index)) if index else None
    nodes = tuple(
        JobNode(name, node.get("NodeHostName", name), node.get("NodeAddr", name))
        for node in show("node", names)
        if (name := node.get("NodeName"))
    )
    if not nodes:
        raise RunError(f"scontrol names none of the nodes {names}")
    return Allocation(job, array, nodes)


def _seconds_left(job: str) -> int | None:
    """Returns how long a job may still run; None if there is no limit, or Slurm does not answer."""
    try:
        text = ask("squeue", "--noheader", f"--jobs={job}", "--format=%L").strip()
    except RunError:
        return None
    match = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)??(?:(\d+):)?(\d+)", text)
    if match is None:  # UNLIMITED, INVALID
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return 86400 * days + 3600 * hours + 60 * minutes + seconds
