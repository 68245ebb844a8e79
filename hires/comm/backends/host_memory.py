"""Makes memory that ranks of one machine share, and copies bytes of the host."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import platform
from collections.abc import Callable

from hires.core.errors import CommError, RunError
from hires.core.ranks import memory_files
from hires.core.ranks.world import World

_SHORT_BYTES = 2**15
"""A shorter copy takes less time than to let another thread run meanwhile."""


def _memcpy(library: ctypes.CDLL) -> Callable[[int, int, int], None]:
    function = library.memcpy
    function.argtypes, function.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t), None
    return function


copy_short = _memcpy(ctypes.PyDLL(None))
"""Copies bytes (to, from, how many), and keeps the interpreter meanwhile."""
_copy_long = _memcpy(ctypes.CDLL(None))


def copy(target: int, source: int, num_bytes: int) -> None:
    """Copies bytes from one address of this process to another."""
    (copy_short if num_bytes <= _SHORT_BYTES else _copy_long)(target, source, num_bytes)


def require_one_machine(world: World, backend: str) -> None:
    """Raises CommError where ranks of a world cannot share memory in the way we do it."""
    if world.local_size < world.size:
        raise CommError(
            f"backend {backend} exchanges in the memory of one machine, and this one has "
            f"{world.local_size} of the {world.size} ranks; use gloo or mpi"
        )
    if not memory_files.is_supported():
        raise CommError(
            f"backend {backend} needs a processor that keeps the order of writes (x86_64), and "
            f"this is {platform.machine()}; use gloo or mpi"
        )


def share(
    exchange: Callable[[str], list[str]], index: int, num_bytes: int, what: str, name: str
) -> memoryview:
    """Returns memory of zeros that some ranks share; ``exchange`` returns the texts of all of them.

    The first makes a file, all map it, then its name goes: nothing is left behind even if a rank is
    killed later. ``name`` is the same on all of them, and follows from their secret alone
    (``rendezvous.memory_name``): no path is ever taken from another process.

    Raises:
        CommError: there is no room, or a rank does not see the file; all ranks raise the same one.
    """
    memory, problem = memoryview(b""), ""
    with contextlib.ExitStack() as stack:
        if index == 0:
            try:
                handle = stack.enter_context(memory_files.memory_file(name, num_bytes, what))
                memory = _map(handle, num_bytes)
            except (RunError, OSError) as error:
                problem = str(error)
        if not (problem := exchange(problem)[0]) and index > 0:
            try:
                handle = memory_files.open_file(name)
                stack.callback(os.close, handle)
                memory = _map(handle, num_bytes)
            except (OSError, ValueError) as error:
                problem = (
                    f"{what}: its file in {memory_files.folder()} is not visible to all ranks "
                    f"({error}); ranks in containers must share /dev/shm (--ipc), or use gloo or "
                    f"mpi"
                )
        if problems := [*filter(None, exchange(problem))]:
            raise CommError(problems[0])
    return memory


def _map(handle: int, num_bytes: int) -> memoryview:
    return memoryview(mmap.mmap(handle, num_bytes))
