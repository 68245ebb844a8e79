"""Starts, watches, signals and ends the ranks of one world.

:class:`SeparateRanks` starts each rank by itself and holds its process. The other kind,
:class:`hires.launcher.ranks.agent_ranks.AgentRanks`, runs one command that starts an agent for
every rank. The supervisor treats both alike.
"""

from __future__ import annotations

import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hires.core.config.run_config import RunConfig
from hires.core.store import file_names
from hires.launcher.ranks import processes
from hires.launcher.ranks.places import RankPlaces, rank_environment
from hires.launcher.ranks.processes import RankProcess


@dataclass(frozen=True)
class GroupStart:
    """What is to be started."""

    run_dir: Path
    attempt: int
    folder: Path
    """Of the attempt."""
    config: RunConfig
    module: str
    """Python module that every rank runs."""
    args: Sequence[str]
    """What follows the run folder on its command line."""
    places: RankPlaces
    port: int
    """Where the ranks meet."""
    note: Callable[..., None]
    """Writes an event to ``events.jsonl``."""

    def log(self, rank: int) -> Path:
        """Returns the log of a rank."""
        return file_names.rank_log(self.folder, rank)


@dataclass
class AgentRank:
    """A rank beside an agent, and what is known about its end."""

    rank: int
    log: Path
    pid: int | None = None
    """Its process, if it is one of this machine."""
    code: int | None = None
    """Exit code, negative for a signal; None while it runs."""
    ended_s: float = 0.0
    """When its end was seen, in seconds since the epoch."""


class RankGroup(ABC):
    """The ranks of one start."""

    def __init__(self, start: GroupStart) -> None:
        """Takes what is to be started."""
        self.job = start
        self.broken: str | None = None
        """Why the ranks ended though none of them failed, in words, if it is so."""

    @property
    @abstractmethod
    def ranks(self) -> Sequence[AgentRank | RankProcess]:
        """What is known of each rank that was started, in order."""

    @abstractmethod
    def begin(self, hurry: Callable[[], bool]) -> None:
        """Starts the ranks; stops half-way when ``hurry`` returns True.

        Raises:
            RunError: they cannot be started.
        """

    @abstractmethod
    def poll(self) -> Sequence[AgentRank | RankProcess]:
        """Returns the ranks that ended since the last call, their exit codes filled in."""

    @abstractmethod
    def pids(self) -> dict[int, int]:
        """Returns the processes of this machine that are ranks, or stand for one, and run."""

    @abstractmethod
    def preempt(self) -> None:
        """Sends SIGUSR2: the ranks save their state and end."""

    @abstractmethod
    def stop(self, grace_s: float, hurry: Callable[[], bool]) -> None:
        """Sends SIGTERM, and SIGKILL to the ranks that still run after ``grace_s``.

        SIGKILL follows at once when ``hurry`` returns True.
        """

    @abstractmethod
    def kill(self) -> None:
        """Sends SIGKILL and waits for all ranks; nothing of the start is left then."""


class SeparateRanks(RankGroup):
    """Each rank is a process of this one, or one that stands for it (``srun``)."""

    def __init__(self, start: GroupStart) -> None:
        super().__init__(start)
        self._ranks: list[RankProcess] = []

    @property
    def ranks(self) -> Sequence[RankProcess]:
        """What is known of each rank, in order."""
        return self._ranks

    def begin(self, hurry: Callable[[], bool]) -> None:
        """Starts the ranks, see :class:`RankGroup`."""
        for rank in range(len(self.job.places.ranks)):
            self._start(rank)
            if hurry():
                return

    def poll(self) -> Sequence[RankProcess]:
        """Returns the ranks that ended since the last call."""
        return processes.poll(self._ranks)

    def pids(self) -> dict[int, int]:
        """Returns the processes of the ranks that run."""
        return {rank.rank: rank.process.pid for rank in self._ranks if rank.code is None}

    def preempt(self) -> None:
        """Sends SIGUSR2 to the ranks."""
        processes.ask(self._ranks)

    def stop(self, grace_s: float, hurry: Callable[[], bool]) -> None:
        """Ends all ranks, see :class:`RankGroup`."""
        processes.stop(self._ranks, grace_s, hurry)

    def kill(self) -> None:
        """Ends all ranks at once and waits for them."""
        processes.kill(self._ranks)

    def _start(self, rank: int) -> None:
        job, places = self.job, self.job.places
        log = job.log(rank)
        log.unlink(missing_ok=True)  # of a start whose port was taken
        words = [sys.executable, "-m", job.module, str(job.run_dir), *job.args]
        environ = rank_environment(
            os.environ,
            places.world(rank, job.port, job.attempt),
            job.config.launcher.threads,
            places.interface,
            job.config.cluster.environment,
        )
        command = [*places.ranks[rank].prefix, *words]
        self._ranks.append(processes.start(rank, command, environ, log, places.relayed))
        node = {"node": places.ranks[rank].node} if places.ranks[rank].node else {}
        job.note("rank_started", rank=rank, pid=self._ranks[-1].process.pid, **node)
