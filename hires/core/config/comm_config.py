"""Declares the keys of how ranks communicate, ``comm``, and the options of their libraries."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from hires.core.codecs import codecs_of
from hires.core.config.fields import MOST_STEPS, Section, check_word, value
from hires.core.errors import ConfigError
from hires.core.gradient_orders import AUTO, CHOICES
from hires.core.message_backends import BACKEND_FACTS
from hires.core.programs import shipped
from hires.core.registry import offer
from hires.core.units import parse_size


def _check_outstanding(key: str, number: int | None) -> None:
    if number is not None and number < 1:
        raise ConfigError(
            f"{key}={number} lets no sum of gradients begin; use 1 or more, as {key}=2"
        )


BACKENDS = {
    "auto": "nccl where every rank computes on a GPU of its own, else gloo",
    **{name: BACKEND_FACTS[name].summary for name in BACKEND_FACTS},
}


@dataclass
class CommConfig(Section, key="comm", choices=BACKENDS, choice_keys=lambda name: {"backend": name}):
    """``comm=NAME``: how ranks communicate."""

    backend: str = value("auto", choices=BACKENDS)
    """Transport of all messages to which ``table`` gives no other. On one machine the default table
    gives those of all but ``nccl`` to ``shm``, except barriers, agreements and broadcasts; with
    ``comm.shared_memory=false`` it does not. ``gloo`` (beside GPUs through the host's memory),
    ``nccl`` (from GPU to GPU, one rank on each; barriers and agreements still go through gloo),
    ``mpi`` (the MPI whose launcher starts the ranks, also through the host's memory), ``shm``
    (memory that the ranks of one machine share) or ``auto``: ``nccl`` for ``device=cuda`` if every
    rank has a GPU of its own, else ``gloo``."""
    table: str = value("default", identity=False)
    """Tuning table: which backend and algorithm carries a message, by operation, ranks, device,
    type and size. ``default`` ships with hires (memory of one machine for messages, gathers and
    sums, ``backend`` for all others), ``tuned`` is the one that `hires tune comm` has measured
    here, ``comm-tuning/table.json`` (before that, another one that ships); others are files."""
    granularity: str = value("fine", choices=("fine", "coarse"))
    """Whether the table chooses by size (``fine``), or one backend for each operation
    (``coarse``)."""
    backends: list[str] = value([])
    """Backends that the table may choose beside ``backend``, as [mpi,shm]; none named: all that it
    names and that the run can have. A message for which a rule names another one goes on to the
    next rule."""
    visible: str = value("own", choices=("own", "node"), plan=False)
    """GPUs that a rank sees: its ``own`` only, or all of its ``node``, as CUDA IPC of some MPI
    libraries needs. It computes on its own either way."""
    timeout_s: float = value(120.0, above=0, high=MOST_STEPS, identity=False, plan=False)
    """Seconds for which a rank may wait for another, or neither move nor compute, until the run is
    stopped; the attempt's ``hang.txt`` has the cause."""
    shared_memory: bool = True
    """Whether ranks on one machine send their messages through memory that they share."""
    codec: Any = value("none")
    """What makes the numbers of messages smaller: a codec for every kind of message that it can
    serve, as ``bf16``, or one for each, as ``{gradient: int8, halo: bf16}``; `hires list codecs`
    shows them. ``none``: values and their gradients travel in the type of the
    precision, and gradients of weights are summed in fp32 (fp64 with ``precision=fp64``), as
    statistics and losses always are."""
    gradient_order: str = value(AUTO, choices=CHOICES, tasks=("train",))
    """When the sums of large gradients over the copies of a stage begin, and how many are under way
    at once. Results are equal in all orders."""
    outstanding: int | None = value(2, 1, 64, check=_check_outstanding, tasks=("train",))
    """Sums of gradients that ``gradient_order=concurrent`` has under way at once; a rank waits for
    all of them before it begins the next as many. Without a bound (null) ranks whose gradients are
    ready in different orders wait for each other, so a plan with several such sums is refused."""
    joint_norms: bool = True
    """Whether norms of tiles or shards that do not depend on each other, as in the branches of a
    cell, share one message for their statistics and one for the way back."""
    log: str = value("summary", choices=("off", "summary", "full"), identity=False)
    """What is recorded of messages: ``off``, their number, bytes and seconds (``summary``), or also
    every single one (``full``); `hires show RUN --comm` shows it."""
    check: str = value("late", choices=("off", "late", "every"), identity=False)
    """When ranks compare what they call, so that an error names the two calls that differ, with
    their lines: where a wait is ``late`` or fails, and at the end; before ``every`` call, which
    costs a message each and finds what would end a process at once; or not at all (``off``)."""
    options: dict[str, Any] = value({})
    """Options of the libraries that carry messages, under one name for all of them, as
    ``{cuda_ipc: true}``; `hires list libraries` shows them with their variables. They replace
    variables that are set already."""

    def _problems(self) -> Iterator[str]:
        for name, setting in self.options.items():
            try:
                self.options[name] = checked_option(str(name), setting)
            except ConfigError as error:
                yield str(error)
        try:
            codecs_of(self.codec)
        except ConfigError as error:
            yield str(error)

    @property
    def codecs(self) -> dict[str, str]:
        """The codec of each kind of message that has one."""
        return codecs_of(self.codec)

    def uses(self, name: str) -> bool:
        """Whether messages may go through a backend, as far as the keys name it."""
        return name in (self.backend, *self.backends)


ABOUT_OPTIONS = """\
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
"""Of ``comm.options``: what one name stands for, and the sources of the table."""

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
