"""Starts all ranks with one command, maybe on other machines, and watches them through agents."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hires.core.errors import RunError
from hires.core.ranks.mpi_dialects import Starter, require_program
from hires.core.store import file_names, provenance
from hires.core.store.files import cannot_write
from hires.launcher.ranks import control_channel, processes, spawn
from hires.launcher.ranks.control_channel import ControlChannel
from hires.launcher.ranks.rank_group import AgentRank, GroupStart, RankGroup

LOG = file_names.LAUNCHER_LOG
"""Output of the command that starts the ranks, among the logs."""
END_S = 5.0
"""How long that command may take to end after its agents."""
START_S = 120.0
"""How long all agents may take to connect, at least; starts over many nodes are slow."""
LOST_S = 1.0
"""How long agents may still report after their starter has ended."""
_POLL_S = 0.02
_OUTER = ("TORCHELASTIC_", "OMPI_COMM_WORLD_", "OMPI_UNIVERSE_", "PMI_", "PMIX_", "MV2_COMM_")
"""Variables of an outer start about its own ranks, which would mislead those of this one."""


class AgentRanks(RankGroup):
    """One command starts an agent for every rank; see :mod:`hires.launcher.ranks.agent`."""

    def __init__(self, start: GroupStart, starter: Starter) -> None:
        """Takes what is to be started, and the command."""
        super().__init__(start)
        size = len(start.places.ranks)
        self._ranks = [AgentRank(rank, start.log(rank)) for rank in range(size)]
        self._starter = starter
        self._name = Path(starter.words[0]).name
        self._log = start.folder / file_names.LOGS / LOG
        self._channel = ControlChannel(start.places.address, size)
        self._process: subprocess.Popen[bytes] | None = None
        self._patience_s = max(START_S, start.config.comm.timeout_s)
        self._began_s = time.monotonic()
        self._gone_s: float | None = None  # when the command was seen to have ended
        self._here: set[int] = set()

    @property
    def ranks(self) -> Sequence[AgentRank]:
        """What is known of each rank, in order."""
        return self._ranks

    def begin(self, hurry: Callable[[], bool]) -> None:
        """Starts the ranks, see :class:`RankGroup`."""
        require_program(self._starter)
        job, places = self.job, self.job.places
        self._channel.write(
            job.folder,
            starter=self._starter.dialect,
            size=len(self._ranks),
            address=places.address,
            port=job.port,
            interface=places.interface,
            module=job.module,
            args=list(job.args),
            folder=str(Path.cwd()),
        )
        command = [*self._starter.words, str(job.run_dir), str(job.attempt)]
        own = {name: value for name, value in os.environ.items() if not name.startswith(_OUTER)}
        self._process = _run(command, self._starter.environment(own), self._log)
        self._began_s = time.monotonic()
        job.note("starter_started", pid=self._process.pid, command=command)

    def poll(self) -> Sequence[AgentRank]:
        """Returns the ranks that ended since the last call."""
        messages = self._channel.messages()
        ended = [self._ranks[one.rank] for one in messages if self._take(one.rank, one.fields)]
        return ended + self._unreachable()

    def pids(self) -> dict[int, int]:
        """Returns the ranks' processes that run on this machine."""
        return {
            rank.rank: rank.pid
            for rank in self._ranks
            if rank.code is None and rank.rank in self._here and rank.pid is not None
        }

    def preempt(self) -> None:
        """Sends SIGUSR2 to the ranks."""
        self._signal(signal.SIGUSR2)

    def stop(self, grace_s: float, hurry: Callable[[], bool]) -> None:
        """Ends all ranks, see :class:`RankGroup`."""
        self._signal(signal.SIGTERM)
        self._wait(grace_s, hurry)
        self.kill()

    def kill(self) -> None:
        """Ends all ranks at once and waits for them."""
        self._signal(signal.SIGKILL)
        if self._process is not None and self._process.poll() is None:
            self._wait(LOST_S, lambda: False)
        self._channel.close()
        for rank in self._ranks:
            if rank.code is None:  # its agent kills it, now that the channel is closed
                _end(rank, -signal.SIGKILL)
        if self._process is not None:
            _end_process(self._process)
        with contextlib.suppress(OSError):
            (self.job.folder / control_channel.FILE).unlink(missing_ok=True)

    def _signal(self, number: signal.Signals) -> None:
        for rank in self._ranks:
            if rank.code is None:
                self._channel.send(rank.rank, number)

    def _wait(self, most_s: float, hurry: Callable[[], bool]) -> None:
        """Waits until all ranks have ended, at most so long."""
        until = time.monotonic() + most_s
        while time.monotonic() < until and not hurry():
            self.poll()
            if all(rank.code is not None for rank in self._ranks):
                return
            time.sleep(_POLL_S)

    def _take(self, number: int, fields: dict[str, Any]) -> bool:
        """Takes a message of an agent; returns whether its rank has ended."""
        rank = self._ranks[number]
        if "started" in fields:
            rank.pid = int(fields["started"])
            if provenance.is_here(fields):
                self._here.add(number)
            node = self.job.places.ranks[number].node
            where = {"host": fields.get("host"), **({"node": node} if node else {})}
            self.job.note("rank_started", rank=number, pid=rank.pid, **where)
            return False
        if rank.code is not None:
            return False
        if "failed" in fields:
            with contextlib.suppress(OSError), rank.log.open("a", encoding="utf-8") as file:
                file.write(f"{fields['failed']}\n")
        # An agent whose connection breaks was killed, and its rank with it.
        lost = 1 if "failed" in fields else -signal.SIGKILL
        _end(rank, int(fields.get("code", lost)))
        return True

    def _unreachable(self) -> list[AgentRank]:
        """Returns the ranks that can be waited for no more, because of what started them."""
        left = [rank for rank in self._ranks if rank.code is None]
        if self._process is None:
            return []
        now_s, code = time.monotonic(), self._process.poll()
        if code is not None:
            self._gone_s = now_s if self._gone_s is None else self._gone_s
            waited = now_s - self._gone_s >= LOST_S
            # One that was killed is the cause at once: its ranks may end of that within LOST_S.
            if self.broken is None and (code < 0 or (waited and left)):
                how = f"with code {code}" if code >= 0 else f"by {signal.Signals(-code).name}"
                self.broken = f"{self._name} ended {how} before its ranks{self._complaint()}"
            if not waited:
                return []
        elif (
            self.broken is None
            and any(rank.pid is None for rank in left)
            and now_s - self._began_s > self._patience_s
        ):
            late = ", ".join(str(rank.rank) for rank in left if rank.pid is None)
            what = f"{self._name} did not start rank {late}"
            self.broken = f"{what} within {self._patience_s:g} s{self._complaint()}"
        else:
            return []
        for rank in left:
            _end(rank, -signal.SIGKILL)
        return left

    def _complaint(self) -> str:
        """Returns what the command or its agents printed, as the end of a sentence."""
        lines = [text.strip() for text in processes.last_lines(self._log)]
        lines = [text for text in lines if text.strip("-= ")]
        ours = [text.removeprefix("hires: ") for text in lines if text.startswith("hires: ")]
        text = ours[0] if ours else " ".join(lines[:4])
        return f": {text}" if text else f"; see {self._log}"


def _run(command: Sequence[str], environ: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
    """Runs the command that starts the ranks, its output going to ``log``."""
    try:
        output = log.open("wb")
    except OSError as error:
        raise cannot_write(log, error) from error
    with output:
        try:
            return subprocess.Popen(
                command,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=spawn.die_with(os.getpid()),
            )
        except (OSError, subprocess.SubprocessError) as error:
            raise RunError(f"cannot start the ranks with {command[0]}: {error}") from error


def _end(rank: AgentRank, code: int) -> None:
    rank.code, rank.ended_s = code, time.time()


def _end_process(process: subprocess.Popen[bytes]) -> None:
    """Waits for the command, which gets SIGTERM and then SIGKILL if it stays."""
    for number in (None, signal.SIGTERM, signal.SIGKILL):
        if number is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_S if number is None else 2.0)
            return
