"""Calls the MPI library without hires, through mpi4py and from a loop in C: the raw baselines.

The loop (``mpi_loop.c``) is compiled here by the C compiler of the machine. Functions and handles
come from mpi4py, so that no header of an MPI is needed.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from hires.bench.message_operations import (
    BARRIER,
    MESSAGES,
    ROOT,
    BenchBuffers,
    Call,
    bind,
    window,
)
from hires.comm.backends.mpi_types import TYPES, reduction
from hires.core.ranks import mpi_library
from hires.core.store.files import cache_dir, make_folder

SOURCE = Path(__file__).with_name("mpi_loop.c")
FUNCTIONS = "Barrier", "Wtime", "Wait", "Send", "Recv", "Isend", "Irecv"
NAMES = {
    "all_reduce": "allreduce",
    "reduce": "reduce",
    "broadcast": "bcast",
    "all_gather_into_tensor": "allgather",
    "reduce_scatter_tensor": "reduce_scatter_block",
    "all_to_all_single": "alltoall",
    "gather": "gather",
    "scatter": "scatter",
    BARRIER: "barrier",
}
"""Operation -> MPI's own name, in the order of the numbers in ``mpi_loop.c``."""
ALIKE = {
    "all_gather": "all_gather_into_tensor",
    "reduce_scatter": "reduce_scatter_tensor",
    "all_to_all": "all_to_all_single",
}
"""Operations on lists of tensors, which lie side by side here -> those on one."""
_NUMBERS = {name: number for number, name in enumerate((*MESSAGES, *NAMES))}


class RawMpi:
    """The library's own world, beside that of hires."""

    def __init__(self) -> None:
        self.mpi = mpi = mpi_library.load()
        if not mpi.Is_initialized():
            mpi.Init_thread(mpi.THREAD_SERIALIZED)
        self.world = mpi.COMM_WORLD.Dup()

    def bind(self, buffers: BenchBuffers, blocking: bool) -> Call | None:
        """Returns a call through mpi4py; None: MPI has no such operation or type."""
        name = ALIKE.get(buffers.operation, buffers.operation)
        given, taken = self.spec(buffers.given), self.spec(buffers.taken)
        if given is None or taken is None:
            return None
        if name in MESSAGES:
            return self._messages(buffers, given, taken)
        if name not in NAMES:
            return None
        word = NAMES[name]
        function = getattr(self.world, word.capitalize() if blocking else f"I{word}")
        root, own = buffers.rank == ROOT, self.mpi.IN_PLACE
        words: tuple[Any, ...] = (given, taken)
        if name == "all_reduce":
            words = (own, taken)
        elif name == "reduce":
            words = (own, taken) if root else (given, None)
        elif name in ("gather", "scatter"):
            words = (given, taken if root else None)
            words = words if name == "gather" else (given if root else None, taken)
        elif name == "broadcast":
            words = (taken,)
        elif name == BARRIER:
            words = ()
        call = functools.partial(function, *words)
        return call if blocking else lambda: call().Wait()

    def spec(self, tensor: Tensor) -> list[Any] | None:
        """Returns a tensor as mpi4py takes it."""
        if tensor.dtype not in TYPES:
            return None
        buffer = self.mpi.buffer.fromaddress(tensor.data_ptr(), tensor.nbytes)
        return [buffer, getattr(self.mpi, TYPES[tensor.dtype])]

    def _messages(self, buffers: BenchBuffers, given: Any, taken: Any) -> Call:
        world, peer, first = self.world, buffers.peer, buffers.rank == ROOT
        if buffers.operation == "latency" and peer >= 0:
            send = functools.partial(world.Send, given, peer, 1)
            receive = functools.partial(world.Recv, taken, peer, 1)
            order = (send, receive) if first else (receive, send)

            def ping_pong() -> None:
                order[0]()
                order[1]()

            return ping_pong
        return bind(_Messages(self), buffers, True)


