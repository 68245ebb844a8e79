"""Starts all ranks with one command, maybe on other machines: both ends of that.

    supervisor ── mpirun | srun | torchrun ──▶ agent of rank 0 ──▶ rank 0
        ▲   ▲        (AgentRanks._process)     └─▶ agent of rank 1 ──▶ rank 1
        │   └── exit code: why no agent comes, if it ends early
        └────── control channel: started, code; signals the other way

``python -m hires.launcher.ranks.agent RUN_DIR ATTEMPT`` is the agent of one rank, on the rank's
machine. It starts the rank, passes signals on, reports how the rank ended, and kills it when the
supervisor is gone. It ends only when its connection does, so the program that started the agents
has no reason to end the others on its own, and a command that has ended before the supervisor
closes the channel has lost its ranks, however they seem to have ended.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hires.core import streams
from hires.core.config.mpi_dialects import DIALECTS
from hires.core.errors import HiresError, RunError
from hires.core.ranks import mpi_library
from hires.core.ranks.mpi_starter import Starter, numbers, require_program
from hires.core.store import file_names, provenance, records, trust
from hires.core.store.reading import text
from hires.launcher.ranks import control_channel, spawn
from hires.launcher.ranks.places import RankPlace, RankPlaces
from hires.launcher.ranks.rank_group import Launch, Rank, RankGroup, SeparateRanks, last_lines
from hires.plan.hardware import MPI

END_S = 5.0
"""How long the command may take to end after its agents."""
START_S = 120.0
"""How long all agents may take to connect, at least; starts over many nodes are slow."""
LOST_S = 1.0
"""How long agents may still report after their command has ended."""
_OUTER = tuple(word for dialect in DIALECTS.values() for word in dialect.outer.split())
"""Variables of an outer start about its own ranks, which would mislead those of this one."""
_CONNECT_S = 30.0
"""How long the supervisor may take to answer."""
_FILE_S = 10.0
"""How long its file may take to be seen here."""
_POLL_S = 0.05


class AgentRanks(RankGroup):
    """One command starts an agent for every rank."""

    def __init__(self, job: Launch, port: int, starter: Starter) -> None:
        super().__init__(job, port)
        self.ranks = [Rank(rank, job.log(rank)) for rank in range(len(job.places.ranks))]
        self._starter = starter
        self._log = job.folder / file_names.LOGS / file_names.LAUNCHER_LOG
        self._channel = control_channel.ControlChannel(job.places.address, len(self.ranks))
        self._process: spawn.Child | None = None
        self._patience_s = max(START_S, job.config.comm.timeout_s)
        self._began_s = time.monotonic()
        self._gone_s: float | None = None  # when the command was seen to have ended
        self._started: set[int] = set()  # ranks, on any machine
        self._note_at = 1  # callers without the key

    def begin(self, hurry: Callable[[], bool]) -> None:
        """Starts the ranks, see :class:`RankGroup`."""
        require_program(self._starter)
        job, places = self.job, self.job.places
        if job.config.comm.uses(MPI):
            environ = {**job.config.cluster.environment, **os.environ}
            mpi_library.require(self._starter.dialect, self._starter.words[0], environ)
        self._channel.write(
            job.folder,
            starter=self._starter.dialect,
            program=self._starter.words[0],
            size=len(self.ranks),
            address=places.address,
            port=self.port,
            interface=places.interface,
            module=job.module,
            args=list(job.args),
            folder=str(Path.cwd()),
        )
        with contextlib.suppress(OSError):  # a start whose port was taken complained, too
            self._log.write_bytes(b"")  # not removed: a launcher of a sweep prints to it
        command = [*self._starter.words, str(job.run_dir), str(job.attempt)]
        own = {name: value for name, value in os.environ.items() if not name.startswith(_OUTER)}
        environ = self._starter.environment(own)
        self._process = spawn.start_logged("the ranks", command, environ, self._log)
        self._began_s = time.monotonic()
        job.note("starter_started", pid=self._process.pid, command=command)

    def poll(self) -> Sequence[Rank]:
        """Returns the ranks that ended since the last call."""
        ended = []
        for number, fields in self._channel.messages():
            rank = self.ranks[number]
            if not _makes_sense(fields):
                self._channel.disconnect(number)  # the next poll sees its end
            elif "started" in fields:
                self._started.add(number)
                pid = fields["started"]
                rank.pid = pid if provenance.is_here(fields) else None
                node = self.job.places.ranks[number].node
                where = {"host": fields.get("host"), **({"node": node} if node else {})}
                self.job.note("rank_started", rank=number, pid=pid, **where)
            elif rank.code is None:
                if "failed" in fields:
                    with contextlib.suppress(OSError), rank.log.open("a", errors="replace") as log:
                        log.write(f"{text(fields['failed'])}\n")
                # An agent whose connection breaks was killed, and its rank with it.
                rank.end(fields.get("code", -signal.SIGKILL))
                ended.append(rank)
        self._note_strangers()
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

    def _note_strangers(self) -> None:
        """Notes callers without the key: at once, and then as often as their number doubles."""
        count = self._channel.num_dropped
        if count >= self._note_at:
            self._note_at = 2 * count
            self.job.note("callers_without_key", count=count, port=self._channel.port)

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


def _makes_sense(fields: dict[str, Any]) -> bool:
    """Whether a line of an agent, or ``{}`` of one that is gone, holds what an agent sends."""
    pid, code = fields.get("started", 1), fields.get("code", 0)
    words = (fields.get("failed", ""), fields.get("host", ""))
    return (
        all(isinstance(word, str) for word in words)
        and type(pid) is type(code) is int
        and 0 < pid < 2**31
        and -signal.NSIG < code < 256
    )


def main() -> int:
    """Runs one rank; returns its exit code."""
    try:
        return run(Path(sys.argv[1]), int(sys.argv[2]))
    except HiresError as error:
        sys.stderr.write(f"hires: {error}\n")
        return error.exit_code


def run(run_dir: Path, attempt: int) -> int:
    """Runs the rank until it and the connection to the supervisor have ended; returns its code."""
    trust.refuse_untrusted(run_dir)
    trust.keep_folders_private()
    facts = control_channel.read(file_names.attempt_dir(run_dir, attempt), _FILE_S)
    own = numbers(facts["starter"], os.environ)
    if own.size != facts["size"]:
        raise RunError(
            f"{facts['starter']} started {own.size} processes, but the plan has "
            f"{facts['size']} ranks"
        )
    supervisor = control_channel.connect(facts, own.rank, _CONNECT_S)
    # The program that started this process may end it; the rank ends, and this process stays.
    terminations: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda number, _: terminations.append(number))
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # the supervisor sends them by its connection
    places = RankPlaces((), (facts["port"],), facts["address"], facts["interface"])
    try:
        config = records.read_config(run_dir)
        job = Launch(run_dir, attempt, config, facts["module"], facts["args"], places)
        files: list[int] = []
        if config.comm.uses(MPI):  # the rank is what its starter expects this process to be
            environ = {**config.cluster.environment, **os.environ}
            os.environ |= mpi_library.variables(facts["starter"], facts["program"], environ)
            files = mpi_library.inherited_files(os.environ)
        group = SeparateRanks(job, facts["port"], files)  # of one rank
        os.chdir(facts["folder"])  # relative paths of the config count from there
        rank = group.start(own.rank, own.size, RankPlace(own.local_rank, own.local_size))
        supervisor.send(**provenance.myself() | {"started": rank.pid})
    except (HiresError, OSError) as error:
        # It may not see the folder of the logs.
        why = " ".join(str(error).split())  # one line: the last one of a log is quoted
        supervisor.send(code=1, failed=f"{socket.gethostname()} cannot start it: {why}")
        while not supervisor.closed:
            supervisor.wait(_POLL_S)
            list(supervisor.lines())
        return 1
    while not supervisor.closed:
        supervisor.wait(_POLL_S)
        for line in supervisor.lines():
            with contextlib.suppress(ValueError):  # of no signal
                group.send(signal.Signals(line.get("signal", 0)))
        for rank in group.poll():
            supervisor.send(code=rank.code)
        if terminations:
            group.send(signal.SIGTERM)
            terminations.clear()
    group.kill()
    code = group.ranks[0].code
    assert code is not None
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    streams.secure()
    sys.exit(main())
