"""Starts all ranks with one command, maybe on other machines, and watches them through agents.

    supervisor ── mpirun | srun | torchrun ──▶ agent of rank 0 ──▶ rank 0
        ▲   ▲        (self._process)       └─▶ agent of rank 1 ──▶ rank 1
        │   └── exit code: why no agent comes, if it ends early
        └────── control channel: started, code; signals the other way

An agent ends only when its connection does. So a command that has ended before the supervisor
closes the channel has lost its ranks, however they seem to have ended.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hires.core.ranks.mpi_dialects import Starter, require_program
from hires.core.store import file_names, provenance
from hires.launcher.ranks import spawn
from hires.launcher.ranks.control_channel import ControlChannel
from hires.launcher.ranks.rank_group import Launch, Rank, RankGroup, last_lines

END_S = 5.0
"""How long the command may take to end after its agents."""
START_S = 120.0
"""How long all agents may take to connect, at least; starts over many nodes are slow."""
LOST_S = 1.0
"""How long agents may still report after their command has ended."""
_OUTER = ("TORCHELASTIC_", "OMPI_COMM_WORLD_", "OMPI_UNIVERSE_", "PMI_", "PMIX_", "MV2_COMM_")
"""Variables of an outer start about its own ranks, which would mislead those of this one."""


class AgentRanks(RankGroup):
    """One command starts an agent for every rank; see :mod:`hires.launcher.ranks.agent`."""

    def __init__(self, job: Launch, port: int, starter: Starter) -> None:
        super().__init__(job, port)
        self.ranks = [Rank(rank, job.log(rank)) for rank in range(len(job.places.ranks))]
        self._starter = starter
        self._log = job.folder / file_names.LOGS / file_names.LAUNCHER_LOG
        self._channel = ControlChannel(job.places.address, len(self.ranks))
        self._process: spawn.Child | None = None
        self._patience_s = max(START_S, job.config.comm.timeout_s)
        self._began_s = time.monotonic()
        self._gone_s: float | None = None  # when the command was seen to have ended
        self._started: set[int] = set()  # ranks, on any machine

    def begin(self, hurry: Callable[[], bool]) -> None:
        """Starts the ranks, see :class:`RankGroup`."""
        require_program(self._starter)
        job, places = self.job, self.job.places
        self._channel.write(
            job.folder,
            starter=self._starter.dialect,
            size=len(self.ranks),
            address=places.address,
            port=self.port,
            interface=places.interface,
            module=job.module,
            args=list(job.args),
            folder=str(Path.cwd()),
        )
        command = [*self._starter.words, str(job.run_dir), str(job.attempt)]
        own = {name: value for name, value in os.environ.items() if not name.startswith(_OUTER)}
        environ = self._starter.environment(own)
        self._process = spawn.start_logged("the ranks", command, environ, self._log)
        self._began_s = time.monotonic()
        job.note("starter_started", pid=self._process.pid, command=command)

    def poll(self) -> Sequence[Rank]:
        """Returns the ranks that ended since the last call."""
        messages = self._channel.messages()
        ended = [self.ranks[rank] for rank, fields in messages if self._take(rank, fields)]
        lost = self._lost_ranks()
        for rank in lost:
            rank.end(-signal.SIGKILL)
        return ended + lost

    def send(self, number: signal.Signals) -> None:
        """Sends a signal to every rank that runs."""
        for rank in self.running:
            self._channel.send(rank.rank, number)

    def kill(self) -> None:
        """Ends all ranks at once and waits for them."""
        self.send(signal.SIGKILL)
        if self._process is not None and self._process.poll() is None:
            self.wait(LOST_S)
        self._channel.close()
        for rank in self.running:  # its agent kills it, now that the channel is closed
            rank.end(-signal.SIGKILL)
        # The command ends after its agents, by itself; SIGTERM and SIGKILL follow if it stays.
        for number, most_s in ((None, END_S), (signal.SIGTERM, 2.0), (signal.SIGKILL, 2.0)):
            if self._process is None or self._process.poll() is not None:
                break
            with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                if number is not None:
                    os.killpg(self._process.pid, number)
                self._process.wait(most_s)
        with contextlib.suppress(OSError):
            (self.job.folder / file_names.CONTROL).unlink(missing_ok=True)

    def _take(self, number: int, fields: dict[str, Any]) -> bool:
        """Takes a message of an agent; returns whether its rank has ended."""
        rank = self.ranks[number]
        if "started" in fields:
            self._started.add(number)
            pid = int(fields["started"])
            rank.pid = pid if provenance.is_here(fields) else None
            node = self.job.places.ranks[number].node
            where = {"host": fields.get("host"), **({"node": node} if node else {})}
            self.job.note("rank_started", rank=number, pid=pid, **where)
            return False
        if rank.code is not None:
            return False
        # An agent whose connection breaks was killed, and its rank with it.
        rank.end(int(fields.get("code", -signal.SIGKILL)))
        return True

    def _lost_ranks(self) -> list[Rank]:
        """Returns the ranks that will never report their end, because the command failed them."""
        if self._process is None:
            return []
        left = self.running
        name = Path(self._starter.words[0]).name
        now_s, code = time.monotonic(), self._process.poll()
        if code is None:
            late = [str(rank.rank) for rank in left if rank.rank not in self._started]
            if self.broken or not late or now_s - self._began_s <= self._patience_s:
                return []
            what = f"{name} did not start rank {', '.join(late)} within {self._patience_s:g} s"
            self.broken = what + self._complaint()
            return left
        self._gone_s = now_s if self._gone_s is None else self._gone_s
        waited = now_s - self._gone_s >= LOST_S
        # One that was killed is the cause at once: its ranks may end of that within LOST_S.
        if self.broken is None and (code < 0 or (waited and left)):
            how = f"with code {code}" if code >= 0 else f"by {signal.Signals(-code).name}"
            self.broken = f"{name} ended {how} before its ranks{self._complaint()}"
        return left if waited else []

    def _complaint(self) -> str:
        """Returns what the command or its agents printed, as the end of a sentence."""
        lines = [text.strip() for text in last_lines(self._log)]
        lines = [text for text in lines if text.strip("-= ")]
        ours = [text.removeprefix("hires: ") for text in lines if text.startswith("hires: ")]
        text = ours[0] if ours else " ".join(lines[:4])
        return f": {text}" if text else f"; see {self._log}"
