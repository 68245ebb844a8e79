"""Names the options of communication libraries, and the variables by which each library reads them.

One name stands for what every library calls otherwise, so that ``comm.options.cuda_ipc=false``
means the same under Open MPI and MVAPICH. A library that has no such option is left as it is.
Variables that are no entry here belong to ``cluster.environment``.

Sources, by the first word of each entry's ``source``:
    EDSR     Anthony et al., "Scaling single-image super-resolution training on modern HPC
             clusters: early experiences", IPDPSW 2021 (MPI, MPI-Reg and MPI-Opt)
    MV2      MVAPICH2 2.3.7 and MVAPICH2-GDR 2.3 user guides; MVAPICH 3 calls them MVP_...
    MPICH    https://github.com/pmodels/mpich, CHANGES and README.envvar
    OMPI     https://docs.open-mpi.org, tuning-apps; ``ompi_info --param all all --level 9``
    UCX      https://openucx.readthedocs.io, FAQ; ``ucx_info -f``
    NCCL     https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from hires.core.config.fields import check_word
from hires.core.errors import ConfigError
from hires.core.registry import offer
from hires.core.shipped import shipped
from hires.core.units import parse_size

MPI_LIBRARIES = ("openmpi", "mpich", "mvapich")
LIBRARIES = (*MPI_LIBRARIES, "nccl")
"""What has options; the first three are words of ``launcher.mpi``."""
_OF_BACKEND = {"nccl": ("nccl",)}
_KINDS = {
    "switch": "true or false",
    "size": "a size, as 64KiB",
    "number": "a whole number, 1 or more",
    "word": "text on one line",
}


@dataclass(frozen=True)
class LibraryOption:
    """One option, whatever the libraries call it."""

    kind: str
    """``switch``, ``size``, ``number`` or ``word``."""
    meaning: str
    source: str
    openmpi: str = ""
    """Its variables, separated by blanks; of a switch ``NAME=on|off``."""
    mpich: str = ""
    mvapich: str = ""
    nccl: str = ""

    @property
    def values(self) -> str:
        """What it may be, in words."""
        return _KINDS[self.kind]

    @property
    def settings(self) -> str:
        """Each library that has it, with its variables."""
        named = ((library, getattr(self, library)) for library in LIBRARIES)
        return "; ".join(f"{library}: {words}" for library, words in named if words)


OPTIONS = {
    name: LibraryOption(**facts)
    for name, facts in yaml.safe_load(shipped("conf/libraries.yaml").read_bytes()).items()
}
"""``comm.options.NAME`` -> what it is."""


def checked_option(name: str, value: Any) -> bool | int | str:
    """Returns the value of an option as it is kept; ConfigError: no such option or value."""
    key, option = f"comm.options.{name}", OPTIONS.get(name)
    if option is None:
        raise ConfigError(f"{key} is unknown; {offer(name, OPTIONS)}")
    if option.kind == "switch" and isinstance(value, bool):
        return value
    if option.kind == "word" and isinstance(value, str):
        check_word(key, value)
        return value
    if option.kind == "size" and not isinstance(value, bool):
        size = parse_size(value) if isinstance(value, str | int) else None
        if size is not None and size > 0:
            return size
    if option.kind == "number" and type(value) is int and value > 0:
        return value
    raise ConfigError(f"{key}={value!r} must be {_KINDS[option.kind]}")


def libraries(backends: Iterable[str], mpi: str) -> tuple[str, ...]:
    """Returns the libraries of some backends, as far as they have options.

    ``mpi``: what starts the ranks. With ``srun`` their MPI is found in the job: all three count.
    """
    of_mpi = (mpi,) if mpi in MPI_LIBRARIES else MPI_LIBRARIES
    there = {name for backend in backends for name in _OF_BACKEND.get(backend, ())}
    return tuple(
        name for name in LIBRARIES if name in there or (name in of_mpi and "mpi" in backends)
    )


def variables(options: Mapping[str, Any], names: Iterable[str]) -> dict[str, str]:
    """Returns the variables of options for some libraries."""
    return {
        variable: text
        for library in names
        for option, value in options.items()
        for variable, text in _of_library(OPTIONS[option], value, library)
        if text
    }


def _of_library(option: LibraryOption, value: Any, library: str) -> Iterator[tuple[str, str]]:
    for word in getattr(option, library).split():
        name, _, values = word.partition("=")
        on, _, off = values.partition("|")
        yield name, (on if value else off) if option.kind == "switch" else str(value)
