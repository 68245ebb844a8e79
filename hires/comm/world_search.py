"""Finds which rank a process is, however it was started: by hires, torchrun, an MPI or srun.

torchrun sets the variables that hires reads. An MPI's launcher numbers its processes in others, and
names no place where they could meet; then rank 0 chooses one, and MPI itself passes it on.
"""

from __future__ import annotations

import dataclasses
import os
import shlex
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any

from hires.comm.backends.works import pauses, wait
from hires.core.config.launcher_config import DIALECTS
from hires.core.errors import ConfigError, PeerError
from hires.core.ranks import meeting, mpi_library
from hires.core.ranks.world import World, from_environment, number_of, rank_numbers

_POLL_S = 0.001
_late: list[tuple[Any, bytearray]] = []  # into which MPI may still write


def world_here(
    backends: Sequence[str], environ: Mapping[str, str] = os.environ, limit_s: float = 120.0
) -> World:
    """Returns this process's world; ConfigError: the environment names no rank, or no address.

    ``limit_s``: longest wait for other ranks where MPI passes the address on; PeerError then.
    """
    for name in DIALECTS:
        try:
            numbers = rank_numbers(name, environ)
        except ConfigError:
            continue
        if name != "torchrun" and "RANK" not in environ:
            break
    else:
        # A program may set RANK and WORLD_SIZE alone: all ranks are on one machine then.
        alone = {"LOCAL_RANK": environ.get("RANK", ""), "HIRES_ATTEMPT": "0"}
        alone["LOCAL_WORLD_SIZE"] = environ.get("WORLD_SIZE", "")
        world = from_environment({**alone, **environ})
        return dataclasses.replace(world, secret=meeting.secret_of_environment())
    if "mpi" in backends:
        _choose_library(name, environ)
    address, port = environ.get("MASTER_ADDR", ""), environ.get("MASTER_PORT", "")
    if not (address and port):
        if "mpi" not in backends:
            raise ConfigError(
                f"{name} has started this rank, and names no MASTER_ADDR and MASTER_PORT where "
                "rank 0 listens; set them, or let its MPI carry messages, too: backends=('mpi',)"
            )
        address, port = _meeting_place(numbers.rank, limit_s)
    secret = meeting.secret_of_environment()
    return World(*numbers, address, number_of("MASTER_PORT", port), 0, secret)


def _choose_library(starter: str, environ: Mapping[str, str]) -> None:
    # The library of the launcher. The linker reads its search path when a process starts.
    chosen = mpi_library.variables(starter, "mpirun", environ)
    search = chosen.get("LD_LIBRARY_PATH", "")
    if search != environ.get("LD_LIBRARY_PATH", "") and search:
        words = " ".join(f"{key}={shlex.quote(value)}" for key, value in chosen.items())
        raise ConfigError(
            f"mpi4py looks for the library of {starter} under a name that it does not have here; "
            f"start the ranks with: export {words}"
        )
    os.environ.update(chosen)


def _meeting_place(rank: int, limit_s: float) -> tuple[str, str]:
    mpi, until = mpi_library.load(), time.monotonic() + limit_s
    mpi_library.start(mpi, limit_s)
    place = bytearray(256)
    if rank == 0:
        with meeting.reserve_port(0) as free:
            text = f"{socket.gethostname()} {free}".encode()
        place[: len(text)] = text
    sent = mpi.COMM_WORLD.Ibcast([place, mpi.BYTE], root=0)
    if not wait(sent.Test, until - time.monotonic(), pauses(_POLL_S)):
        _late.append((sent, place))
        raise PeerError("rank 0, or one that passes its message on, has not come in time")
    address, port = place.rstrip(b"\0").decode().split()
    return address, port
