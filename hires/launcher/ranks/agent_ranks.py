"""How are ranks started by one command, maybe on other machines, and looked at through agents?"""

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
from hires.core.store import file_names
from hires.core.store.files import cannot_write
from hires.launcher.ranks import control_channel, processes, spawn
from hires.launcher.ranks.rank_group import Crew, Member, Start
from hires.launcher.status import process_id

LOG = file_names.LAUNCHER_LOG
"""What the command that starts the ranks says, among the logs."""
END_S = 5.0
"""How long that command may take to end after its agents."""
START_S = 120.0
"""How long all agents may take to call, at least; starts over many nodes are slow."""
LOST_S = 1.0
"""How long agents may still report after their starter has ended."""
_POLL_S = 0.02


class Together(Crew):
    """One command starts an agent for every rank; see :mod:`hires.launcher.ranks.agent`."""

    def __init__(self, start: Start, starter: Starter) -> None:
        """Takes what is to be started, and the command."""
        super().__init__(start)
        size = len(start.places.ranks)
        self._members = [Member(rank, self.log(rank)) for rank in range(size)]
        self._starter = starter
        self._line = control_channel.Line(start.places.address, size)
        self._process: subprocess.Popen[bytes] | None = None
        self._began_s = time.monotonic()
        self._gone_s: float | None = None
        self._here: set[int] = set()

    @property
    def ranks(self) -> Sequence[Member]:
        """What is known of each rank, in order."""
        return self._members

    def begin(self, hurry: Callable[[], bool]) -> None:
        """Starts the ranks, see :class:`Crew`."""
        require_program(self._starter)
        job, places = self.job, self.job.places
        self._line.write(
            job.folder,
            starter=self._starter.dialect,
            size=len(self._members),
            address=places.address,
            port=job.port,
            interface=places.interface,
            module=job.module,
            args=list(job.args),
            folder=str(Path.cwd()),
        )
        command = [*self._starter.words, str(job.run_dir), str(job.attempt)]
        self._process = _run(command, self._starter.environment(_own(os.environ)), self._log)
        self._began_s = time.monotonic()
        job.note("starter_started", pid=self._process.pid, command=command)

    def poll(self) -> Sequence[Member]:
        """Returns the ranks that ended since the last call."""
        found = []
        for message in self._line.messages():
            member = self._members[message.rank]
            if self._hear(member, message.fields):
                found.append(member)
        return found + self._unheard()

    def pids(self) -> dict[int, int]:
        """Returns the processes of this machine that are ranks, or stand for one, and run."""
        members = (m for m in self._members if m.code is None and m.rank in self._here)
        return {member.rank: member.pid for member in members if member.pid is not None}

    def ask(self) -> None:
        """Asks the ranks to save their state and end."""
        self._tell(signal.SIGUSR2)

    def stop(self, grace_s: float, hurry: Callable[[], bool]) -> None:
        """Ends all ranks, those that are slow by SIGKILL."""
        self._tell(signal.SIGTERM)
        self._wait(grace_s, hurry)
        self.kill()

    def kill(self) -> None:
        """Ends all ranks at once and waits for them."""
        self._tell(signal.SIGKILL)
        if self._process is not None and self._process.poll() is None:
            self._wait(LOST_S, lambda: False)
        self._line.close()
        for member in self._members:
            if member.code is None:  # its agent kills it, now that the line is closed
                _end(member, -signal.SIGKILL)
        if self._process is not None:
            _end_process(self._process)
        with contextlib.suppress(OSError):
            (self.job.folder / control_channel.FILE).unlink(missing_ok=True)

    @property
    def _log(self) -> Path:
        """What the command says."""
        return self.job.folder / file_names.LOGS / LOG

    def _tell(self, number: signal.Signals) -> None:
        """Has all ranks that run sent a signal."""
        for member in self._members:
            if member.code is None:
                self._line.tell(member.rank, number)

    def _wait(self, most_s: float, hurry: Callable[[], bool]) -> None:
        """Waits until all ranks have ended, at most so long."""
        until = time.monotonic() + most_s
        while time.monotonic() < until and not hurry():
            self.poll()
            if all(member.code is not None for member in self._members):
                return
            time.sleep(_POLL_S)

    def _hear(self, member: Member, said: dict[str, Any]) -> bool:
        """Takes what an agent said; returns whether its rank has ended."""
        if "started" in said:
            member.pid = int(said["started"])
            if process_id.is_here(said):
                self._here.add(member.rank)
            node = self.job.places.ranks[member.rank].node
            where = {"host": said.get("host"), **({"node": node} if node else {})}
            self.job.note("rank_started", rank=member.rank, pid=member.pid, **where)
            return False
        if member.code is not None:
            return False
        if "failed" in said:
            with contextlib.suppress(OSError), member.log.open("a", encoding="utf-8") as file:
                file.write(f"{said['failed']}\n")
        # An agent whose connection breaks was killed, and its rank with it.
        lost = 1 if "failed" in said else -signal.SIGKILL
        _end(member, int(said.get("code", lost)))
        return True

    def _unheard(self) -> list[Member]:
        """Returns the ranks that can be waited for no more, because of what started them."""
        left = [member for member in self._members if member.code is None]
        if self.broken is not None or not left or self._process is None:
            return []
        now_s, code = time.monotonic(), self._process.poll()
        if code is not None:
            self._gone_s = now_s if self._gone_s is None else self._gone_s
            if now_s - self._gone_s < LOST_S:
                return []
            self.broken = self._why_gone(code)
        elif any(m.pid is None for m in left) and now_s - self._began_s > self._patience_s:
            late = ", ".join(str(m.rank) for m in left if m.pid is None)
            what = f"{self._name} did not start rank {late}"
            self.broken = f"{what} within {self._patience_s:g} s{self._said()}"
        else:
            return []
        for member in left:
            _end(member, -signal.SIGKILL)
        return left

    @property
    def _name(self) -> str:
        """The program that starts the ranks."""
        return Path(self._starter.words[0]).name

    @property
    def _patience_s(self) -> float:
        """How long all ranks may take to start."""
        return max(START_S, self.job.config.comm.timeout_s)

    def _why_gone(self, code: int) -> str:
        """Returns why there are no ranks any more."""
        how = f"with code {code}" if code >= 0 else f"by {signal.Signals(-code).name}"
        return f"{self._name} ended {how} before its ranks{self._said()}"

    def _said(self) -> str:
        """Returns what the command or its agents complained about, as the end of a sentence."""
        told = [text.strip() for text in processes.last_lines(self._log)]
        told = [text for text in told if text.strip("-= ")]
        ours = [text.removeprefix("hires: ") for text in told if text.startswith("hires: ")]
        first = (ours or told)[:1] if ours else [" ".join(told[:4])]
        return f": {first[0]}" if first[0] else f"; see {self._log}"


def _own(base: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment without what an outer start told about its own ranks."""
    return {name: value for name, value in base.items() if not name.startswith(_OUTER)}


_OUTER = ("TORCHELASTIC_", "OMPI_COMM_WORLD_", "OMPI_UNIVERSE_", "PMI_", "PMIX_", "MV2_COMM_")


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


def _end(member: Member, code: int) -> None:
    """Notes how a rank ended."""
    member.code, member.ended_s = code, time.time()


def _end_process(process: subprocess.Popen[bytes]) -> None:
    """Returns when the command is gone: by itself, told to, or killed with what it started."""
    for number in (None, signal.SIGTERM, signal.SIGKILL):
        if number is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_S if number is None else 2.0)
            return
