"""Puts together the commands and scripts that start a run: mpirun, srun, torchrun, ``launch.sh``.

``launch.sh`` of a run folder is a file of ``launch/`` with this machine's values filled in, each
quoted for the shell; ``launch/job.sh`` is what hires writes into the script of a Slurm job.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hires.core import programs
from hires.core.config.launcher_config import DIALECTS, Dialect, spread
from hires.core.config.run_config import RunConfig
from hires.core.errors import RunError
from hires.core.programs import python, shipped
from hires.core.python_path import without_empty_entries
from hires.core.ranks import mpi_starter

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
    """One command that starts all ranks."""

    dialect: str
    """A key of :data:`DIALECTS`."""
    words: tuple[str, ...]
    """The command; what every rank runs follows."""
    python: str | None = None
    """Python of the ranks, inside their container; unset: as they are told."""

    def command(self, environ: Mapping[str, str], rank: Sequence[str]) -> list[str]:
        """Returns the whole command; ``environ`` is its environment, ``rank`` what ranks run.

        Ranks on other machines get what they need of the environment, and what it has beyond that
        of this process.
        """
        forward, passed = DIALECTS[self.dialect].forward, list[str]()
        for name in sorted(environ) if forward else ():
            is_ours = environ[name] != os.environ.get(name)
            if is_ours or name in _FORWARDED or name.startswith(_FORWARDED_PREFIXES):
                passed += [forward, name]
        rank = [self.python or rank[0], *rank[1:]]
        return [self.words[0], *passed, *self.words[1:], *rank]

    def environment(self, base: Mapping[str, str]) -> dict[str, str]:
        """Returns the environment of the command."""
        root = DIALECTS[self.dialect].as_root if os.geteuid() == 0 else None
        return {**base, **(root or {})}


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
        done = programs.run(program, "--version", most_s=30)
    except RunError:
        return False
    return re.search(dialect.version, done.stdout + done.stderr, re.IGNORECASE) is not None


def starter(config: RunConfig, hosts: Sequence[Host], in_slurm: bool = False) -> Starter:
    """Returns the command that starts all ranks, rank 0 on the first host."""
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
    # The program is what the config names, what is here, or its usual name; torchrun is that of
    # this Python.
    programs = dialect.programs.split()
    beside = [str(Path(sys.executable).with_name("torchrun"))] if name == "torchrun" else []
    present = next((one for one in (*beside, *programs) if shutil.which(one)), programs[-1])
    program = config.launcher.mpirun or present
    words = [program, *words, *config.launcher.mpi_options]
    if not (in_slurm and config.cluster.container):
        return Starter(name, tuple(words))
    return Starter(name, (*words, *_container(config)), config.cluster.container_python)


def _container(config: RunConfig) -> list[str]:
    """Returns the words that start what follows them in the site's container."""
    site, image = config.cluster, str(config.cluster.container)
    folders = dict.fromkeys((str(Path.cwd()), str(Path(config.results).absolute())))
    mounts = [*(f"{folder}:{folder}" for folder in folders), *site.container_mounts]
    if site.container_by == "pyxis":
        named = [f"--container-image={image}", f"--container-mounts={','.join(mounts)}"]
        return [*named, *site.container_options]
    binds = (word for mount in mounts for word in ("--bind", mount))
    return ["apptainer", "exec", *binds, *site.container_options, image]


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


FAILED_SETUP = "HIRES_FAILED_SETUP"
"""Variable in which ``launch/job.sh`` holds the first line of its set-up that failed."""


def reproduce_line(argv: Sequence[str]) -> str:
    """Returns the command line that was typed as one shell-quoted line that begins with hires.

    Without ``--json``, which changes what is printed alone.
    """
    words = [word for word in argv if word != "--json"]
    if words and Path(words[0]).name in ("hires", "__main__.py"):
        del words[0]
    return shlex.join(["hires", *words])


def launch_script(config: RunConfig, argv: Sequence[str]) -> str:
    """Returns the text of a run's ``launch.sh``; ``argv`` is the command line as typed."""
    if config.launcher.has_jobs:
        return render(argv, f"{config.launcher.name}.sh")
    name, starter = config.launcher.name, ""
    if name == "torchrun" or (name == "mpirun" and config.mpi != "srun"):
        # One command starts the ranks, on machines that are known beforehand.
        hosts = mpi_starter.hosts_of(config, config.parallel.num_processes)
        starter = f" -- \\\n    {shlex.join(mpi_starter.starter(config, hosts).words)}"
    return render(argv, STARTER=starter)


def render(argv: Sequence[str], template: str = "local.sh", **values: Sequence[str]) -> str:
    """Returns the text of a script for a run that ``argv`` started from the current folder.

    ``values`` replace names of the template: words, which are quoted, or text as it is.
    """
    values = {
        # A line break inside an argument would end the comment and run as a command.
        "COMMAND": " ".join(reproduce_line(argv).splitlines()),
        "FOLDER": [str(Path.cwd())],
        "MODULE": [*python(), "-m"],
        "PYTHONPATH": [without_empty_entries(os.environ.get("PYTHONPATH", ""))],
        "RUN": ".",
        "STARTER": "",
        **values,
    }
    texts = {k: v if isinstance(v, str) else shlex.join(v) for k, v in values.items()}
    return re.sub(r"@([A-Z]+)@", lambda match: texts[match[1]], _template(template))


def _template(name: str) -> str:
    """Returns the text of a file in ``launch/``, which every launcher with jobs has."""
    return shipped(f"launch/{name}").read_text(encoding="utf-8")
