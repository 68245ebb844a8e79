"""Starts, watches, signals and ends the ranks of one world.

:class:`SeparateRanks` starts each rank by itself and holds its process. The other kind,
:class:`hires.launcher.ranks.agent_ranks.AgentRanks`, runs one command that starts an agent for
every rank. The supervisor treats both alike.
"""

from __future__ import annotations

import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from hires.launcher.ranks import rank_process
from hires.launcher.ranks.rank_process import Launch, Rank, RankProcess

_POLL_S = 0.02


class RankGroup(ABC):
    """The ranks of one start."""

    ranks: Sequence[Rank]
    """Those that were started, in order."""

    def __init__(self, job: Launch, port: int) -> None:
        """Takes what is to be started, and where the ranks meet."""
        self.job = job
        self.port = port
        self.broken: str | None = None
        """Why the ranks ended though none of them failed, in words, if it is so."""

    @abstractmethod
    def begin(self, hurry: Callable[[], bool]) -> None:
        """Starts the ranks; stops half-way when ``hurry`` returns True.

        Raises:
            RunError: they cannot be started.
        """

    @abstractmethod
    def poll(self) -> Sequence[Rank]:
        """Returns the ranks that ended since the last call, their exit codes filled in."""

    @abstractmethod
    def send(self, number: signal.Signals) -> None:
        """Sends a signal to every rank that runs."""

    @abstractmethod
    def kill(self) -> None:
        """Sends SIGKILL and waits for all ranks; nothing of the start is left then."""

    def stop(self, grace_s: float, hurry: Callable[[], bool]) -> None:
        """Sends SIGTERM, and SIGKILL to the ranks that still run after ``grace_s``.

        SIGKILL follows at once when ``hurry`` returns True.
        """
        self.send(signal.SIGTERM)
        self.wait(grace_s, hurry)
        self.kill()

    def wait(self, most_s: float, hurry: Callable[[], bool] = lambda: False) -> None:
        """Waits until all ranks have ended, at most so long."""
        until = time.monotonic() + most_s
        while time.monotonic() < until and not hurry():
            self.poll()
            if all(rank.code is not None for rank in self.ranks):
                return
            time.sleep(_POLL_S)

    def pids(self) -> dict[int, int]:
        """Returns the processes of this machine that are ranks, or stand for one, and run."""
        return {r.rank: r.pid for r in self.ranks if r.code is None and r.pid is not None}


class SeparateRanks(RankGroup):
    """Each rank is a process of this one, or one that stands for it (``srun``)."""

    def __init__(self, job: Launch, port: int) -> None:
        super().__init__(job, port)
        self.ranks: list[RankProcess] = []

    def begin(self, hurry: Callable[[], bool]) -> None:
        """Starts the ranks one by one, see :class:`RankGroup`."""
        places = self.job.places
        for rank, place in enumerate(places.ranks):
            world = places.world(rank, self.port, self.job.attempt)
            self.ranks.append(RankProcess.start(self.job, world, place.prefix, places.relayed))
            node = {"node": place.node} if place.node else {}
            self.job.note("rank_started", rank=rank, pid=self.ranks[-1].pid, **node)
            if hurry():
                return

    def poll(self) -> Sequence[RankProcess]:
        """Returns the ranks that ended since the last call."""
        return rank_process.poll(self.ranks)

    def send(self, number: signal.Signals) -> None:
        """Sends a signal to every rank that runs."""
        for rank in self.ranks:
            rank.send(number)

    def kill(self) -> None:
        """Ends all ranks at once and waits for them."""
        rank_process.kill(self.ranks)
