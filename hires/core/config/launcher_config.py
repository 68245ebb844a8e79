"""The section ``launcher`` of the config: what starts the ranks, and where.

What its keys mean to Slurm is in :mod:`hires.launcher.slurm.job_script`, and to each MPI in
:mod:`hires.core.ranks.mpi_dialects`.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, field

from hires.core.config.cluster_config import MPIS
from hires.core.config.value_checks import (
    Checks,
    at_least,
    at_most,
    check_choices,
    check_word,
    choice,
)
from hires.core.errors import ConfigError

WITHOUT_JOBS = ("local", "mpirun", "torchrun")
"""Launchers that start the ranks at once; every other one submits the run to a scheduler. Which
launchers there are is for :data:`hires.launcher.interface.LAUNCHERS` to say."""
BINDINGS = ("auto", "none")
YEAR_MINUTES = 365 * 24 * 60
"""Longest time limit of a job; Slurm takes larger numbers for something else, or for no limit."""


@dataclass
class LauncherConfig:
    """``launcher=NAME``: what starts the ranks."""

    name: str = "local"
    """``local``: one process per rank on this machine. ``mpirun``: one command of an MPI starts all
    ranks, on this machine or on ``hosts``. ``torchrun``: torch's own does, on this machine.
    ``slurm``: one Slurm job, whose ranks are spread evenly over ``nodes``, consecutive ranks
    together."""
    threads: int = 1
    """Compute threads of every rank; a Slurm job requests as many cores per rank."""
    max_ranks: int = 64
    """Most processes on this machine; a larger world is refused."""
    bind: str = choice("auto", BINDINGS)
    """``auto``: each rank is bound to an equal share of neighbouring cores, unless there are too
    few cores for all threads or, on this machine, none is left for the threads that read and send.
    ``none``: ranks are not bound."""
    mpi: str | None = choice(None, MPIS)
    """``mpirun``, ``slurm``: what starts the ranks: ``openmpi`` (its mpirun), ``mpich``
    (mpiexec.hydra), ``mvapich`` (mpirun_rsh) or ``srun``. Unset: ``cluster.mpi``, else openmpi, or
    srun for slurm."""
    srun_mpi: str | None = None
    """TYPE of ``srun --mpi=TYPE``, which serves an MPI inside the ranks; with any but ``none`` one
    srun starts all ranks. Unset: ``cluster.srun_mpi``, else none."""
    mpirun: str | None = None
    """``mpirun``, ``slurm``: the program, if it goes by another name or lies elsewhere."""
    mpi_options: list[str] = field(default_factory=list)
    """``mpirun``, ``slurm``: further words for it, as ``[--mca,btl_tcp_if_include,ib0]``."""
    hosts: list[str] = field(default_factory=list)
    """``mpirun``: machines over which the ranks are spread evenly, this one first, which it reaches
    by ssh without a password; empty: only this one."""
    port: int = 0
    """Rendezvous port; 0: a free one is chosen, in a Slurm job one that follows from its number."""
    nodes: int = 1
    """``slurm``: nodes of the job."""
    partition: str | None = None
    """``slurm``: partition; unset: the cluster's default."""
    account: str | None = None
    """``slurm``: account that is charged; unset: the user's default."""
    qos: str | None = None
    """``slurm``: quality of service; unset: the cluster's default."""
    minutes: int = 60
    """``slurm``: time limit of the job in minutes; with ``pack`` of all its points together."""
    pack: int = 1
    """``slurm``: points of a sweep that share one job. They run one after the other, and side by
    side as far as their ranks times ``threads`` fit on the nodes. The job is sized for the largest
    of them, and points that differ only in their number of ranks may share one."""
    signal_s: int = 120
    """``slurm``: seconds before the time limit at which the ranks are signalled to save and stop
    (SIGUSR2); then the job is queued again and goes on as the run's next attempt. Slurm may signal
    up to a minute earlier. A preempted job does the same if the cluster leaves it the time."""
    requeues: int = 3
    """``slurm``: how often a job that reached its time limit is queued again."""
    other_code: bool = False
    """``slurm``: whether a job may run with another version or commit of hires than planned it."""
    interface: str | None = None
    """Network interface over which ranks of several nodes talk, as ``ib0``; unset:
    ``cluster.interface``, else the one that leads to another node."""

    def __post_init__(self) -> None:
        check = Checks()
        check(check_choices, self, "launcher.")
        check(check_word, "launcher", self.name)
        for key, low in (("threads", 1), ("max_ranks", 1), ("nodes", 1), ("minutes", 1)):
            check(at_least, f"launcher.{key}", getattr(self, key), low)
        check(at_most, "launcher.minutes", self.minutes, YEAR_MINUTES, ", which is a year")
        check(at_least, "launcher.pack", self.pack, 1)
        check(at_least, "launcher.signal_s", self.signal_s, 10)
        check(at_least, "launcher.requeues", self.requeues, 0)
        for key in ("partition", "account", "qos", "interface", "srun_mpi", "mpirun"):
            check(check_word, f"launcher.{key}", getattr(self, key))
        for host in self.hosts:
            check(_check_host, host)
        check(self._check_hosts)
        check.done()
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"launcher.port={self.port} must be 0 (any free port) to 65535")
        if self.signal_s >= 60 * self.minutes:
            raise ConfigError(
                f"launcher.signal_s={self.signal_s} must be less than launcher.minutes="
                f"{self.minutes}, which are {60 * self.minutes} seconds"
            )

    def _check_hosts(self) -> None:
        """Refuses machines for a launcher that does not go there."""
        if self.hosts and self.name != "mpirun":
            raise ConfigError(
                f"launcher.hosts={','.join(self.hosts)} is for launcher=mpirun, not "
                f"launcher={self.name}"
            )

    @property
    def has_jobs(self) -> bool:
        """Whether a scheduler starts the ranks, in a job on ``nodes`` machines."""
        return self.name not in WITHOUT_JOBS

    @property
    def num_nodes(self) -> int:
        """Machines over which the ranks are spread."""
        return self.nodes if self.has_jobs else max(1, len(self.hosts))

    @property
    def is_here(self) -> bool:
        """Whether all ranks run on this machine."""
        return self.name in ("local", "torchrun") or (
            self.name == "mpirun" and not self.hosts and self.mpi != "srun"
        )

    @property
    def offered_ranks(self) -> int:
        """Most ranks that the launcher offers; what a cluster has is for Slurm to say."""
        return self.max_ranks if self.is_here else sys.maxsize


def _check_host(name: str) -> None:
    """Refuses what no command line of an MPI could take for a machine."""
    if not re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?", name):
        raise ConfigError(f"launcher.hosts has {name!r}, which is no name or address of a machine")
