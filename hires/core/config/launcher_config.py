"""Declares ``launcher.*`` and ``cluster.*``: what starts the ranks, and where."""

from __future__ import annotations

import math
import re
import sys
from dataclasses import dataclass, field
from typing import Any

from hires.core.config.mpi_dialects import MPIS
from hires.core.config.value_checks import (
    COSMETIC,
    SIZE,
    Checks,
    Section,
    check_word,
    choice,
    cosmetic,
    number,
    word,
)
from hires.core.errors import ConfigError
from hires.core.precisions import PRECISIONS
from hires.core.units import parse_size

HERE = "workstation"
"""Name of the cluster where none is configured: this machine."""
OWN_OPTIONS = {
    "nodes": "launcher.nodes",
    "ntasks": "parallel",
    "ntasks-per-node": "parallel and launcher.nodes",
    "cpus-per-task": "launcher.threads",
    "time": "launcher.minutes",
    "partition": "cluster.partition or launcher.partition",
    "account": "cluster.account or launcher.account",
    "qos": "launcher.qos",
    "signal": "launcher.signal_s",
    "requeue": "launcher.requeues",
    "job-name": "campaign",
    "output": "no key: the log is job.log of the run folder",
    "error": "no key: the log is job.log of the run folder",
    "open-mode": "no key: the log is job.log of the run folder",
    "array": "no key: a sweep makes the arrays",
    "wrap": "no key: the script is job.sbatch of the run folder",
    "export": "cluster.environment",
    "chdir": "the folder in which hires is called",
}
"""Options of sbatch that hires writes itself -> what decides them."""
SPOILING_OPTIONS = {
    "test-only": "sbatch would submit nothing; `hires plan` shows when the job would start",
    "wait": "sbatch would return after the job only; `hires run --wait` waits and shows the steps",
    "parsable": "hires itself sets the format of sbatch's answer",
    "no-requeue": "a job that was preempted would not be started again; see launcher.requeues",
}
"""Options with which hires could not submit, or not look after a job -> why, and what would do."""

_OPTION = re.compile(r"[a-z]+(-[a-z]+)*")


