"""What has Slurm given this job: which nodes, and how do their ranks reach each other?

Asked inside the job, by the supervisor. Every rank is started by an ``srun`` of its own that names
its node, or all by one command of an MPI; the ranks of a node share all that the job has there.
"""

from __future__ import annotations

import dataclasses
import os
import re
import socket
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from hires.core.config.cluster_config import spread as spread  # others ask for it here, too
from hires.core.config.run_config import RunConfig
from hires.core.errors import RunError
from hires.core.ranks import mpi_dialects, network
from hires.core.store import launch_file
from hires.launcher.ranks.places import LOOPBACK, Preemption, RankPlace, RankPlaces, loopback

FIRST_PORT, NUM_PORTS = 10000, 20000
"""Ports of jobs: above the system's own, below those that Linux gives to clients."""
_ASK_TIMEOUT_S = 60
_SRUN = (
    "srun",
    "--overlap",
    "--nodes=1",
    "--ntasks=1",
    "--ntasks-per-node=1",
    "--export=ALL",
    "--mpi=none",
    "--input=none",
    "--cpu-bind=none",
    "--unbuffered",
)
"""Starts one rank. Ranks overlap, so each may use every core that the job has on its node."""


@dataclass(frozen=True)
class Node:
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
    """Number of the job; every element of an array has its own."""
    array: tuple[str, int] | None
    """Number of the array and index in it, if it is an element of one."""
    nodes: tuple[Node, ...]
    """In Slurm's order; the batch step, and with it this process, runs on the first."""

    @property
    def name(self) -> str:
        """As Slurm calls it: ``123``, or ``123_4``.

        The number of an array's last element is also that of the whole array, so that this alone
        means the element.
        """
        return self.job if self.array is None else f"{self.array[0]}_{self.array[1]}"

    def places(self, num_ranks: int, config: RunConfig, *, packed: bool = False) -> RankPlaces:
        """Returns where the ranks of a world run: evenly over the nodes, neighbours together.

        Args:
            num_ranks: how many there are.
            config: of the run.
            packed: whether other runs share the job, so that its number is that of no run.

        Raises:
            RunError: the nodes cannot reach this one.
        """
        address, interface = self._meeting(config)
        # This process runs where rank 0 does, so any port that is free here will do.
        first = 0 if packed else job_port(self.job)
        ports = (config.launcher.port,) if config.launcher.port else (first, 0, 0)
        sizes = spread(num_ranks, len(self.nodes))
        together = config.mpi != "srun" or config.srun_mpi != "none"
        ranks = [
            RankPlace(local, size, () if together else _srun(node), node.name)
            for node, size in zip(self.nodes, sizes, strict=False)
            for local in range(size)
        ]
        places = RankPlaces(ranks, ports, address, interface, relayed=True)
        if not together:
            return places
        hosts = [
            mpi_dialects.Host(node.name, size)
            for node, size in zip(self.nodes, sizes, strict=False)
        ]
        starter = mpi_dialects.starter(config, hosts, in_slurm=True)
        return dataclasses.replace(places, starter=starter)

    def _meeting(self, config: RunConfig) -> tuple[str, str | None]:
        """Returns where the ranks meet, and the interface that all of them use if it is known."""
        interface = config.interface
        if interface is not None:
            try:
                return network.address_of(interface), interface
            except OSError as error:
                key = "launcher" if config.launcher.interface else "cluster"
                raise RunError(
                    f"{key}.interface={interface} has no IPv4 address on node "
                    f"{self.nodes[0].name} ({error.strerror}); name another one, or leave it out"
                ) from None
        if len({node.host for node in self.nodes}) == 1:
            return LOOPBACK, loopback()
        other = self.nodes[1]
        try:
            address = network.own_address_towards(other.address)
        except OSError as error:
            raise RunError(_unreachable(self.nodes[0], other, str(error))) from None
        if network.is_loopback(address):
            raise RunError(_unreachable(self.nodes[0], other, f"its name leads to {address}"))
        return address, None


def _srun(node: Node) -> tuple[str, ...]:
    """Returns the words that start one rank on a node."""
    return (*_SRUN, f"--nodelist={node.name}")


def refuse_without_module() -> None:
    """Refuses to start ranks in a job that lacks one of ``cluster.modules``.

    Raises:
        RunError: names the module.
    """
    name = os.environ.get(launch_file.REFUSED)
    if name is not None:
        raise RunError(
            f"`module load {name}` failed on {socket.gethostname()}: job.log (of an array "
            f"that in its folder) holds what it said; see `module avail` there, and change "
            f"cluster.modules"
        )


