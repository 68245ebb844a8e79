"""Starts, signals and ends the process of one rank.

Every rank leads a session and process group of its own: SIGTERM and SIGKILL reach whatever it
started too, and Ctrl-C in the terminal reaches only the supervisor, which decides. On Linux the
kernel kills a rank whose supervisor dies, even by ``kill -9``; it watches the *thread* that started
the rank, so the thread that calls :meth:`RankProcess.start` must live as long as the rank.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hires.core.config.run_config import RunConfig
from hires.core.errors import RunError
from hires.core.ranks.world import World
from hires.core.store import file_names, records
from hires.core.store.files import cannot_write
from hires.launcher.interface import OnLine
from hires.launcher.ranks import spawn
from hires.launcher.ranks.places import RankPlaces


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
    """Where the ranks run."""
    on_line: OnLine | None = None
    """Called with every new line of ``metrics.jsonl``."""

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


class RankProcess(Rank):
    """A rank that is a child of this process, or for which a child stands, as ``srun``."""

    def __init__(self, rank: int, log: Path, process: spawn.Child, relayed: bool) -> None:
        """Takes the rank's number and log, its process, and whether that relays to the rank."""
        super().__init__(rank, log, process.pid)
        self._process = process
        self._relayed = relayed

    @classmethod
    def start(
        cls, job: Launch, world: World, prefix: Sequence[str] = (), relayed: bool = False
    ) -> RankProcess:
        """Starts a rank, its output going to its log.

        Args:
            job: what is started.
            world: which rank it is.
            prefix: words before its own command.
            relayed: whether these start a program that passes signals and the rank's end on.

        Raises:
            RunError: the log cannot be written or the process cannot be started.
        """
        log = job.log(world.rank)
        command = [*prefix, sys.executable, "-m", job.module, str(job.run_dir), *job.args]
        launcher, site = job.config.launcher, job.config.cluster.environment
        environ = rank_environment(os.environ, world, launcher.threads, job.places.interface, site)
        try:
            log.unlink(missing_ok=True)  # of a start whose port was taken
            output = log.open("ab")
        except OSError as error:
            raise cannot_write(log, error) from error
        with output:
            file = output.fileno()
            try:
                process = spawn.start(command, environ, stdout=file, stderr=file, hold=not relayed)
            except (OSError, subprocess.SubprocessError) as error:
                why = f"cannot start rank {world.rank} with {command[0]}: {error}"
                raise RunError(why) from error
        return cls(world.rank, log, process, relayed)

    def send(self, number: signal.Signals) -> None:
        """Sends a signal: SIGUSR1 and SIGUSR2 to the rank alone, others to all that it started."""
        if self.code is not None:
            return
        # srun gets all of them alone: a child in its group ends the rank if srun is killed.
        alone = self._relayed or number in (signal.SIGUSR1, signal.SIGUSR2)
        kill = os.kill if alone else os.killpg
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(self._process.pid, number)
            if number == signal.SIGTERM:
                kill(self._process.pid, signal.SIGCONT)  # a stopped process sees no SIGTERM

    def wait(self, seen_s: float | None = None) -> None:
        """Waits until the process has ended, and keeps the rank's exit code."""
        code = self._process.wait()
        self.end(128 - code if self._relayed and code > 128 else code, seen_s)

    def has_ended(self) -> bool:
        """Whether the process has ended; it is not reaped."""
        options = os.WEXITED | os.WNOHANG | os.WNOWAIT
        try:
            return os.waitid(os.P_PID, self._process.pid, options) is not None
        except ChildProcessError:  # it was reaped elsewhere
            return True


def poll(ranks: Iterable[RankProcess]) -> list[RankProcess]:
    """Returns the ranks that ended since the last call, their exit codes filled in."""
    ended = [rank for rank in ranks if rank.code is None and rank.has_ended()]
    seen_s = time.time()
    for rank in ended:
        # What it started ends with it. It is not reaped yet, so its number still means its group.
        rank.send(signal.SIGKILL)
        rank.wait(seen_s)
    return ended


def kill(ranks: Sequence[RankProcess]) -> None:
    """Ends all ranks at once and waits for them."""
    for rank in ranks:
        rank.send(signal.SIGKILL)
    for rank in ranks:
        if rank.code is None:
            rank.wait()


def last_lines(log: Path, count: int = 20) -> list[str]:
    """Returns the last lines of a log, without reading all of it."""
    try:
        with log.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - 200 * count))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    return text.rstrip().splitlines()[-count:]


def rank_environment(
    base: Mapping[str, str],
    world: World,
    threads: int,
    interface: str | None,
    site: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Returns the environment variables of a rank.

    Args:
        base: what it inherits.
        world: which rank it is.
        threads: its compute threads.
        interface: network interface of its messages, unless ``base`` names one; None: any.
        site: variables of the cluster's file, for those that ``base`` does not name.
    """
    # Under torchrun these make torch expect a store that another process hosts, and none does.
    environ = {k: v for k, v in base.items() if not k.startswith("TORCHELASTIC_")}
    environ |= world.to_environment() | spawn.thread_variables(threads)
    environ["PYTHONUNBUFFERED"] = "1"  # or the last lines of a killed rank would be lost
    environ.setdefault("PYTHONFAULTHANDLER", "1")
    if interface is not None:
        environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    return {**(site or {}), **environ}
