"""Starts, watches, signals and ends the ranks of one world.

Each is a child of this process, or one command (mpirun, srun, torchrun) starts all, perhaps on
other machines, and they say in ``events.jsonl`` that they run and how they end.

Every child leads a session and process group of its own: SIGTERM and SIGKILL reach whatever it
started too, and Ctrl-C in the terminal reaches only the supervisor, which decides. On Linux the
kernel kills a child whose supervisor dies, even by ``kill -9``; it watches the *thread* that
started the child, so the thread that starts ranks must live as long as they do.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hires.core.config.launcher_config import DIALECTS
from hires.core.config.run_config import RunConfig
from hires.core.errors import RunError
from hires.core.programs import module_command
from hires.core.ranks import mpi_library
from hires.core.ranks.machine import VISIBLE
from hires.core.ranks.mpi_starter import Starter, require_program
from hires.core.ranks.world import MEETING, STARTER, World
from hires.core.store import file_names, provenance, records
from hires.core.store.files import write_atomically
from hires.launcher.interface import OnLine
from hires.launcher.ranks import spawn
from hires.launcher.ranks.places import RankPlaces
from hires.launcher.status.run_progress import LinesTail, last_lines
from hires.plan.hardware import CUDA, MPI
from hires.plan.message_routes import CONNECTIONS, MOST_QUEUES
from hires.plan.routes import STREAMED

END_S = 5.0
"""How long the command may take to end after its ranks."""
LOST_S = 1.0
"""How late the events of ranks may be seen after their command has ended."""
_POLL_S = 0.02
_OUTER = tuple(word for dialect in DIALECTS.values() for word in dialect.outer.split())
"""Variables set by an enclosing mpirun, which our ranks must not inherit."""


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
    def command(self) -> list[str]:
        """The command of a rank."""
        return module_command(self.module, str(self.run_dir), *self.args)

    @property
    def folder(self) -> Path:
        """Folder of the attempt."""
        return file_names.attempt_dir(self.run_dir, self.attempt)

    def environment(self, base: Mapping[str, str]) -> dict[str, str]:
        """Returns :func:`rank_environment` of its ranks, with the GPUs that they are to see."""
        environ = rank_environment(base, self.config, self.places.interface)
        return environ | ({VISIBLE: ",".join(self.places.gpus)} if self.places.gpus else {})

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
    """Its process; None: it runs on another machine, or not yet."""
    code: int | None = None
    """Exit code, negative for a signal; None while it runs."""
    ended_s: float = 0.0
    """When its end was seen, in seconds since the epoch."""

    def end(self, code: int, seen_s: float | None = None) -> None:
        """Keeps how it ended."""
        self.code, self.ended_s = code, time.time() if seen_s is None else seen_s


class RankGroup(ABC):
    """The ranks of one start: :class:`ChildRanks` or :class:`CommandRanks`."""

    def __init__(self, job: Launch, port: int) -> None:
        self.job, self.port = job, port
        self.ranks: list[Rank] = []
        """Those that were started, in order."""
        self.broken: str | None = None
        """Why the ranks ended though none of them failed, in words, if it is so."""

    @abstractmethod
    def begin(self, interrupted: Callable[[], bool]) -> None:
        """Starts the ranks or raises RunError; stops half-way if it is ``interrupted``."""

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

    def preempt(self) -> None:
        """Makes every rank save its state and end, within a second of its next step."""
        with contextlib.suppress(RunError):  # no state could be saved on a full disk, either
            write_atomically(self.job.folder / file_names.PREEMPT, "")

    def stop(self, grace_s: float, interrupted: Callable[[], bool]) -> None:
        """Sends SIGTERM, and SIGKILL after ``grace_s`` or as soon as it is ``interrupted``."""
        self.send(signal.SIGTERM)
        until = time.monotonic() + grace_s
        while self.running and time.monotonic() < until and not interrupted():
            self.poll()
            time.sleep(_POLL_S)
        self.kill()

    def pids(self) -> dict[int, int]:
        """Returns the processes of this machine that are ranks and run."""
        return {rank.rank: rank.pid for rank in self.running if rank.pid is not None}


class ChildRanks(RankGroup):
    """Each rank is a child of this process."""

    def __init__(self, job: Launch, port: int) -> None:
        super().__init__(job, port)
        self._children: dict[int, spawn.Child] = {}  # by rank

    def begin(self, interrupted: Callable[[], bool]) -> None:
        """Starts the ranks one by one."""
        job, size = self.job, self.job.places.num_ranks
        shared = job.environment(os.environ)
        for number in range(size):
            world = World(number, size, number, size, job.places.address, self.port, job.attempt)
            environ, log = shared | world.to_environment(), job.log(number)
            child = spawn.start_logged(f"rank {number}", job.command, environ, log)
            self._children[number] = child
            self.ranks.append(Rank(number, log, child.pid))
            job.note("rank_started", rank=number, pid=child.pid)
            if interrupted():
                return

    def poll(self) -> Sequence[Rank]:
        """Returns the ranks that ended since the last call."""
        options = os.WEXITED | os.WNOHANG | os.WNOWAIT
        ended = []
        for rank in self.running:
            child = self._children[rank.rank]
            with contextlib.suppress(ChildProcessError):  # it was reaped elsewhere: it has ended
                if os.waitid(os.P_PID, child.pid, options) is None:
                    continue
            ended.append(rank)
        seen_s = time.time()  # one time for all: their last lines say which ended first
        for rank in ended:
            # What it started ends with it. It is not reaped yet, so its number still means its
            # group, and no other process.
            self._signal(rank, signal.SIGKILL)
            rank.end(self._children[rank.rank].wait(), seen_s)
        return ended

    def send(self, number: signal.Signals) -> None:
        """Sends a signal: SIGUSR1 and SIGUSR2 to ranks alone, others to all that they started."""
        for rank in self.running:
            self._signal(rank, number)

    def kill(self) -> None:
        """Ends all ranks at once and waits for them."""
        self.send(signal.SIGKILL)
        for rank in self.running:
            rank.end(self._children[rank.rank].wait())

    def _signal(self, rank: Rank, number: signal.Signals) -> None:
        pid = self._children[rank.rank].pid
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, number)
            if number == signal.SIGTERM:
                os.killpg(pid, signal.SIGCONT)  # a stopped process sees no SIGTERM


class CommandRanks(RankGroup):
    """One command starts all ranks, here or on several machines.

    A rank that did not record its end counts as ended by SIGTERM.
    """

    def __init__(self, job: Launch, port: int, starter: Starter) -> None:
        super().__init__(job, port)
        self.ranks = [Rank(rank, job.log(rank)) for rank in range(job.places.num_ranks)]
        self._starter = starter
        self._log = job.folder / file_names.LOGS / file_names.LAUNCHER_LOG
        self._events = LinesTail(job.folder, file_names.EVENTS)
        self._process: spawn.Child | None = None
        self._gone_s: float | None = None  # when the command was seen to have ended
        self._started: dict[int, dict[str, Any]] = {}  # the events of ranks that have begun

    def begin(self, interrupted: Callable[[], bool]) -> None:
        """Starts the command."""
        require_program(self._starter)
        job, words = self.job, self._starter.words
        base = {name: value for name, value in os.environ.items() if not name.startswith(_OUTER)}
        environ = job.environment(base)
        if job.config.comm.uses(MPI):
            environ |= mpi_library.variables(self._starter.dialect, words[0], environ)
        environ[STARTER] = self._starter.dialect
        environ[MEETING] = f"{job.places.address}:{self.port}"
        environ["HIRES_ATTEMPT"] = str(job.attempt)
        command = self._starter.command(environ, job.command)
        # srun ends its ranks at SIGTERM only; those of others end with the command.
        number = signal.SIGTERM if self._starter.dialect == "srun" else signal.SIGKILL
        self._process = spawn.start_logged(
            "the ranks", command, self._starter.environment(environ), self._log, death_signal=number
        )
        facts = {"command": command, "nodes": [*job.places.nodes]}
        job.note("starter_started", pid=self._process.pid, **facts)

    def poll(self) -> Sequence[Rank]:
        """Returns the ranks that ended since the last call."""
        ended = []
        for line in self._events.read():
            number, code = line.get("rank"), line.get("code")
            if not (isinstance(number, int) and 0 <= number < len(self.ranks)):
                continue
            rank = self.ranks[number]
            if line.get("event") == "rank_started":
                self._started[number] = line
                rank.pid = line["pid"] if provenance.lives(line) else None
            elif line.get("event") == "rank_ended" and rank.code is None and isinstance(code, int):
                rank.end(code)
                ended.append(rank)
        lost = self._lost_ranks()
        for rank in lost:
            rank.end(-signal.SIGTERM)
        return ended + lost

    def send(self, number: signal.Signals) -> None:
        """Sends a signal to the command, which passes it on to its ranks."""
        if self._process is not None and self._process.poll() is None:
            os.kill(self._process.pid, number)

    def kill(self) -> None:
        """Ends all ranks and their command, and waits for it."""
        if self._process is None:
            return
        # The command ends after its ranks, by itself.
        wait_s = 0.0 if self.running else END_S
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(wait_s)
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self.poll()  # those that have begun meanwhile
        for line in self._started.values():  # those of this machine whose command did not end them
            if provenance.lives(line):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(line["pid"], signal.SIGKILL)
        for rank in self.running:
            rank.end(-signal.SIGTERM)

    def _lost_ranks(self) -> list[Rank]:
        """Returns the ranks that will never report their end, because the command failed them."""
        if self._process is None or (code := self._process.poll()) is None:
            return []
        left, now_s = self.running, time.monotonic()
        self._gone_s = now_s if self._gone_s is None else self._gone_s
        waited = now_s - self._gone_s >= LOST_S
        # One that was killed is the cause at once: its ranks may end of that within LOST_S.
        if self.broken is None and (code < 0 or (waited and left)):
            how = f"with code {code}" if code >= 0 else f"by {signal.Signals(-code).name}"
            name = Path(self._starter.words[0]).name
            self.broken = f"{name} ended {how} before its ranks{self._complaint()}"
        return left if waited else []

    def _complaint(self) -> str:
        """Returns what the command or its ranks printed, as the end of a sentence."""
        lines = [line.strip() for line in last_lines(self._log, 40) if line.strip("-=* \n")]
        ours = [line.removeprefix("hires: ") for line in lines if line.startswith("hires: ")]
        ends = [line for line in lines if _END.search(line)]
        text = " ".join(ours[:1] or ends[:2] or lines[:4])
        return f": {text}" if text else f"; see {self._log}"


_END = re.compile(r"signal|killed|exit ?code|out of memory|task \d+:", re.IGNORECASE)
"""What commands say of a rank that ended."""


def rank_environment(
    base: Mapping[str, str], config: RunConfig, interface: str | None
) -> dict[str, str]:
    """Returns the environment variables of a rank, but for those of its number.

    What it inherits, ``base``, counts before ``interface`` and ``cluster.environment``, and after
    ``comm.options``. The queues of a GPU are always ours: with fewer than its streams, ranks could
    wait for each other for ever.
    """
    # Under torchrun these make torch expect a store that another process hosts, and none does.
    environ = {k: v for k, v in base.items() if not k.startswith(("TORCHELASTIC_", STARTER))}
    environ |= spawn.thread_variables(config.launcher.threads)
    environ["PYTHONUNBUFFERED"] = "1"  # or the last lines of a killed rank would be lost
    environ.setdefault("PYTHONFAULTHANDLER", "1")
    if interface is not None:
        environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    ours = _gpu_variables(config, interface)
    environ = {**ours, **config.cluster.variables, **environ, **config.library_variables}
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
