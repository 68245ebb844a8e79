"""Reads which nodes Slurm gave to this job, and places the ranks on them.

It runs inside the job, in the supervisor. Every rank is started by an ``srun`` of its own that
names its node, or all by one command of an MPI; the ranks of a node share all that the job has
there.
"""

from __future__ import annotations

import os
import re
import socket
from dataclasses import dataclass

from hires.core.config.launcher_config import spread
from hires.core.config.run_config import RunConfig
from hires.core.errors import RunError
from hires.core.ranks import mpi_dialects
from hires.core.store import launch_file
from hires.launcher.ranks.places import LOOPBACK, RankPlace, RankPlaces, loopback, meeting
from hires.launcher.slurm import scheduler

FIRST_PORT, NUM_PORTS = 10000, 20000
"""Ports of jobs: above the system's own, below those that Linux gives to clients."""
_SRUN = (
    *("srun", "--overlap", "--nodes=1", "--ntasks=1", "--ntasks-per-node=1", "--export=ALL"),
    *("--mpi=none", "--input=none", "--cpu-bind=none", "--unbuffered"),
)
"""Starts one rank. Ranks overlap, so each may use every core that the job has on its node."""


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
    """In Slurm's order; the batch step, and with it this process, runs on the first."""

    @property
    def name(self) -> str:
        """As Slurm calls it, ``123`` or ``123_4``: an array's last task has the array's number."""
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
        node, other = self.nodes[0], self.nodes[min(1, len(self.nodes) - 1)]
        if config.interface is None and len({node.host for node in self.nodes}) == 1:
            address, interface = LOOPBACK, loopback()
        else:
            name = f"{other.name} ({other.address})"
            address, interface = meeting(config, f"node {node.name}", name, other.address)
        # This process runs where rank 0 does, so any port that is free here will do.
        first = 0 if packed else job_port(self.job)
        ports = (config.launcher.port,) if config.launcher.port else (first, 0, 0)
        shares = list(zip(self.nodes, spread(num_ranks, len(self.nodes)), strict=False))
        one_command = config.mpi != "srun" or config.srun_mpi != "none"
        ranks = [
            RankPlace(
                local, size, () if one_command else (*_SRUN, f"--nodelist={node.name}"), node.name
            )
            for node, size in shares
            for local in range(size)
        ]
        starter = None
        if one_command:
            hosts = [mpi_dialects.Host(node.name, size) for node, size in shares]
            starter = mpi_dialects.starter(config, hosts, in_slurm=True)
        return RankPlaces(ranks, ports, address, interface, relayed=True, starter=starter)


def refuse_without_module() -> None:
    """Refuses to start ranks in a job that lacks one of ``cluster.modules``.

    Raises:
        RunError: names the module.
    """
    name = os.environ.get(launch_file.REFUSED)
    if name is not None:
        raise RunError(
            f"`module load {name}` failed on {socket.gethostname()}: job.log (of an array "
            f"that in its folder) shows why; see `module avail` there, and change "
            f"cluster.modules"
        )


def cores(job: Allocation) -> list[int]:
    """Returns how many cores a job has on each of its nodes; 0 where Slurm does not say."""
    text = os.environ.get("SLURM_JOB_CPUS_PER_NODE", "")  # as 3,2(x2)
    groups = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    counts = [int(count) for count, times in groups for _ in range(int(times or 1))]
    return counts if len(counts) == len(job.nodes) else [0] * len(job.nodes)


def job_port(job: str) -> int:
    """Returns the port at which the ranks of a job meet: jobs that share a node have others.

    >>> job_port("7"), job_port("20007")
    (10007, 10007)
    """
    return FIRST_PORT + int(job) % NUM_PORTS


def current() -> Allocation:
    """Returns the job that this process is part of.

    Raises:
        RunError: it is part of none, or Slurm does not answer.
    """
    environ = os.environ
    job, names = environ.get("SLURM_JOB_ID"), environ.get("SLURM_JOB_NODELIST")
    if not job or not names:
        raise RunError("this is no Slurm job; submit the run with `sbatch job.sbatch`")
    index = environ.get("SLURM_ARRAY_TASK_ID")
    array = (environ["SLURM_ARRAY_JOB_ID"], int(index)) if index else None
    text = scheduler.ask("scontrol", "show", "node", names, "--oneliner")
    nodes = tuple(
        JobNode(name, facts.get("NodeHostName", name), facts.get("NodeAddr", name))
        for facts in map(scheduler.fields, text.splitlines())
        if (name := facts.get("NodeName"))
    )
    if not nodes:
        raise RunError(f"scontrol does not know the nodes {names}: {text.strip() or 'no answer'}")
    return Allocation(job, array, nodes)
