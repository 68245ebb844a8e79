"""What does the launcher do between the first rank's start and the last rank's end?

It starts the ranks, passes on what they record, and stops all of them as soon as one fails or
somebody interrupts: a rank that is left alone waits for its dead neighbour for minutes.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hires.core import records
from hires.core.config import RunConfig
from hires.core.errors import RunError
from hires.core.world import World
from hires.launcher import blame, ports, processes, watchdog, whois
from hires.launcher.interrupts import Interrupts
from hires.launcher.memory_end import OomCount
from hires.launcher.progress import MetricsTail

OnLine = Callable[[dict[str, Any]], None]

POLL_S = 0.05
"""How often the ranks are looked at; it costs nothing that a measurement would see."""
SETTLE_S = 0.3
"""How long the other ranks may still report after one failed, so that the cause is among them."""
GRACE_S = 2.0
"""How long ranks may take to end after SIGTERM."""


@dataclass(frozen=True)
class Job:
    """What is to be run."""

    run_dir: Path
    attempt: int
    config: RunConfig
    world: int
    module: str
    """Python module that every rank runs."""
    args: Sequence[str]
    """What follows the run folder on its command line."""
    on_line: OnLine | None
    """Called with every new line of ``metrics.jsonl``."""

    @property
    def folder(self) -> Path:
        """Folder of the attempt."""
        return records.attempt_dir(self.run_dir, self.attempt)


@dataclass
class End:
    """How a world of ranks ended."""

    state: str
    cause: str | None = None
    reason: str | None = None
    """The cause in one word for programs, as ``preempted``; None where there is none."""
    failed_rank: int | None = None
    tail: list[str] = field(default_factory=list)
    exit_codes: dict[int, int] = field(default_factory=dict)
    port_taken: bool = False
    """Whether it failed because somebody else listens at the port."""


class Supervisor:
    """Runs one world of ranks to its end."""

    def __init__(self, job: Job, port: int, interrupts: Interrupts) -> None:
        """Takes the job, the port to meet at, and where interrupts are counted."""
        self.job = job
        self.port = port
        self.interrupts = interrupts
        self.ranks: list[processes.RankProcess] = []
        self._tail = MetricsTail(job.folder / "metrics.jsonl")
        self._watchdog = watchdog.Watchdog(job.folder, job.config.comm.timeout_s)
        self._oom = OomCount()
        self._events_before = len(records.read_lines(job.folder / "events.jsonl"))

    def run(self) -> End:
        """Returns how it ended, when no process of it is left.

        Raises:
            RunError: the ranks cannot be started.
        """
        self._note("launch_started", port=self.port, **whois.myself())
        try:
            for rank in range(self.job.world):
                self._start(rank)
                if self.interrupts.count:
                    break
            end = self._watch()
            self._feed()
        finally:
            processes.kill(self.ranks)
        end.exit_codes = {r.rank: r.code for r in self.ranks if r.code is not None}
        return end

    def _start(self, rank: int) -> None:
        """Starts one rank."""
        job = self.job
        log = job.folder / "logs" / f"rank{rank:04d}.log"
        log.unlink(missing_ok=True)  # of a start whose port was taken
        command = [sys.executable, "-m", job.module, str(job.run_dir), *job.args]
        world = World(
            rank=rank,
            size=job.world,
            local_rank=rank,
            local_size=job.world,
            address=ports.ADDRESS,
            port=self.port,
            attempt=job.attempt,
        )
        environ = rank_environment(os.environ, world, job.config.launcher.threads)
        self.ranks.append(processes.start(rank, command, environ, log))
        self._note("rank_started", rank=rank, pid=self.ranks[-1].process.pid)

    def _watch(self) -> End:
        """Waits until all ranks are done, one fails or somebody interrupts."""
        while True:
            self._poll()
            self._feed()
            if self.interrupts.count:
                return self._cancel()
            if any(rank.code for rank in self.ranks):
                return self._fail()
            if all(rank.code == 0 for rank in self.ranks):
                return End("done")
            if self._watchdog.look({rank.rank for rank in self.ranks if rank.code is not None}):
                return self._hang()
            time.sleep(POLL_S)

    def _cancel(self) -> End:
        """Stops all ranks because somebody interrupted; a second interrupt does not wait."""
        self._note("stopping", why=self.interrupts.name)
        processes.stop(self.ranks, GRACE_S, lambda: self.interrupts.count > 1)
        return End("cancelled", f"stopped by {self.interrupts.name}")

    def _hang(self) -> End:
        """Finds out what the ranks are at, then stops them, because nothing moves any more."""
        pids = {rank.rank: rank.process.pid for rank in self.ranks if rank.code is None}
        job = self.job
        found = watchdog.investigate(
            job.run_dir, job.attempt, pids, lambda: self.interrupts.count > 0
        )
        self._note("stopping", why="hang", cause=found.cause)
        processes.stop(self.ranks, GRACE_S, lambda: self.interrupts.count > 0)
        cause = f"{found.cause}; stopped after comm.timeout_s={job.config.comm.timeout_s:g} s"
        return End("failed", cause, "hang", found.rank)

    def _fail(self) -> End:
        """Stops all ranks because one failed, and finds the one that began it."""
        settled = time.monotonic() + SETTLE_S
        while time.monotonic() < settled and any(rank.code is None for rank in self.ranks):
            time.sleep(POLL_S / 2)
            self._poll()
        failed = [rank.rank for rank in self.ranks if rank.code]
        self._note("stopping", why="a rank failed", failed=failed)
        processes.stop(self.ranks, GRACE_S, lambda: self.interrupts.count > 0)
        events = records.read_lines(self.job.folder / "events.jsonl")[self._events_before :]
        failure = blame.first_failure(self.ranks, failed, events, self._oom.rose())
        self._feed()
        reason = failure.reason or (None if self._tail.seen else "launch")
        port_taken = ports.was_taken(self.ranks[0].log) and not self._tail.seen
        return End(
            "failed", failure.cause, reason, failure.rank, failure.tail, port_taken=port_taken
        )

    def _poll(self) -> None:
        """Notes which ranks have ended."""
        for rank in processes.poll(self.ranks):
            self._note("rank_exited", rank=rank.rank, code=rank.code)

    def _feed(self) -> None:
        """Passes on what the ranks have recorded meanwhile."""
        for line in self._tail.read():
            if self.job.on_line is not None:
                self.job.on_line(line)

    def _note(self, event: str, **fields: Any) -> None:
        """Writes an event down; on a full disk it matters more that the ranks are stopped."""
        with contextlib.suppress(RunError):
            records.event(self.job.run_dir, self.job.attempt, event, **fields)


def rank_environment(base: Mapping[str, str], world: World, threads: int) -> dict[str, str]:
    """Returns the environment of a rank: ``base``, its world, and as many threads as asked."""
    # Under torchrun these tell torch that somebody else hosts the meeting point: nobody would.
    environ = {k: v for k, v in base.items() if not k.startswith("TORCHELASTIC_")}
    environ |= world.to_environment()
    environ |= {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    environ["PYTHONUNBUFFERED"] = "1"  # or the last lines of a killed rank would be lost
    environ.setdefault("PYTHONFAULTHANDLER", "1")
    # Without it gloo asks for this host's name, which may not resolve, or leads to a firewall.
    if any(name == "lo" for _, name in socket.if_nameindex()):
        environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return environ