def cores(job: Allocation, environ: Mapping[str, str] | None = None) -> list[int]:
    """Returns how many cores a job has on each of its nodes; none where Slurm does not say.

    >>> nodes = (Node("a", "a", "a"), Node("b", "b", "b"), Node("c", "c", "c"))
    >>> cores(Allocation("7", None, nodes), {"SLURM_JOB_CPUS_PER_NODE": "3,2(x2)"})
    [3, 2, 2]
    """
    environ = os.environ if environ is None else environ
    text = environ.get("SLURM_JOB_CPUS_PER_NODE", "")
    found = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    counts = [int(count) for count, times in found for _ in range(int(times or 1))]
    return counts if len(counts) == len(job.nodes) else [0] * len(job.nodes)


def job_port(job: str) -> int:
    """Returns the port at which the ranks of a job meet: jobs that share a node have others.

    >>> job_port("7"), job_port("20007")
    (10007, 10007)
    """
    return FIRST_PORT + int(job) % NUM_PORTS


def current(environ: Mapping[str, str] | None = None) -> Allocation:
    """Returns the job that this process is part of.

    Raises:
        RunError: it is part of none, or Slurm does not answer.
    """
    environ = os.environ if environ is None else environ
    job, names = environ.get("SLURM_JOB_ID"), environ.get("SLURM_JOB_NODELIST")
    if not job or not names:
        raise RunError("this is no Slurm job; submit the run with `sbatch job.sbatch`")
    index = environ.get("SLURM_ARRAY_TASK_ID")
    array = (environ["SLURM_ARRAY_JOB_ID"], int(index)) if index else None
    text = ask("scontrol", "show", "node", names, "--oneliner")
    nodes = tuple(_node(line) for line in text.splitlines() if line.startswith("NodeName="))
    if not nodes:
        raise RunError(f"scontrol does not know the nodes {names}: {text.strip() or 'no answer'}")
    return Allocation(job, array, nodes)


def why_make_way(job: str, signal_s: int) -> Preemption:
    """Returns why Slurm told this job to make way: its time is over, or another needs the nodes."""
    left_s = _seconds_left(job)
    if left_s is not None and left_s <= signal_s + _EARLY_S:
        reason, cause, most_s = "timeout", f"the time limit of job {job} came near", left_s
    else:
        reason, cause, most_s = "preempted", f"job {job} made way for others (SIGUSR2)", signal_s
    return Preemption(reason, cause, patience_s=max(most_s - _END_S, _END_S))


_EARLY_S = 75
"""Slurm may send a signal by as much earlier than it was asked."""
_END_S = 5
"""Kept for the supervisor's own end."""


def ask(*command: str, most_s: float = _ASK_TIMEOUT_S) -> str:
    """Returns what one of Slurm's commands prints.

    Args:
        command: its words.
        most_s: how long it may take, in seconds.

    Raises:
        RunError: it failed, is not installed, or does not answer.
    """
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=most_s, check=True)
    except subprocess.CalledProcessError as error:
        why = " ".join(str(error.stderr).split()) or f"exit code {error.returncode}"
        raise RunError(f"{command[0]} failed: {why}") from None
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RunError(
            f"{command[0]} cannot be used here: {error}; is this a Slurm node?"
        ) from None
    return done.stdout


def _node(line: str) -> Node:
    """Returns a node from its line of ``scontrol show node``."""
    facts: dict[str, str] = dict(re.findall(r"(\w+)=(\S+)", line))
    name = facts["NodeName"]
    return Node(name, facts.get("NodeHostName", name), facts.get("NodeAddr", name))


def _seconds_left(job: str) -> int | None:
    """Returns how long a job may still run; None if there is no limit, or nobody knows."""
    try:
        text = ask("squeue", "--noheader", f"--jobs={job}", "--format=%L").strip()
    except RunError:
        return None
    found = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(?:(\d+):)?(\d+)", text)
    if found is None:  # UNLIMITED, INVALID
        return None
    days, *clock = (int(part or 0) for part in found.groups())
    hours, minutes, seconds = clock
    if found[2] and not found[3]:  # MM:SS: the first of the two is minutes
        hours, minutes = 0, hours
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def _unreachable(node: Node, other: Node, why: str) -> str:
    """Returns that ranks on two nodes would not find each other."""
    return (
        f"node {node.name} finds no address that {other.name} ({other.address}) could reach it at: "
        f"{why}; name the network that joins them, as launcher.interface=ib0"
    )