class _Messages:
    """Messages with the names of ``torch.distributed``."""

    def __init__(self, raw: RawMpi) -> None:
        self._raw = raw

    def isend(self, tensor: Tensor, peer: int, *, tag: int) -> Any:
        return _Request(self._raw.world.Isend(self._raw.spec(tensor), peer, tag))

    def irecv(self, tensor: Tensor, peer: int, *, tag: int) -> Any:
        return _Request(self._raw.world.Irecv(self._raw.spec(tensor), peer, tag))


class _Request:
    def __init__(self, request: Any) -> None:
        self.wait = request.Wait


class _Library(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in (*FUNCTIONS, "call")]


class _Job(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_ssize_t) for name in ("comm", "type", "sum", "in_place")),
        *((name, ctypes.c_void_p) for name in ("given", "taken")),
        *((n, ctypes.c_int) for n in ("operation", "blocking", "count", "rank", "peer", "window")),
    ]


class CompiledLoop:
    """The loop in C; ``works`` is whether it could be compiled, else ``problem`` says why not."""

    def __init__(self, raw: RawMpi) -> None:
        self._raw, self.problem = raw, ""
        try:
            self._loop = ctypes.CDLL(str(_compiled())).hires_mpi_loop
        except (OSError, subprocess.SubprocessError) as error:
            self.problem = f"no loop in C: {error}"
            return
        # The extension of mpi4py is linked with the library, so its handle finds the functions.
        self._functions = ctypes.CDLL(raw.mpi.__file__)

    def block(self, buffers: BenchBuffers, blocking: bool, times: int) -> list[float] | None:
        """Returns the seconds of each call; None: C has no such operation or type."""
        name, raw = ALIKE.get(buffers.operation, buffers.operation), self._raw
        if name not in _NUMBERS or buffers.given.dtype not in TYPES:
            return None
        mine = [self._address(f"MPI_{one}") for one in FUNCTIONS]
        word = NAMES.get(name, "barrier")
        called = self._address(f"MPI_{word.capitalize()}" if blocking else f"MPI_I{word}")
        count = {"scatter": buffers.taken, "reduce_scatter_tensor": buffers.taken}.get(
            name, buffers.given
        ).numel()
        if name == "all_to_all_single":
            count //= buffers.ranks
        handles = (raw.world, *reduction(raw.mpi, buffers.given.dtype, dist.ReduceOp.SUM))
        job = _Job(
            *(self._handle(one) for one in handles),
            int(raw.mpi.IN_PLACE),
            buffers.given.data_ptr(),
            buffers.taken.data_ptr(),
            *(_NUMBERS[name], blocking, count, buffers.rank, buffers.peer),
            window(buffers.num_bytes),
        )
        seconds = (ctypes.c_double * times)()
        library = _Library(*mine, called)
        if self._loop(ctypes.byref(library), ctypes.byref(job), times, seconds):
            raise RuntimeError(f"the MPI library failed in {name} of {buffers.num_bytes} bytes")
        return list(seconds)

    def _address(self, name: str) -> int:
        address = ctypes.cast(getattr(self._functions, name), ctypes.c_void_p).value
        assert address is not None
        return address

    def _handle(self, thing: Any) -> int:
        size = self._raw.mpi._sizeof(thing)
        return int.from_bytes(ctypes.string_at(self._raw.mpi._addressof(thing), size), "little")


def _compiled() -> Path:
    """Returns the loop as a library, compiled once for each source and compiler: OSError if not."""
    compiler = os.environ.get("CC") or next(filter(shutil.which, ("cc", "gcc", "clang")), "")
    if not compiler:
        raise OSError("there is no C compiler; install gcc, or set CC")
    key = hashlib.sha256(SOURCE.read_bytes() + compiler.encode()).hexdigest()[:16]
    target = cache_dir() / "mpi" / f"loop-{key}.so"
    if not target.exists():
        make_folder(target.parent)
        own = target.with_suffix(f".{os.getpid()}")
        command = [*shlex.split(compiler), "-O2", "-shared", "-fPIC", "-o", str(own), str(SOURCE)]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
        own.replace(target)  # other ranks may compile it, too
    return target
