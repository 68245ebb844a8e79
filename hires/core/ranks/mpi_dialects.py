"""Describes the programs that start many processes at once, as data.

A dialect is a program, how it takes the hosts and the number of ranks on each, and which part of
the environment it forwards. Every process runs the agent of one rank
(:mod:`hires.launcher.ranks.agent`); the variables that number the processes are in
:data:`hires.core.ranks.world.NUMBERINGS`.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hires.core.config.launcher_config import spread
from hires.core.config.run_config import RunConfig
from hires.core.errors import RunError

AGENT = "hires.launcher.ranks.agent"
"""Python module that every process runs; the run folder and the attempt follow."""
LOCAL_HOST = "localhost"
"""Name of this machine where all ranks run on it."""

_FORWARDED = ("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "VIRTUAL_ENV", "HOME", "XDG_CACHE_HOME")
_FORWARDED_PREFIXES = ("HIRES_", "GLOO_", "TORCH_", "NCCL_", "UCX_", "OMP_", "MKL_", "KMP_")


@dataclass(frozen=True)
class Host:
    """A machine and its share of the ranks."""

    name: str
    ranks: int


@dataclass(frozen=True)
class Dialect:
    """What differs between programs that start many processes.

    In words, ``{ranks}`` is the size of the world and ``{mpi}`` is ``launcher.srun_mpi``.
    """

    programs: Sequence[str]
    """Names under which the program goes, the most specific first."""
    words: Sequence[str]
    """What follows the program always. Ranks are bound by themselves, so nothing else may."""
    hosts: Sequence[str] = ()
    """What names the hosts: ``{slots}`` stands for ``a:2,b:1``, ``{list}`` for ``a,a,b``, and the
    word ``{each}`` for the words ``a a b``."""
    forward: Sequence[str] = ()
    """What passes on one variable of the environment; empty: all of it goes along."""
    in_slurm: Sequence[str] = ()
    """Options inside a Slurm job that make it start through ``srun``."""
    as_root: Mapping[str, str] | None = None
    """Variables without which it refuses to run as root."""
    many_hosts: bool = True
    """Whether it starts processes on other machines."""


DIALECTS = {
    "openmpi": Dialect(
        programs=("mpirun.openmpi", "mpirun"),
        words=("-np", "{ranks}", "--bind-to", "none"),
        hosts=("--host", "{slots}"),
        forward=("-x",),
        as_root={"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"},
    ),
    "mpich": Dialect(
        programs=("mpiexec.hydra", "mpirun.mpich", "mpirun"),
        words=("-n", "{ranks}", "-bind-to", "none", "-genvall"),
        hosts=("-hosts", "{slots}"),
        in_slurm=("-bootstrap", "slurm"),
    ),
    "mvapich": Dialect(
        programs=("mpirun_rsh",),
        words=("-export", "-np", "{ranks}"),
        hosts=("{each}", "MV2_ENABLE_AFFINITY=0"),
    ),
    "srun": Dialect(
        programs=("srun",),
        words=(
            "--mpi={mpi}",
            "--ntasks={ranks}",
            "--overlap",
            "--export=ALL",
            "--cpu-bind=none",
            "--input=none",
            "--kill-on-bad-exit=0",
        ),
        hosts=("--distribution=arbitrary", "--nodelist={list}"),
    ),
    "torchrun": Dialect(
        programs=("torchrun",),
        words=("--standalone", "--nproc-per-node={ranks}", "--max-restarts=0", "--no-python"),
        many_hosts=False,
    ),
}
"""``launcher.mpi``, or ``torchrun`` -> its dialect."""


@dataclass(frozen=True)
class Starter:
    """One command that starts the agents of all ranks."""

    dialect: str
    """A key of :data:`DIALECTS`, and of :data:`hires.core.ranks.world.NUMBERINGS`."""
    words: tuple[str, ...]
    """The command; the run folder and the number of the attempt follow."""

    def environment(self, base: Mapping[str, str]) -> dict[str, str]:
        """Returns the environment of the command."""
        root = DIALECTS[self.dialect].as_root if os.geteuid() == 0 else None
        return {**base, **(root or {})}


def dialect_of(config: RunConfig) -> str:
    """Returns which program starts the ranks of a run: a key of :data:`DIALECTS`."""
    return "torchrun" if config.launcher.name == "torchrun" else config.mpi


def starter(config: RunConfig, hosts: Sequence[Host], in_slurm: bool = False) -> Starter:
    """Returns the command that starts the agents of all ranks.

    Args:
        config: the frozen config.
        hosts: where they run, rank 0 on the first.
        in_slurm: whether this is part of a Slurm job, whose nodes the hosts are.
    """
    name = dialect_of(config)
    dialect = DIALECTS[name]
    facts = {"ranks": str(sum(host.ranks for host in hosts)), "mpi": config.srun_mpi}
    words = [word.format(**facts) for word in dialect.words]
    if in_slurm:
        words += dialect.in_slurm
    if dialect.many_hosts:
        words += _host_words(dialect, hosts)
    for variable in _forwarded(os.environ) if dialect.forward else ():
        words += [*dialect.forward, variable]
    program = _program(name, config.launcher.mpirun)
    agent = (sys.executable, "-m", AGENT)
    return Starter(name, (program, *words, *config.launcher.mpi_options, *agent))


def hosts_of(config: RunConfig, num_ranks: int) -> list[Host]:
    """Returns the machines of a run that is no Slurm job, and how many ranks each has."""
    names = config.launcher.hosts or [LOCAL_HOST]
    sizes = spread(num_ranks, len(names))
    return [Host(name, size) for name, size in zip(names, sizes, strict=False)]


def starts_itself(config: RunConfig) -> bool:
    """Whether one command starts the ranks of a run, on machines that are known beforehand."""
    name = config.launcher.name
    return name == "torchrun" or (name == "mpirun" and config.mpi != "srun")


def require_program(starter: Starter) -> None:
    """Refuses a command whose program is not here.

    Raises:
        RunError: names the program and what would help.
    """
    program = starter.words[0]
    if shutil.which(program) is None:
        raise RunError(
            f"there is no {program} here, which launcher.mpi={starter.dialect} needs; install it, "
            f"load its module, name it with launcher.mpirun=/path/to/it, or use launcher=local"
        )


def _program(name: str, given: str | None) -> str:
    """Returns the program: what the config names, what is here, or its usual name."""
    names = DIALECTS[name].programs
    if given is not None:
        return given
    if name == "torchrun":  # the one that belongs to this Python
        beside = os.path.join(os.path.dirname(sys.executable), names[0])  # noqa: PTH118, PTH120
        return shutil.which(beside) or names[0]
    return next((one for one in names if shutil.which(one)), names[-1])


def _host_words(dialect: Dialect, hosts: Sequence[Host]) -> list[str]:
    each = [host.name for host in hosts for _ in range(host.ranks)]
    facts = {"slots": ",".join(f"{h.name}:{h.ranks}" for h in hosts), "list": ",".join(each)}
    words: list[str] = []
    for word in dialect.hosts:
        words += each if word == "{each}" else [word.format(**facts)]
    return words


def _forwarded(environ: Mapping[str, str]) -> list[str]:
    """Returns the names of the variables that ranks on other machines need."""
    return sorted(
        name for name in environ if name in _FORWARDED or name.startswith(_FORWARDED_PREFIXES)
    )
