"""Reads what Slurm gave to this job, places the ranks on its nodes, and finds out why it ends.

Some clusters send SIGUSR2 some time before they end a job early, as ``--signal`` asks; many send
SIGTERM, as ``scancel`` does too, and SIGKILL soon afterwards. What Slurm shows of the job and its
nodes at that moment tells the two apart.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

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
_GONE_NODE = ("DOWN", "FAIL", "NOT_RESPONDING", "NO_RESPOND", "POWERED_DOWN")
_NODE_FAILURE = re.compile(
    r"^srun: error: Node failure on (\S+)| CANCELLED AT \S+ DUE TO NODE FAILURE", re.MULTILINE
)


@dataclass(frozen=True)
class JobNode:
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
        first node, the others cannot reach it, or it lacks one of ``cluster.modules``.
        """
        module = os.environ.get(launch_file.REFUSED)
        if module is not None:
            raise RunError(
                f"`module load {module}` failed on {socket.gethostname()}: job.log (of an array "
                f"that in its folder) shows why; see `module avail` there, and change "
                f"cluster.modules"
            )
        address, interface = self._meeting(config)
        shares = list(zip(self.nodes, spread(num_ranks, len(self.nodes)), strict=False))
        hosts = [mpi_starter.Host(node.name, size) for node, size in shares]
        starter = mpi_starter.starter(config, hosts, in_slurm=True)
        nodes = [host.name for host in hosts]
        return RankPlaces(num_ranks, config.launcher.port, address, interface, nodes, starter)

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

        ``logs`` of the ranks end with the words of srun: a node that went down may be back in
        service, as if nothing had happened, before Slurm is queried.
        """
        try:
            [*_, job] = scheduler.show("job", self.name, PATIENCE_S)
        except (RunError, ValueError):
            return None
        requeued = int(job.get("Restarts", 0)) > int(os.environ.get("SLURM_RESTART_COUNT") or 0)
        state = job.get("JobState", "")
        if requeued or state in ("NODE_FAIL", "COMPLETING"):
            try:
                nodes = scheduler.show("node", ",".join(n.name for n in self.nodes), PATIENCE_S)
            except RunError:
                nodes = []
            states = {node["NodeName"]: node.get("State", "") for node in nodes}
            gone = [name for name, now in states.items() if any(word in now for word in _GONE_NODE)]
            gone = gone or sorted(_failed_nodes(logs))
            if gone or state == "NODE_FAIL":
                who = " and ".join(gone) or "a node"
                cause = f"job {self.name} lost its nodes: {who} went down"
                return Preemption("node", cause, requeued=requeued)
        if requeued or state == "PREEMPTED" or job.get("PreemptTime", "") not in scheduler.NOTHING:
            cause = f"job {self.name} was preempted at once (SIGTERM)"
            return Preemption("preempted", cause, requeued=requeued)
        if state == "TIMEOUT":
            return Preemption("timeout", f"the time limit of job {self.name} was reached")
        return None


def _failed_nodes(logs: Iterable[Path]) -> set[str]:
    """Returns the nodes that went down, by what srun and its daemons wrote into the ranks' logs."""
    # The daemon names the node of the step, which may be well, and comes before srun or after it.
    texts = ("\n".join(last_lines(log)) for log in logs)
    names = {match[1] for text in texts for match in _NODE_FAILURE.finditer(text)}
    return names - {None} or ({"a node"} if names else set())


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
    days, _, clock = text.rpartition("-")
    left_s = 0
    try:
        for part in clock.split(":"):  # seconds stand last, whatever stands before them
            left_s = 60 * left_s + int(part)
        return left_s + 86400 * int(days or 0)
    except ValueError:  # UNLIMITED, INVALID
        return None
