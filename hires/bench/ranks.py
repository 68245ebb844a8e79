"""Starts the ranks of a benchmark, collects what they report, and leaves none behind.

Like the ranks of a run they talk over gloo and have one thread each. They die with this process,
with Ctrl-C, when one of them fails, and when the time is over.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch
from torch import multiprocessing as torch_multiprocessing

from hires import comm
from hires.core import log as logs
from hires.core.errors import HiresError, RunError
from hires.core.ranks.world import World
from hires.engine.memory_meter import keep_memory

Job = Callable[..., Any]
_PROGRESS = None
"""Stands in the place of whether a rank succeeded, in what it sends before its end."""

_SETTLE_S = 0.5
"""How long the other ranks may still report after one failed, so that the cause is among them."""


def report(values: Any) -> None:
    """Hands something over to the process that called :func:`run_ranks`; rank 0 only."""
    if _reports is not None:
        _reports.send((_PROGRESS, values))


_reports: Connection | None = None


def run_ranks(
    job: Job,
    num_ranks: int,
    timeout_s: float,
    *args: Any,
    on_report: Callable[[Any], None] = lambda values: None,
) -> Any:
    """Returns what ``job(rank, *args)`` returns on rank 0 of ``num_ranks`` processes.

    Args:
        job: a function of a module; communication is up while it runs.
        num_ranks: processes.
        timeout_s: after this time all ranks are killed.
        args: pickled for every rank.
        on_report: called with all that rank 0 hands over by :func:`report`.

    Raises:
        RunError: a rank failed or the time was over.
    """
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
    # Many networks in one process must not push each other's kernels out of oneDNN's cache.
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "8192")
    context = multiprocessing.get_context("spawn")
    port, deadline = _free_port(), time.monotonic() + timeout_s
    pipes: list[Connection] = []
    ranks: list[BaseProcess] = []
    try:
        for rank in range(num_ranks):
            ours, theirs = context.Pipe(duplex=False)
            world = World(rank, num_ranks, rank, num_ranks, "127.0.0.1", port, 0)
            life = (theirs, os.getpid(), world, timeout_s, job, args)
            ranks.append(context.Process(target=_rank, args=life, daemon=True))
            ranks[-1].start()
            theirs.close()
            pipes.append(ours)
        return _answers(pipes, deadline, timeout_s, on_report)[0]
    finally:
        for process in filter(lambda started: started.pid, ranks):
            process.kill()
            process.join()


def _answers(
    pipes: list[Connection], deadline: float, timeout_s: float, on_report: Callable[[Any], None]
) -> list[Any]:
    """Returns the answers of all ranks; the first failure ends the wait."""
    answers: dict[int, Any] = {}
    while len(answers) < len(pipes):
        waiting = {pipe: rank for rank, pipe in enumerate(pipes) if rank not in answers}
        ready = wait([*waiting], max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RunError(f"the benchmark was not done after {timeout_s:g} s; use --timeout")
        for pipe in pipes:
            if pipe in ready:
                good, answer = _receive(pipe)
                if good is _PROGRESS:
                    on_report(answer)
                elif good:
                    answers[waiting[pipe]] = answer
                else:
                    raise _failure(waiting, pipe, answer)
    return [answers[rank] for rank in range(len(pipes))]


def _failure(waiting: dict[Connection, int], pipe: Connection, error: str) -> RunError:
    """Returns the error that began the failure of which one rank has reported ``error``."""
    time.sleep(_SETTLE_S)
    errors = {waiting[pipe]: error}
    for other, rank in waiting.items():
        if other is not pipe and other.poll():
            good, theirs = _receive(other)
            if good is False:
                errors[rank] = theirs
    # A rank whose neighbour died only tells that it lost it.
    cause = min(errors, key=lambda rank: ("CommError" in errors[rank], rank != waiting[pipe]))
    return RunError(f"rank {cause} failed: {errors[cause]}")


def _receive(pipe: Connection) -> tuple[bool | None, Any]:
    """Returns (succeeded, answer) of a rank, or what it reports before its end."""
    try:
        good, answer = pipe.recv()
    except EOFError:
        return False, "it died without a word"
    return good, answer


def _rank(
    pipe: Connection, parent: int, world: World, timeout_s: float, job: Job, args: tuple[Any, ...]
) -> None:
    """Runs one rank to its end."""
    global _reports
    _reports = pipe if world.rank == 0 else None
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it at once, wherever it waits
    torch_multiprocessing._prctl_pr_set_pdeathsig(signal.SIGKILL)  # type: ignore[attr-defined]
    if os.getppid() != parent:
        os._exit(1)
    logs.setup(world.rank)
    torch.set_num_threads(1)
    keep_memory()  # as in a run, for all contestants alike
    try:
        comm.start(world, timeout_s)
        answer = (True, job(world.rank, *args))
        comm.barrier()
    except HiresError as error:
        answer = (False, f"{type(error).__name__}: {error}")
    except Exception:
        answer = (False, traceback.format_exc())
    pipe.send(answer)
    pipe.close()
    sys.stderr.flush()
    os._exit(0)  # threads of a broken transport must not keep it alive


def _free_port() -> int:
    """Returns a port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
