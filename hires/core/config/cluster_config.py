"""Declares ``cluster.*``: what the nodes of a site have, and what its scheduler needs.

``conf/cluster/NAME.yaml`` describes a site, or a file ``cluster/NAME.yaml`` in the folder that
``--config-dir`` or the variable HIRES_CONF names. Keys of ``launcher.*`` take precedence.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from hires.core.config.value_checks import Checks, at_least, check_choices, check_word, choice
from hires.core.errors import ConfigError
from hires.core.units import parse_size

HERE = "workstation"
"""Name of the cluster where none is configured: this machine."""
MPIS = ("openmpi", "mpich", "mvapich", "srun")
"""What may start the ranks of several nodes."""
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
    "test-only": "sbatch would submit nothing; `hires plan` asks when the job would start",
    "wait": "sbatch would return after the job only; `hires run --wait` waits and shows the steps",
    "parsable": "hires itself sets the format of sbatch's answer",
    "no-requeue": "a job that was preempted would not be started again; see launcher.requeues",
}
"""Options with which hires could not submit, or not look after a job -> why, and what would do."""

_OPTION = re.compile(r"[a-z]+(-[a-z]+)*")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass
class ClusterConfig:
    """``cluster=NAME``: a site."""

    name: str = HERE
    """What the site is called; ``workstation`` is this machine."""
    gpus: int | None = None
    """GPUs of a node, shared out to its ranks by their number on the node; unset: those that a
    node shows."""
    cores: int | None = None
    """Cores of a node; a job that asks for more is refused. Unset: Slurm checks it."""
    memory: Any = None
    """Memory of a node for jobs, in bytes or as text such as 240GiB: a layout whose ranks on one
    node need more is refused. Unset: unknown, except for this machine."""
    partition: str | None = None
    """Partition of its jobs, unless ``launcher.partition`` is set."""
    account: str | None = None
    """Account that is charged, unless ``launcher.account`` is set."""
    modules: list[str] = field(default_factory=list)
    """Environment modules that a job loads first."""
    mpi: str | None = choice(None, MPIS)
    """What starts the ranks, unless ``launcher.mpi`` is set: ``srun``, ``openmpi``, ``mpich`` or
    ``mvapich``."""
    srun_mpi: str | None = None
    """TYPE of ``srun --mpi=TYPE``, as ``pmix``, unless ``launcher.srun_mpi`` is set."""
    interface: str | None = None
    """Network interface between the nodes, unless ``launcher.interface`` is set."""
    environment: dict[str, Any] = field(default_factory=dict)
    """Variables of every rank, as settings of its network; those that are set already stay."""
    options: dict[str, Any] = field(default_factory=dict)
    """Further options of sbatch without their dashes, as ``{gres: "gpu:4", exclusive: true}``."""

    def __post_init__(self) -> None:
        check = Checks()
        for key, low in (("gpus", 0), ("cores", 1)):
            if getattr(self, key) is not None:
                check(at_least, f"cluster.{key}", getattr(self, key), low)
        if self.memory is not None and parse_size(self.memory) is None:
            problem = "is no size; give bytes, or a number and a unit as 240GiB"
            check.problems.append(f"cluster.memory={self.memory!r} {problem}")
        check(check_choices, self, "cluster.")
        for key in ("name", "partition", "account", "srun_mpi", "interface"):
            check(check_word, f"cluster.{key}", getattr(self, key))
        for module in self.modules:
            check(check_word, "cluster.modules", module)
        for name, value in self.environment.items():
            check(_check_variable, str(name), value)
        for name, value in self.options.items():
            check(_check_option, str(name), value)
        check.done()
        self.environment = {str(name): str(value) for name, value in self.environment.items()}

    @property
    def memory_bytes(self) -> int | None:
        """Memory of a node; None if it is not configured."""
        return parse_size(self.memory)


def spread(num_ranks: int, num_nodes: int) -> list[int]:
    """Returns how many ranks each node has; the first ones have one more if need be.

    >>> spread(5, 2)
    [3, 2]
    """
    least, more = divmod(num_ranks, num_nodes)
    return [least + (node < more) for node in range(num_nodes) if least or node < more]


def _check_variable(name: str, value: Any) -> None:
    if not _VARIABLE.fullmatch(name):
        raise ConfigError(f"cluster.environment has {name!r}, which is no name of a variable")
    if isinstance(value, (dict, list)) or value is None or "\0" in str(value):
        raise ConfigError(f"cluster.environment.{name}={value!r} must be text or a number")


def _check_option(name: str, value: Any) -> None:
    """Refuses what is no further option of sbatch."""
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
