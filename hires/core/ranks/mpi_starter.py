"""Puts together the command that starts the agents of all ranks: mpirun, srun or torchrun."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from hires.core.config.launcher_config import spread
from hires.core.config.mpi_dialects import DIALECTS, Dialect
from hires.core.config.run_config import RunConfig
from hires.core.errors import ConfigError, RunError
from hires.core.python_command import module_command
from hires.core.ranks.world import number_of

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
class Starter:
    """One command that starts the agents of all ranks."""

    dialect: str
    """A key of :data:`DIALECTS`."""
    words: tuple[str, ...]
    """The command; the run folder and the number of the attempt follow."""

    def environment(self, base: Mapping[str, str]) -> dict[str, str]:
        """Returns the environment of the command."""
        root = DIALECTS[self.dialect].as_root if os.geteuid() == 0 else None
        return {**base, **(root or {})}


class Numbers(NamedTuple):
    """Which process this is, of how many."""

    rank: int
    size: int
    local_rank: int
    local_size: int


def numbers(starter: str, environ: Mapping[str, str]) -> Numbers:
    """Returns which process this is, by its starter; raises ConfigError if a variable is wrong."""
    dialect = DIALECTS[starter]
    texts = {name: environ.get(name, "") for name in dialect.numbering.split()}
    for name, text in texts.items():
        if not text:
            raise ConfigError(
                f"the environment variable {name} is not set, so this process was not started by "
                f"{starter}; name its starter with launcher.mpi"
            )
    if dialect.node is not None:
        # The count of this node: 2(x3),1 are three nodes of two processes each, and one of one.
        name, counts = list(texts)[-1], list[str]()
        for part in texts[name].split(","):
            count, _, times = part.rstrip(")").partition("(x")
            counts += [count] * number_of(name, times or "1")
        node = number_of(dialect.node, environ.get(dialect.node, ""))
        if not 0 <= node < len(counts):
            raise ConfigError(f"the environment variable {name}={texts[name]!r} has no node {node}")
        texts[name] = counts[node]
    return Numbers(*(number_of(name, text) for name, text in texts.items()))


def dialect_of(config: RunConfig) -> str:
    """Returns which program starts the ranks of a run: a key of :data:`DIALECTS`."""
    return "torchrun" if config.launcher.name == "torchrun" else config.mpi


def mpi_here() -> str | None:
    """Returns the MPI, a key of :data:`DIALECTS`, whose program is on this machine; None: none."""
    for name, dialect in DIALECTS.items():
        others = {
            program
            for other in DIALECTS.values()
            if other is not dialect
            for program in other.programs.split()
        }
        for program in dialect.programs.split() if dialect.label else ():
            if shutil.which(program) and (program not in others or _is_of(program, dialect)):
                return name
    return None


def _is_of(program: str, dialect: Dialect) -> bool:
    # Several MPIs call their program mpirun.
    try:
        done = subprocess.run(
            [program, "--version"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=30,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return False
    return re.search(dialect.version, done.stdout + done.stderr, re.IGNORECASE) is not None


def starter(config: RunConfig, hosts: Sequence[Host], in_slurm: bool = False) -> Starter:
    """Returns the command that starts the agents of all ranks, rank 0 on the first host."""
    name = dialect_of(config)
    dialect = DIALECTS[name]
    each = [host.name for host in hosts for _ in range(host.ranks)]
    facts = {
        "ranks": len(each),
        "mpi": config.srun_mpi,
        "slots": ",".join(f"{host.name}:{host.ranks}" for host in hosts),
        "list": ",".join(each),
    }
    words: list[str] = []
    for word in f"{dialect.words} {dialect.in_slurm if in_slurm else ''} {dialect.hosts}".split():
        words += each if word == "{each}" else [word.format(**facts)]
    for variable in sorted(os.environ) if dialect.forward else ():
        # What ranks on other machines need.
        if variable in _FORWARDED or variable.startswith(_FORWARDED_PREFIXES):
            words += [dialect.forward, variable]
    # The program is what the config names, what is here, or its usual name; torchrun is that of
    # this Python.
    programs = dialect.programs.split()
    beside = [str(Path(sys.executable).with_name("torchrun"))] if name == "torchrun" else []
    present = next((one for one in (*beside, *programs) if shutil.which(one)), programs[-1])
    agent = module_command(AGENT)
    program = config.launcher.mpirun or present
    return Starter(name, (program, *words, *config.launcher.mpi_options, *agent))


def hosts_of(config: RunConfig, num_ranks: int) -> list[Host]:
    """Returns the machines of a run that is no Slurm job, and how many ranks each has."""
    names = config.launcher.hosts or [LOCAL_HOST]
    sizes = spread(num_ranks, len(names))
    return [Host(name, size) for name, size in zip(names, sizes, strict=False)]


def require_program(starter: Starter) -> None:
    """Refuses a command whose program is not here: RunError names it, and what would help."""
    program = starter.words[0]
    if shutil.which(program) is None:
        raise RunError(
            f"there is no {program} here, which launcher.mpi={starter.dialect} needs; install it, "
            f"load its module, name it with launcher.mpirun=/path/to/it, or use launcher=local"
        )