@dataclass
class ClusterConfig(
    Section,
    key="cluster",
    choices={"workstation": "This machine, or a cluster of which nothing is said"},
):
    """``cluster=NAME``: a site."""

    name: str = word(HERE)
    """What the site is called; ``workstation`` is this machine."""
    gpus: int | None = cosmetic(number(None, most=1024))
    """GPUs of a node, which its ranks take in turn; unset: those that the job requests, or that
    this machine shows."""
    gpu_memory: Any = field(default=None, metadata={**SIZE, **COSMETIC})
    """Memory of one GPU, with its unit, as 40GiB: a layout that needs more on one is refused.
    Unset: unknown."""
    gpu_capability: float | None = cosmetic(number(None, least=3))
    """Compute capability of these GPUs, as 8.0 of an A100 and 9.0 of an H100: it decides how much
    memory cuBLAS keeps. Unset: before 9.0."""
    cores: int | None = cosmetic(number(None, least=1))
    """Cores of a node; a job that needs more is refused. Unset: Slurm checks it."""
    memory: Any = field(default=None, metadata={**SIZE, **COSMETIC})
    """Memory of a node for jobs, with its unit, as 240GiB: a layout that needs more on one node is
    refused. Unset: unknown, except for this machine."""
    tflop_per_s: dict[str, float] = field(default_factory=dict, metadata=COSMETIC)
    """What the convolutions of one GPU (or core) reach, in 10^12 operations a second, by precision,
    as ``{fp32: 28.4, bf16: 37.5}``: with the next keys it predicts step times on machines that are
    not this one. Another precision takes the speed of fp32."""
    memory_gb_per_s: float | None = cosmetic(number(None, above=True))
    """10^9 bytes a second that such a GPU (or core) reads from its memory."""
    link_gb_per_s: float | None = cosmetic(number(None, above=True))
    """10^9 bytes a second between two ranks of a node."""
    network_gb_per_s: float | None = cosmetic(number(None, above=True))
    """10^9 bytes a second out of a node, and into one."""
    latency_us: float | None = cosmetic(number(None, above=True))
    """Microseconds of a small message between nodes; unset: 20."""
    partition: str | None = cosmetic(word())
    """Partition of its jobs, unless ``launcher.partition`` is set."""
    account: str | None = cosmetic(word())
    """Account that is charged, unless ``launcher.account`` is set."""
    modules: list[str] = field(default_factory=list, metadata=COSMETIC)
    """Environment modules that a job loads first."""
    mpi: str | None = cosmetic(choice(None, MPIS))
    """What starts the ranks, unless ``launcher.mpi`` is set: ``srun``, ``openmpi``, ``mpich`` or
    ``mvapich``."""
    srun_mpi: str | None = cosmetic(word())
    """TYPE of ``srun --mpi=TYPE``, as ``pmix``, unless ``launcher.srun_mpi`` is set."""
    interface: str | None = cosmetic(word())
    """Network interface between the nodes, unless ``launcher.interface`` is set."""
    environment: dict[str, Any] = field(default_factory=dict)
    """Variables of every rank, as settings of its network; those that are set already stay."""
    options: dict[str, Any] = field(default_factory=dict, metadata=COSMETIC)
    """Further options of sbatch without their dashes, as ``{gres: "gpu:4", exclusive: true}``."""

    def _check_more(self, check: Checks) -> None:
        for module in self.modules:
            check(check_word, "cluster.modules", module)
        for name, rate in self.tflop_per_s.items():
            if name not in PRECISIONS or isinstance(rate, bool) or not _is_rate(rate):
                check.problems.append(
                    f"cluster.tflop_per_s has {name}: {rate!r}; give a number above 0 for one of "
                    f"{', '.join(PRECISIONS)}"
                )
        for name, value in self.environment.items():
            key = f"cluster.environment.{name}"
            if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", str(name)):
                check.problems.append(
                    f"cluster.environment has {name!r}, which is no name of a variable"
                )
            elif isinstance(value, (dict, list)) or value is None or "\0" in str(value):
                check.problems.append(f"{key}={value!r} must be text or a number")
        for name, value in self.options.items():
            check(_check_option, str(name), value)
        self.environment = {str(name): str(value) for name, value in self.environment.items()}

    @property
    def memory_bytes(self) -> int | None:
        """Memory of a node; None if it is not configured."""
        return parse_size(self.memory)


def _is_rate(value: Any) -> bool:
    return isinstance(value, (int, float)) and 0 < value < math.inf


def spread(num_ranks: int, num_nodes: int) -> list[int]:
    """Returns how many ranks each node has; the first ones have one more if need be.

    >>> spread(5, 2)
    [3, 2]
    """
    least, more = divmod(num_ranks, num_nodes)
    return [least + (node < more) for node in range(num_nodes) if least or node < more]


def _check_option(name: str, value: Any) -> None:
    if not _OPTION.fullmatch(name):
        raise ConfigError(
            f"cluster.options has {name!r}: write an option of sbatch in small letters and "
            f"dashes, without the leading dashes, as gpus-per-node"
        )
    if name in OWN_OPTIONS:
        raise ConfigError(
            f"cluster.options.{name} is written by hires; it follows from {OWN_OPTIONS[name]}"
        )
    if name in SPOILING_OPTIONS:
        raise ConfigError(f"cluster.options.{name} cannot be used: {SPOILING_OPTIONS[name]}")
    if isinstance(value, (dict, list)) or value is None or value is False:
        raise ConfigError(
            f"cluster.options.{name}={value!r} must be text, a number, or true for an option "
            f"without a value"
        )
    check_word(f"cluster.options.{name}", str(value))


YEAR_MINUTES = 365 * 24 * 60
"""Longest time limit of a job; Slurm takes larger numbers for something else, or for no limit."""


CHOICES = {
    "local": "One process per rank on this machine",
    "mpirun": "All ranks are started by mpirun, here or on launcher.hosts",
    "torchrun": "All ranks are started by torchrun on this machine",
    "slurm": "One Slurm job, its ranks spread over launcher.nodes",
}
"""Choices of ``launcher`` without further keys, and what each is."""


