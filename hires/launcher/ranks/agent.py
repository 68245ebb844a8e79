"""Runs beside one rank: ``python -m hires.launcher.ranks.agent RUN_DIR ATTEMPT``.

An MPI, ``srun`` or torchrun starts an agent for every rank, on the rank's own machine. The agent
finds out which rank that is, starts it, passes signals of the supervisor on, reports how the rank
ended, and kills it when the supervisor is gone (:mod:`hires.launcher.ranks.control_channel`). It
ends only when the supervisor disconnects, so the program that started the agents never has a reason
to end the others on its own.
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
from hires.core.store import file_names, provenance, records
from hires.launcher.ranks import control_channel, processes
from hires.launcher.ranks.places import rank_environment
from hires.launcher.ranks.processes import RankProcess

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
        """Finds out which rank it is, and connects to the supervisor.

        Raises:
            HiresError: the environment does not say which, or the supervisor does not answer.
        """
        self.run_dir, self.attempt = run_dir, attempt
        self.folder = file_names.attempt_dir(run_dir, attempt)
        self.facts = control_channel.read(self.folder, _FILE_S)
        self.numbers = world.numbers(self.facts["starter"])
        if self.numbers.size != self.facts["size"]:
            raise RunError(
                f"{self.facts['starter']} started {self.numbers.size} processes, but the plan has "
                f"{self.facts['size']} ranks"
            )
        self._terminations = 0
        self._supervisor = control_channel.connect(self.facts, self.numbers.rank, _CONNECT_S)

    def run(self) -> int:
        """Runs the rank until it has ended and the supervisor has disconnected."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._count)
        for number in (signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, signal.SIG_IGN)  # the supervisor sends them by its connection
        try:
            rank = self._start()
        except HiresError as error:
            self._supervisor.send(failed=str(error))
            return self._stay(None)
        self._supervisor.send(**provenance.myself() | {"started": rank.process.pid})
        return self._stay(rank)

    def _start(self) -> RankProcess:
        own, facts = self.numbers, self.facts
        here = world.World(
            own.rank,
            own.size,
            own.local_rank,
            own.local_size,
            facts["address"],
            facts["port"],
            self.attempt,
        )
        config = records.read_config(self.run_dir)
        site, threads = config.cluster.environment, config.launcher.threads
        environ = rank_environment(os.environ, here, threads, facts["interface"], site)
        command = [sys.executable, "-m", facts["module"], str(self.run_dir), *facts["args"]]
        log = file_names.rank_log(self.folder, own.rank)
        log.unlink(missing_ok=True)  # of a start whose port was taken
        try:
            os.chdir(facts["folder"])  # relative paths of the config count from there
        except OSError as error:
            raise RunError(
                f"{socket.gethostname()} does not see {facts['folder']}: {error.strerror}"
            ) from None
        return processes.start(own.rank, command, environ, log)

    def _stay(self, rank: RankProcess | None) -> int:
        """Returns the rank's exit code once the supervisor has disconnected."""
        while not self._supervisor.closed:
            self._supervisor.wait(_POLL_S)
            for line in self._supervisor.lines():
                if rank is not None and line.get("signal") in _PASSED:
                    processes.pass_on(rank, signal.Signals(line["signal"]))
            if rank is not None and processes.poll([rank]):
                self._supervisor.send(code=rank.code)
            if rank is not None and self._terminations:
                processes.pass_on(rank, signal.SIGTERM)
                self._terminations = 0
        if rank is None:
            return 1
        processes.kill([rank])
        assert rank.code is not None
        return rank.code if rank.code >= 0 else 128 - rank.code

    def _count(self, number: int, frame: FrameType | None) -> None:
        """Counts a signal from the program that started this process; the rank is ended, too."""
        self._terminations += 1


if __name__ == "__main__":
    sys.exit(main())
