"""Starts, watches, signals and ends the ranks of one world.

Every rank leads a session and process group of its own: SIGTERM and SIGKILL reach whatever it
started too, and Ctrl-C in the terminal reaches only the supervisor, which decides. On Linux the
kernel kills a rank whose supervisor dies, even by ``kill -9``; it watches the *thread* that started
the rank, so the thread that starts ranks must live as long as they do.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hires.core.config.run_config import RunConfig
from hires.core.errors import RunError
from hires.core.python_command import module_command
from hires.core.ranks.world import World
from hires.core.store import file_names, records
from hires.core.store.reading import open_regular
from hires.launcher.interface import OnLine
from hires.launcher.ranks import spawn
from hires.launcher.ranks.places import RankPlace, RankPlaces
from hires.plan.channels import CONNECTIONS, MOST_QUEUES
from hires.plan.hardware import CUDA
from hires.plan.routes import STREAMED

_POLL_S = 0.02


@dataclass(frozen=True)
class Launch:
    """What is to be started: one attempt of a run."""

    run_dir: Path
    attempt: int
    config: RunConfig
    module: str
    """Python module that every rank runs."""
    args: Sequence[str]
    """What follows the run folder on its command line."""
    places: RankPlaces
    on_line: OnLine | None = None

    @property
    def folder(self) -> Path:
        """Folder of the attempt."""
        return file_names.attempt_dir(self.run_dir, self.attempt)

    def log(self, rank: int) -> Path:
        """Returns the log of a rank."""
        return file_names.rank_log(self.folder, rank)

    def note(self, event: str, **fields: Any) -> None:
        """Writes an event; on a full disk it matters more that the ranks are stopped."""
        with contextlib.suppress(RunError):
            records.event(self.run_dir, self.attempt, event, **fields)


@dataclass
class Rank:
    """One rank, and how it ended."""

    rank: int
    log: Path
    pid: int | None = None
    """Its process, or the one that stands for it; None: it runs on another machine, or not yet."""
    code: int | None = None
    """Exit code, negative for a signal; None while it runs."""
    ended_s: float = 0.0
    """When its end was seen, in seconds since the epoch."""

    def end(self, code: int, seen_s: float | None = None) -> None:
        """Keeps how it ended."""
        self.code, self.ended_s = code, time.time() if seen_s is None else seen_s


class RankGroup(ABC):
    """The ranks of one start: :class:`SeparateRanks`, or those of one command (``agent``)."""

    def __init__(self, job: Launch, port: int) -> None:
        self.job, self.port = job, port
        self.ranks: list[Rank] = []
        """Those that were started, in order."""
        self.broken: str | None = None
        """Why the ranks ended though none of them failed, in words, if it is so."""

    @abstractmethod
    def begin(self, hurry: Callable[[], bool]) -> None:
        """Starts the ranks or raises RunError; stops half-way when ``hurry`` returns True."""

    @abstractmethod
    def poll(self) -> Sequence[Rank]:
        """Returns the ranks that ended since the last call, their exit codes filled in."""

    @abstractmethod
    def send(self, number: signal.Signals) -> None:
        """Sends a signal to every rank that runs."""

    @abstractmethod
    def kill(self) -> None:
        """Sends SIGKILL and waits for all ranks; nothing of the start is left then."""

    @property
    def running(self) -> list[Rank]:
        """The ranks that have not ended."""
        return [rank for rank in self.ranks if rank.code is None]

    def stop(self, grace_s: float, hurry: Callable[[], bool]) -> None:
        """Sends SIGTERM, and SIGKILL after ``grace_s`` or as soon as ``hurry`` returns True."""
        self.send(signal.SIGTERM)
        self.wait(grace_s, hurry)
        self.kill()

    def wait(self, most_s: float, hurry: Callable[[], bool] = lambda: False) -> None:
        """Waits until all ranks have ended, at most so long."""
        until = time.monotonic() + most_s
        while time.monotonic() < until and not hurry():
            self.poll()
            if not self.running:
                return
            time.sleep(_POLL_S)

    def pids(self) -> dict[int, int]:
        """Returns the processes of this machine that are ranks, or stand for one, and run."""
        return {rank.rank: rank.pid for rank in self.running if rank.pid is not None}


class SeparateRanks(RankGroup):
    """Each rank is a child of this process, or one stands for it (``srun``)."""

    def __init__(self, job: Launch, port: int, files: Sequence[int] = ()) -> None:
        super().__init__(job, port)
        self._children: dict[int, spawn.Child] = {}  # by rank
        self._files = files  # that the ranks inherit

    def begin(self, hurry: Callable[[], bool]) -> None:
        """Starts the ranks one by one, see :class:`RankGroup`."""
        for number, place in enumerate(self.job.places.ranks):
            rank = self.start(number, len(self.job.places.ranks), place)
            node = {"node": place.node} if place.node else {}
            self.job.note("rank_started", rank=number, pid=rank.pid, **node)
            if hurry():
                return

    def start(self, number: int, size: int, place: RankPlace) -> Rank:
        """Starts one rank of ``size``, its output going to its log; RunError: it cannot."""
        job, places = self.job, self.job.places
        local = (place.local_rank, place.local_size)
        world = World(number, size, *local, places.address, self.port, job.attempt)
        environ = rank_environment(os.environ, world, job.config, places.interface)
        command = [*place.prefix, *module_command(job.module, str(job.run_dir), *job.args)]
        log = job.log(number)
        with contextlib.suppress(OSError):
            log.unlink()  # of a start whose port was taken
        child = spawn.start_logged(f"rank {number}", command, environ, log, files=self._files)
        self._children[number] = child
        self.ranks.append(Rank(number, log, child.pid))
        return self.ranks[-1]

    def poll(self) -> Sequence[Rank]:
        """Returns the ranks that ended since the last call."""
        options = os.WEXITED | os.WNOHANG | os.WNOWAIT
        ended = []
        for rank in self.running:
            with contextlib.suppress(ChildProcessError):  # it was reaped elsewhere: it has ended
                if os.waitid(os.P_PID, self._children[rank.rank].pid, options) is None:
                    continue
            ended.append(rank)
        seen_s = time.time()
        for rank in ended:
            # What it started ends with it. It is not reaped yet, so its number still means its
            # group, and no other process.
            self._signal(rank, signal.SIGKILL)
            self._reap(rank, seen_s)
        return ended

    def send(self, number: signal.Signals) -> None:
        """Sends a signal: SIGUSR1 and SIGUSR2 to ranks alone, others to all that they started."""
        for rank in self.running:
            self._signal(rank, number)

    def kill(self) -> None:
        """Ends all ranks at once and waits for them."""
        self.send(signal.SIGKILL)
        for rank in self.running:
            self._reap(rank)

    def _signal(self, rank: Rank, number: signal.Signals) -> None:
        # srun gets every signal alone: a child in its group ends the rank if srun is killed.
        alone = self.job.places.relayed or number in (signal.SIGUSR1, signal.SIGUSR2)
        kill, pid = os.kill if alone else os.killpg, self._children[rank.rank].pid
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, number)
            if number == signal.SIGTERM:
                kill(pid, signal.SIGCONT)  # a stopped process sees no SIGTERM

    def _reap(self, rank: Rank, seen_s: float | None = None) -> None:
        """Waits until a rank's process has ended, and keeps the rank's exit code."""
        code = self._children[rank.rank].wait()
        # srun exits with 128 plus the number of the signal that ended its rank.
        rank.end(128 - code if self.job.places.relayed and code > 128 else code, seen_s)


def last_lines(log: Path, count: int = 20) -> list[str]:
    """Returns the last lines of a log, without reading all of it."""
    try:
        with open_regular(log) as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - 200 * count))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    return text.rstrip().splitlines()[-count:]


def rank_environment(
    base: Mapping[str, str], world: World, config: RunConfig, interface: str | None
) -> dict[str, str]:
    """Returns the environment variables of a rank.

    What it inherits, ``base``, counts before ``interface`` and ``cluster.environment``, and after
    ``comm.options``. The queues of a GPU are always ours: with fewer than its streams, ranks could
    wait for each other for ever.
    """
    # Under torchrun these make torch expect a store that another process hosts, and none does.
    environ = {k: v for k, v in base.items() if not k.startswith("TORCHELASTIC_")}
    environ |= world.to_environment() | spawn.thread_variables(config.launcher.threads)
    environ["PYTHONUNBUFFERED"] = "1"  # or the last lines of a killed rank would be lost
    environ.setdefault("PYTHONFAULTHANDLER", "1")
    if interface is not None:
        environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    ours = _gpu_variables(config, interface)
    environ = {**ours, **config.cluster.environment, **environ, **config.library_variables}
    return environ | {name: ours[name] for name in (CONNECTIONS,) if name in ours}


def _gpu_variables(config: RunConfig, interface: str | None) -> dict[str, str]:
    """Returns what CUDA and NCCL read, where nothing else sets it."""
    variables: dict[str, str] = {}
    if config.device == CUDA:
        variables["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # as Slurm and nvidia-smi count GPUs
    if any(map(config.comm.uses, STREAMED)):
        # Each stream a queue of its own: in a shared one a message that waits for its other side
        # would hold up the kernels of other streams, which no proof has. 8 is CUDA's default, and
        # 1 what Megatron sets.
        variables[CONNECTIONS] = str(MOST_QUEUES)
        # Sums connect when the groups are made, not inside the first sum that is only begun.
        variables["NCCL_RUNTIME_CONNECT"] = "0"
        if interface is not None:
            variables["NCCL_SOCKET_IFNAME"] = f"={interface}"  # without = also ib0 means ib0.1
    return variables