@dataclass
class LauncherConfig(Section, key="launcher", choices=CHOICES):
    """``launcher=NAME``: what starts the ranks."""

    name: str = word("local")
    """``local``: one process per rank on this machine. ``mpirun``: one command of an MPI, here or
    on ``hosts``. ``torchrun``: torch's own, on this machine. ``slurm``: one job, whose ranks are
    spread evenly over ``nodes``, consecutive ranks together."""
    threads: int = number(1, least=1)
    """Compute threads of every rank; a Slurm job requests as many cores per rank."""
    max_ranks: int = cosmetic(number(64, least=1))
    """Most processes on this machine; a larger world is refused."""
    bind: str = choice("auto", ("auto", "none"))
    """``auto``: each rank is bound to an equal share of neighbouring cores, on a GPU of those of
    its NUMA node, if they suffice for all threads and, on this machine, one more for reading and
    sending. ``none``: it is not bound."""
    mpi: str | None = choice(None, MPIS)
    """``mpirun``, ``slurm``: what starts the ranks: mpirun of ``openmpi``, mpiexec.hydra of
    ``mpich``, mpirun_rsh of ``mvapich``, or ``srun``. Unset: ``cluster.mpi``, else openmpi (slurm:
    srun)."""
    srun_mpi: str | None = word()
    """TYPE of ``srun --mpi=TYPE``, for an MPI inside the ranks; one srun starts all of them, unless
    it is ``none``. Unset: ``cluster.srun_mpi``, else none."""
    mpirun: str | None = cosmetic(word())
    """``mpirun``, ``slurm``: the program, if it goes by another name or lies elsewhere."""
    mpi_options: list[str] = field(default_factory=list)
    """``mpirun``, ``slurm``: further words for it, as ``[--mca,btl_tcp_if_include,ib0]``."""
    hosts: list[str] = field(default_factory=list, metadata=COSMETIC)
    """``mpirun``: machines over which the ranks are spread evenly, this one first. It reaches the
    others by ssh without a password, and all have the folder of the runs. Empty: only this one."""
    port: int = cosmetic(number(0, most=65535))
    """Rendezvous port; 0: a free one, or one that follows from the number of the Slurm job."""
    nodes: int = number(1, least=1)
    """``slurm``: nodes of the job."""
    partition: str | None = word()
    """``slurm``: partition; unset: the cluster's default."""
    account: str | None = cosmetic(word())
    """``slurm``: account that is charged; unset: the user's default."""
    qos: str | None = cosmetic(word())
    """``slurm``: quality of service; unset: the cluster's default."""
    minutes: int = cosmetic(number(60, least=1, most=YEAR_MINUTES))
    """``slurm``: time limit of the job in minutes."""
    signal_s: int = cosmetic(number(120, least=10))
    """``slurm``: seconds before the time limit (or up to a minute earlier) at which SIGUSR2 makes
    the ranks save and stop. The job is then queued again, and the run's next attempt resumes from
    what was saved; so does that of a preempted job, if the preemption leaves time to save."""
    requeues: int = cosmetic(number(3))
    """``slurm``: how often a job that reached its time limit is queued again."""
    other_code: bool = cosmetic(False)
    """``slurm``: whether a job may run with another version or commit of hires than planned it."""
    interface: str | None = cosmetic(word())
    """Network interface between ranks of several nodes, as ``ib0``; unset: ``cluster.interface``,
    else the one that leads to another node."""

    def _check_more(self, check: Checks) -> None:
        for host in self.hosts:
            # What no command line of an MPI could take for a machine.
            if not re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?", host):
                check.problems.append(
                    f"launcher.hosts has {host!r}, which is no name or address of a machine"
                )
        if self.hosts and self.name != "mpirun":
            check.problems.append(
                f"launcher.hosts={','.join(self.hosts)} is for launcher=mpirun, not "
                f"launcher={self.name}; leave launcher.hosts out"
            )
        if self.signal_s >= 60 * self.minutes > 0:
            check.problems.append(
                f"launcher.signal_s={self.signal_s} must be less than launcher.minutes="
                f"{self.minutes}, which are {60 * self.minutes} seconds"
            )

    @property
    def has_jobs(self) -> bool:
        """Whether a scheduler starts the ranks, in a job on ``nodes`` machines."""
        return self.name not in ("local", "mpirun", "torchrun")

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
