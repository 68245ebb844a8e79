"""Reads what Slurm gave to this job, places the ranks on its nodes, and finds out why it ends.

Some clusters send SIGUSR2 some time before they end a job early, as ``--signal`` asks; many send
SIGTERM, as ``scancel`` does too, and SIGKILL soon afterwards. What Slurm writes into the logs of
the ranks, and shows of the job at that moment, tells the two apart.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from hires.core.config.launcher_config import spread
from hires.core.config.run_config import RunConfig
from hires.core.errors import RunError
from hires.core.ranks import mpi_starter
from hires.core.store import launch_file
from hires.launcher.ranks.places import LOOPBACK, Preemption, RankPlaces, loopback, meeting
from hires.launcher.ranks.rank_group import last_lines
from hires.launcher.slurm import scheduler

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
        if (line := os.environ.get(launch_file.FAILED_SETUP)) is not None:
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
            job = scheduler.show("job", self.name, PATIENCE_S)[-1]
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


def current() -> Allocation:
    """Returns the job that this process is part of, or raises a RunError."""
    environ = os.environ
    job, names = environ.get("SLURM_JOB_ID"), environ.get("SLURM_JOB_NODELIST")
    if not job or not names:
        raise RunError("this is no Slurm job; submit the run with `sbatch job.sbatch`")
    index = environ.get("SLURM_ARRAY_TASK_ID")
    array = (environ["SLURM_ARRAY_JOB_ID"], int(index)) if index else None
    nodes = tuple(
        JobNode(name, node.get("NodeHostName", name), node.get("NodeAddr", name))
        for node in scheduler.show("node", names)
        if (name := node.get("NodeName"))
    )
    if not nodes:
        raise RunError(f"scontrol names none of the nodes {names}")
    return Allocation(job, array, nodes)


def _seconds_left(job: str) -> int | None:
    """Returns how long a job may still run; None if there is no limit, or Slurm does not answer."""
    try:
        text = scheduler.ask("squeue", "--noheader", f"--jobs={job}", "--format=%L").strip()
    except RunError:
        return None
    match = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)??(?:(\d+):)?(\d+)", text)
    if match is None:  # UNLIMITED, INVALID
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return 86400 * days + 3600 * hours + 60 * minutes + seconds
