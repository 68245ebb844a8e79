"""Runs beside one rank: ``python -m hires.launcher.ranks.agent RUN_DIR ATTEMPT``.

An MPI, ``srun`` or torchrun starts an agent for every rank, on the rank's own machine. The agent
reads its number from the environment, starts the rank, passes the supervisor's signals on, reports
how the rank ended, and kills it when the supervisor is gone
(:mod:`hires.launcher.ranks.control_channel`). It ends only when the supervisor disconnects, so the
program that started the agents never has a reason to end the others on its own.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from hires.core.errors import HiresError, RunError
from hires.core.ranks import world
from hires.core.ranks.mpi_dialects import numbers
from hires.core.store import file_names, provenance, records
from hires.launcher.ranks import control_channel, rank_process
from hires.launcher.ranks.places import RankPlaces
from hires.launcher.ranks.rank_process import Launch, RankProcess

_CONNECT_S = 30.0
"""How long the supervisor may take to answer."""
_FILE_S = 10.0
"""How long its file may take to be seen here."""
_POLL_S = 0.05
_PASSED = (signal.SIGTERM, signal.SIGKILL, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that the supervisor may have sent to the rank."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one rank; returns its exit code."""
    words = sys.argv[1:] if argv is None else list(argv)
    if len(words) != 2 or not words[1].isdecimal():
        sys.stderr.write("usage: python -m hires.launcher.ranks.agent RUN_DIR ATTEMPT\n")
        return 2
    try:
        return Agent(Path(words[0]), int(words[1])).run()
    except HiresError as error:
        sys.stderr.write(f"hires: {error}\n")
        return error.exit_code


class Agent:
    """One rank and its connection to the supervisor."""

    def __init__(self, run_dir: Path, attempt: int) -> None:
        """Reads which rank it is, and connects to the supervisor.

        Raises:
            HiresError: the environment names no rank, or the supervisor does not answer.
        """
        self.run_dir, self.attempt = run_dir, attempt
        facts = control_channel.read(file_names.attempt_dir(run_dir, attempt), _FILE_S)
        self.facts, self.numbers = facts, numbers(facts["starter"], os.environ)
        if self.numbers.size != facts["size"]:
            raise RunError(
                f"{facts['starter']} started {self.numbers.size} processes, but the plan has "
                f"{facts['size']} ranks"
            )
        self._terminations = 0
        self._supervisor = control_channel.connect(facts, self.numbers.rank, _CONNECT_S)

    def run(self) -> int:
        """Runs the rank until it has ended and the supervisor has disconnected."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._count)
        for number in (signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, signal.SIG_IGN)  # the supervisor sends them by its connection
        rank: RankProcess | None = None
        try:
            rank = self._start()
            self._supervisor.send(**provenance.myself() | {"started": rank.pid})
        except HiresError as error:
            self._supervisor.send(failed=str(error))
        while not self._supervisor.closed:
            self._supervisor.wait(_POLL_S)
            for line in self._supervisor.lines():
                if rank is not None and line.get("signal") in _PASSED:
                    rank.send(signal.Signals(line["signal"]))
            if rank is not None and rank_process.poll([rank]):
                self._supervisor.send(code=rank.code)
            if rank is not None and self._terminations:
                rank.send(signal.SIGTERM)
                self._terminations = 0
        if rank is None:
            return 1
        rank_process.kill([rank])
        assert rank.code is not None
        return rank.code if rank.code >= 0 else 128 - rank.code

    def _start(self) -> RankProcess:
        facts = self.facts
        place = RankPlaces((), (facts["port"],), facts["address"], facts["interface"])
        config = records.read_config(self.run_dir)
        job = Launch(self.run_dir, self.attempt, config, facts["module"], facts["args"], place)
        try:
            os.chdir(facts["folder"])  # relative paths of the config count from there
        except OSError as error:
            raise RunError(
                f"{socket.gethostname()} does not see {facts['folder']}: {error.strerror}"
            ) from None
        where = (place.address, facts["port"], self.attempt)
        return RankProcess.start(job, world.World(*self.numbers, *where))

    def _count(self, number: int, frame: FrameType | None) -> None:
        """Counts a signal from the program that started this process; the rank is ended, too."""
        self._terminations += 1


if __name__ == "__main__":
    sys.exit(main())
