"""Reads rank, world size and meeting place of this process from its environment.

A launcher sets seven variables for every rank, named here only. The same variables work with
``torch.distributed``'s ``env://``. Other programs that start processes (an MPI, ``srun``) have
names of their own for the four that number them: :data:`NUMBERINGS`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields

from hires.core.errors import ConfigError


@dataclass(frozen=True)
class World:
    """One rank's view of all processes."""

    rank: int
    """This process, 0 to size - 1."""
    size: int
    """All processes."""
    local_rank: int
    """This process among those on the same machine."""
    local_size: int
    """Processes on this machine."""
    address: str
    """Host where rank 0 listens."""
    port: int
    """Port where rank 0 listens."""
    attempt: int
    """Which attempt of the run: the records go to ``a<attempt>``."""

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ConfigError(f"RANK={self.rank} must be 0 to WORLD_SIZE-1={self.size - 1}")
        if not 0 <= self.local_rank < self.local_size <= self.size:
            raise ConfigError(
                f"LOCAL_RANK={self.local_rank} and LOCAL_WORLD_SIZE={self.local_size} do not fit "
                f"each other and WORLD_SIZE={self.size}"
            )
        if not 0 < self.port <= 65535:
            raise ConfigError(f"MASTER_PORT={self.port} must be 1 to 65535")
        if self.attempt < 0:
            raise ConfigError(f"HIRES_ATTEMPT={self.attempt} must be 0 or more")

    def to_environment(self) -> dict[str, str]:
        """Returns the variables that make a process this rank."""
        return {name: str(getattr(self, field)) for field, name in _NAMES.items()}


@dataclass(frozen=True)
class Numbering:
    """Names of the variables in which a starter numbers its processes."""

    rank: str
    size: str
    local_rank: str
    local_size: str
    node: str | None = None
    """Where ``local_size`` holds the counts of all nodes, as ``2(x3),1``: which node this is."""


NUMBERINGS = {
    "torchrun": Numbering("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    "openmpi": Numbering(
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    "mpich": Numbering("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    "mvapich": Numbering(
        "MV2_COMM_WORLD_RANK",
        "MV2_COMM_WORLD_SIZE",
        "MV2_COMM_WORLD_LOCAL_RANK",
        "MV2_COMM_WORLD_LOCAL_SIZE",
    ),
    "srun": Numbering(
        "SLURM_PROCID",
        "SLURM_STEP_NUM_TASKS",
        "SLURM_LOCALID",
        "SLURM_STEP_TASKS_PER_NODE",
        "SLURM_NODEID",
    ),
}
"""Starter of processes -> the names of its variables."""


@dataclass(frozen=True)
class Numbers:
    """Which process this is, of how many."""

    rank: int
    size: int
    local_rank: int
    local_size: int


def numbers(starter: str, environ: Mapping[str, str] | None = None) -> Numbers:
    """Returns which process this is by the variables of its starter.

    Args:
        starter: a key of :data:`NUMBERINGS`.
        environ: the variables; unset: those of this process.

    Raises:
        ConfigError: a variable is missing, or is no number.
    """
    environ = os.environ if environ is None else environ
    names = NUMBERINGS[starter]
    values = {}
    for field in fields(Numbers):
        name = getattr(names, field.name)
        if not environ.get(name):
            raise ConfigError(
                f"the environment variable {name} is not set, so this process was not started by "
                f"{starter}; name its starter with launcher.mpi"
            )
        text = environ[name]
        if field.name == "local_size" and names.node is not None:
            node = _number(names.node, environ.get(names.node, ""))
            text = str(_of_node(name, text, node))
        values[field.name] = _number(name, text)
    return Numbers(**values)


def from_environment(environ: Mapping[str, str] | None = None) -> World:
    """Returns this process's world from its environment variables.

    Args:
        environ: the variables; unset: those of this process.

    Raises:
        ConfigError: a variable is missing, is no number, or does not fit the others.
    """
    environ = os.environ if environ is None else environ
    missing = [name for name in _NAMES.values() if not environ.get(name)]
    if missing:
        raise ConfigError(
            f"the environment variable {missing[0]} is not set: a rank is started by `hires run` "
            f"or by the launch.sh of a run folder, which set {', '.join(_NAMES.values())}"
        )
    return World(
        address=environ[_NAMES["address"]],
        **{field: _number(name, environ[name]) for field, name in _NUMBERS.items()},
    )


_NAMES = {
    "rank": "RANK",
    "size": "WORLD_SIZE",
    "local_rank": "LOCAL_RANK",
    "local_size": "LOCAL_WORLD_SIZE",
    "address": "MASTER_ADDR",
    "port": "MASTER_PORT",
    "attempt": "HIRES_ATTEMPT",
}
_NUMBERS = {field: name for field, name in _NAMES.items() if field != "address"}


def _number(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"the environment variable {name}={text!r} must be a number") from None


def _of_node(name: str, text: str, node: int) -> int:
    """Returns the count of one node, of ``2(x3),1``: three nodes have two each, one has one."""
    counts: list[int] = []
    for part in text.split(","):
        count, _, times = part.rstrip(")").partition("(x")
        counts += [_number(name, count)] * _number(name, times or "1")
    if not 0 <= node < len(counts):
        raise ConfigError(f"the environment variable {name}={text!r} has no node {node}")
    return counts[node]
