"""Starts the ranks of a benchmark, collects what they report, and leaves none behind.

Like the ranks of a run they use one thread each, and the CPU and gloo unless a
:class:`DevicePlace` is named. They are forked by a server that has imported torch, and end with
this process, with Ctrl-C, when one fails, and when the time is over.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple

import torch

from hires import comm
from hires.comm.backends import rendezvous
from hires.core import log as logs
from hires.core.errors import HiresError, LateError, RunError
from hires.core.ranks import ports
from hires.core.ranks.world import World
from hires.engine.device import open_device
from hires.engine.memory_meter import keep_memory
from hires.nets.custom import error_line
from hires.plan.hardware import CPU, GLOO

Job = Callable[..., Any]
_VALUE, _DONE, _ERROR = "value", "done", "error"
"""What a rank sends: a value of its job (rank 0 only), its end, or why it failed."""

PRELOADED = ["torch.distributed.pipelining", "torch._dynamo", "hires.engine.verify", __name__]
"""What the server imports once for all ranks; torch's optimisers import ``torch._dynamo``."""

_SETTLE_S = 0.5
"""How long the other ranks may still report after one failed, so that the cause is among them."""


def run_program(what: str, command: Sequence[str], timeout_s: float, given: str = "") -> str:
    """Returns what a program prints; RunError: it failed; LateError: the time was over."""
    how: dict[str, Any] = {"capture_output": True, "text": True, "check": True}
    try:
        answer: str = subprocess.run(command, input=given, timeout=timeout_s, **how).stdout
    except subprocess.TimeoutExpired:
        raise LateError(f"{what} was not done after {timeout_s:g} s; use --timeout") from None
    except subprocess.CalledProcessError as error:
        last = " | ".join(error.stderr.strip().splitlines()[-3:])
        if error.returncode > 0 and last:  # it says itself why
            raise RunError(f"{what} failed: {last}") from error
        said = f"; its last words: {last}" if last else ", without a message"
        raise RunError(f"{what} failed: it {ended(error.returncode)}{said}") from None
    return answer


def ended(code: int) -> str:
    """Returns how a process ended by its exit code, below 0 the signal that killed it.

    >>> ended(3)
    'ended with exit code 3'
    >>> ended(-9)
    'was killed by SIGKILL (probably the memory of this machine or control group ran out)'
    """
    if code >= 0:
        return f"ended with exit code {code}"
    known = -code in set(signal.Signals)
    name = signal.Signals(-code).name if known else f"signal {-code}"
    why = " (probably the memory of this machine or control group ran out)"
    return f"was killed by {name}{why if -code == signal.SIGKILL else ''}"


def preload(modules: Sequence[str]) -> None:
    """Names more modules that the server imports for all ranks when it starts; some may lack."""
    PRELOADED.extend(modules)


class DevicePlace(NamedTuple):
    """Where ranks compute, and what carries their messages."""

    device: str = CPU
    backend: str = GLOO


CORES = DevicePlace()


def run_ranks(
    job: Job, num_ranks: int, timeout_s: float, *args: Any, place: DevicePlace = CORES
) -> Any:
    """Returns the last value of :func:`stream_ranks`."""
    *_, last = stream_ranks(job, num_ranks, timeout_s, *args, place=place)
    return last


def stream_ranks(
    job: Job, num_ranks: int, timeout_s: float, *args: Any, place: DevicePlace = CORES
) -> Iterator[Any]:
    """Yields what ``job(rank, *args)`` yields or returns on rank 0 of ``num_ranks`` processes.

    The job, a function of a module or a generator, runs on all ranks, with communication up. If one
    fails or the time is over, all are killed, and a RunError or a LateError is raised.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    deadline = time.monotonic() + timeout_s
    reserved = contextlib.ExitStack()
    waiting: dict[Connection, int] = {}
    ranks: list[BaseProcess] = []
    try:
        port = reserved.enter_context(ports.reserve(0))  # other programs may look for ports, too
        for rank in range(num_ranks):
            ours, theirs = context.Pipe(duplex=False)
            world = World(rank, num_ranks, rank, num_ranks, "127.0.0.1", port, 0)
            life = (theirs, world, timeout_s, place, job, args)
            ranks.append(context.Process(target=_rank, args=life, daemon=True))
            ranks[-1].start()
            theirs.close()
            waiting[ours] = rank
        while waiting:
            ready = wait([*waiting], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise LateError(f"the benchmark was not done after {timeout_s:g} s; use --timeout")
            for pipe in (pipe for pipe in [*waiting] if pipe in ready):
                kind, value = _receive(pipe)
                if kind == _ERROR:
                    raise _failure(waiting, pipe, value)
                if kind == _DONE:
                    del waiting[pipe]
                else:
                    yield value
    finally:
        reserved.close()
        for process in filter(lambda started: started.pid, ranks):
            process.kill()
            process.join()


def _failure(waiting: dict[Connection, int], pipe: Connection, error: str) -> RunError:
    """Returns the error that began the failure of which one rank has reported ``error``."""
    time.sleep(_SETTLE_S)
    errors = {waiting[pipe]: error}
    for other, rank in waiting.items():
        if other is not pipe and other.poll():
            kind, theirs = _receive(other)
            if kind == _ERROR:
                errors[rank] = theirs
    # A rank whose neighbour died reports only that it lost it.
    cause = min(errors, key=lambda rank: ("CommError" in errors[rank], rank != waiting[pipe]))
    return RunError(f"rank {cause} failed: {errors[cause]}")


def _receive(pipe: Connection) -> tuple[str, Any]:
    try:
        kind, value = pipe.recv()
        return kind, value
    except EOFError:
        return _ERROR, "it died without a word"


def _rank(
    pipe: Connection,
    world: World,
    timeout_s: float,
    place: DevicePlace,
    job: Job,
    args: tuple[Any, ...],
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it at once, wherever it waits
    threading.Thread(target=_end_with_parent, daemon=True).start()
    logs.setup(world.rank)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    # Many networks in one process must not push each other's kernels out of oneDNN's cache.
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "8192")
    torch.set_num_threads(1)
    keep_memory()  # as in a run, for all contestants alike
    end: tuple[str, str | None] = (_DONE, None)
    try:
        host_empty = open_device(place.device, world.local_rank).host_empty
        comm.init([place.backend], world=world, timeout_s=timeout_s, host_empty=host_empty)
        if place.backend == GLOO:  # contestants are built on torch.distributed
            rendezvous.torch_world(world, timeout_s)
        made = job(world.rank, *args)
        for value in made if isinstance(made, Iterator) else [made]:
            if world.rank == 0:
                pipe.send((_VALUE, value))
        if comm.is_initialized():  # a job may leave the world, or stand for a rank of another one
            comm.barrier()
    except HiresError as error:
        end = (_ERROR, f"{type(error).__name__}: {error}")
    except Exception as error:
        end = (_ERROR, traceback_of(error))
    pipe.send(end)
    pipe.close()
    sys.stderr.flush()
    os._exit(0)  # threads of a broken transport must not keep it alive


def traceback_of(error: Exception) -> str:
    """Returns the traceback of an error; its last line is the error with its notes."""
    return "".join([*traceback.format_exception(error), error_line(error)])


def _end_with_parent() -> None:
    """Ends this rank with the benchmark, even one that was killed; the server would stay for it."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
