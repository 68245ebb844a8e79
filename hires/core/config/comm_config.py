"""Declares the keys of how ranks communicate: ``comm``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hires.core.config import library_options
from hires.core.config.fields import MOST_STEPS, Section, value
from hires.core.errors import ConfigError
from hires.core.message_backends import BACKEND_FACTS
from hires.core.precisions import HALF

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
    dtype: str = value("value", choices=("value", "fp32", *HALF))
    """Type of halos, pipeline messages and sums of gradients: ``fp32``, ``fp16``, ``bf16``, or
    ``value``: values and their gradients travel in the type of the precision, and gradients of
    weights are summed in fp32 (fp64 with ``precision=fp64``), as statistics and losses always
    are."""
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
                self.options[name] = library_options.checked_option(str(name), setting)
            except ConfigError as error:
                yield str(error)

    def uses(self, name: str) -> bool:
        """Whether messages may go through a backend, as far as the keys name it."""
        return name in (self.backend, *self.backends)
