"""A pool of forked ranks: a job joins some of them to a world, and they wait for the next one.

    pool                      rank 0     rank 1     rank 2     rank 3      (waiting, forked once)
      │── job, world of 2 ──────▶ ◀─ join ─▶ │          │          │
      │◀─ answers ─────────────── │          │          │          │
      │── job, world of 4 ──────▶ ◀─ join ─▶ ◀─ join ─▶ ◀─ join ─▶ │

A rank comes from a fork server that has imported torch once. It leaves the pool if its job failed,
ran out of time, or left something behind; the next job gets a new one in its place.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from hires.core.ranks import meeting
from hires.core.ranks.world import World
from hires.launcher.ranks import spawn
from tests.helpers.patience import PATIENCE_S

KEPT = 8
"""Ranks that wait for jobs; more of a larger world end with it."""

_context = multiprocessing.get_context("forkserver")
_modules = ["torch._dynamo", "torch.distributed", "hires.worker", "pytest"]
_modules.append("tests.helpers.rank_server")


def preload(*modules: str) -> None:
    """Lets the fork server import what every rank of a file of tests would import, once.

    A file calls it as it is imported: the server starts with the first rank.
    """
    _modules[-1:-1] = modules  # before what sets aside all that was imported
    _context.set_forkserver_preload(_modules)


preload()


@dataclass(frozen=True)
class _Member:
    process: BaseProcess
    pipe: Connection


class Pool:
    """Ranks of one process of pytest; they end with it.

    ``kept`` of them wait for the next job. All are on one ``device``: the simulated one changes
    torch for good.
    """

    def __init__(self, kept: int = KEPT, device: str = "cpu") -> None:
        self.kept, self.device = kept, device
        self._waiting: list[_Member] = []
        self._lock = threading.Lock()

    def run(
        self, job: Callable[..., Any], size: int, *args: Any, timeout_s: float = PATIENCE_S
    ) -> list[Any]:
        """Returns what ``job(world, *args)`` returns on each of ``size`` ranks.

        Raises:
            AssertionError: a rank failed or the time ran out; all ranks of the world are killed.
        """
        with self._lock, meeting.reserve_port(0) as port:
            members = [self._next() for _ in range(size)]
            try:
                for rank, member in enumerate(members):
                    world = World(rank, size, rank, size, "127.0.0.1", port, 0)
                    member.pipe.send((job, world, args))
                answers = _answers(members, time.monotonic() + timeout_s)
            except BaseException:
                _end(members)
                raise
            clean = [member for member, (_, good) in zip(members, answers, strict=True) if good]
            kept = clean[: max(0, self.kept - len(self._waiting))]
            self._waiting += reversed(kept)
            _end([member for member in members if member not in kept])
        return [answer for answer, _ in answers]

    def close(self) -> None:
        """Ends all ranks."""
        with self._lock:
            _end(self._waiting)
            self._waiting.clear()

    def _next(self) -> _Member:
        while self._waiting:
            member = self._waiting.pop()
            if member.process.is_alive():
                return member
        ours, theirs = _context.Pipe()
        process = _context.Process(
            target=_serve, args=(theirs, self.device, self.kept == 0), daemon=True
        )
        process.start()
        theirs.close()
        return _Member(process, ours)


def _end(members: list[_Member]) -> None:
    for member in members:
        member.process.kill()
    for member in members:
        member.process.join()
        member.pipe.close()


def _answers(members: list[_Member], deadline: float) -> list[tuple[Any, bool]]:
    """Returns (answer, may serve again) of all; the first failure ends the wait for the others."""
    answers: dict[int, tuple[Any, bool]] = {}
    ranks = {member.pipe: rank for rank, member in enumerate(members)}
    while len(answers) < len(members):
        waiting = [pipe for pipe, rank in ranks.items() if rank not in answers]
        ready = wait(waiting, max(0.0, deadline - time.monotonic()))
        late = sorted(ranks[pipe] for pipe in waiting)
        assert ready, f"ranks {late} gave no answer in time"
        for pipe in ready:
            good, answer, clean = _receive(pipe)
            assert good, f"rank {ranks[pipe]} failed:\n{answer}"
            answers[ranks[pipe]] = answer, clean
    return [answers[rank] for rank in range(len(members))]


def _receive(pipe: Any) -> tuple[bool, Any, bool]:
    try:
        return pipe.recv()
    except (EOFError, ConnectionResetError):
        return False, "it died without an answer", False


def _serve(pipe: Connection, device: str, once: bool) -> None:
    """One rank's life: one job, or a job after the other until the pool or its process ends."""
    import torch

    from hires.engine.device import open_device
    from tests.helpers import simulated_device  # noqa: F401  it registers itself

    spawn.die_with(os.getppid())()  # also in the middle of a job
    torch.set_num_threads(1)
    # As for the ranks of a run: queues of a GPU for all streams, and channels before the first sum.
    os.environ |= {"CUDA_DEVICE_MAX_CONNECTIONS": "32", "NCCL_RUNTIME_CONNECT": "0"}
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    open_device(device, 0)
    before = _state()
    while (message := _next_job(pipe)) is not None:
        job, world, args = message
        torch.manual_seed(0)
        try:
            answer = (True, job(world, *args), _state() == before)
        except BaseException:
            answer = (False, traceback.format_exc(), False)
        with contextlib.suppress(BrokenPipeError):
            pipe.send(answer)
        if once:
            break
        del message, job, args, answer
        gc.collect()
    os._exit(0)


def _next_job(pipe: Connection) -> Any:
    try:
        return pipe.recv()
    except EOFError:
        return None


def _state() -> tuple[Any, ...]:
    """Returns what a job must leave as it was for its rank to serve another one."""
    import torch

    from hires import comm
    from tests.helpers import simulated_device

    simulated = simulated_device.is_loaded()
    arithmetic = torch.get_default_dtype(), torch.get_num_threads(), torch.is_grad_enabled()
    places = dict(os.environ), Path.cwd()
    return comm.is_initialized(), threading.active_count(), simulated, arithmetic, places


POOL = Pool()
"""For jobs that leave their rank as it was."""
SIMULATED = Pool(device="simulated")
"""The same on the simulated device."""
FRESH = Pool(kept=0)
"""Each job has ranks of its own."""
