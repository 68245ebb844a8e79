"""The agent of one rank: ``python -m hires.launcher.ranks.agent RUN_DIR ATTEMPT``.

An MPI, ``srun`` or torchrun starts one for every rank, on the rank's own machine. It finds out
which rank that is, starts it, and stays beside it: it passes signals of the supervisor on, tells
how the rank ended, and kills it when the supervisor is gone. It ends when the supervisor hangs up,
so what started the agents never has a reason to end the others on its own.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from hires.core.errors import HiresError, RunError
from hires.core.ranks import world
from hires.core.store import file_names, records
from hires.launcher.ranks import control_channel, processes
from hires.launcher.ranks.processes import RankProcess
from hires.launcher.ranks.rank_environment import rank_environment
from hires.launcher.status import process_id

_CALL_S = 30.0
"""How long the supervisor may take to answer."""
_SEE_S = 10.0
"""How long its word may take to be seen here."""
_LOOK_S = 0.05
"""How often the rank is looked at."""


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
    """One rank, seen from the process beside it."""

    def __init__(self, run_dir: Path, attempt: int) -> None:
        """Finds out which rank it is, and calls the supervisor.

        Raises:
            HiresError: the environment does not tell, or the supervisor does not answer.
        """
        self.run_dir, self.attempt = run_dir, attempt
        self.folder = records.attempt_dir(run_dir, attempt)
        self.facts = control_channel.read(self.folder, _SEE_S)
        self.numbers = world.numbers(self.facts["starter"])
        if self.numbers.size != self.facts["size"]:
            raise RunError(
                f"{self.facts['starter']} started {self.numbers.size} processes, but the plan has "
                f"{self.facts['size']} ranks"
            )
        self._told_to_end = 0
        self._wire = control_channel.call(self.facts, self.numbers.rank, _CALL_S)

    def run(self) -> int:
        """Runs the rank until it has ended and the supervisor knows it."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._hear)
        for number in (signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, signal.SIG_IGN)  # the supervisor's own way is the line
        try:
            rank = self._start()
        except HiresError as error:
            self._wire.send(failed=str(error))
            return self._stay(None)
        self._wire.send(**process_id.myself() | {"started": rank.process.pid})
        return self._stay(rank)

    def _start(self) -> RankProcess:
        """Starts the rank."""
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
        log = self.folder / file_names.LOGS / f"rank{own.rank:04d}.log"
        log.unlink(missing_ok=True)  # of a start whose port was taken
        try:
            os.chdir(facts["folder"])  # relative paths of the config count from there
        except OSError as error:
            raise RunError(
                f"{socket.gethostname()} does not see {facts['folder']}: {error.strerror}"
            ) from None
        return processes.start(own.rank, command, environ, log)

    def _stay(self, rank: RankProcess | None) -> int:
        """Returns the rank's exit code when the supervisor has hung up."""
        while not self._wire.closed:
            control_channel.wait(self._wire, _LOOK_S)
            for said in self._wire.lines():
                self._obey(rank, said)
            if rank is not None and processes.poll([rank]):
                self._wire.send(code=rank.code)
            if rank is not None and self._told_to_end:
                processes.pass_on(rank, signal.SIGTERM)
                self._told_to_end = 0
        if rank is None:
            return 1
        processes.kill([rank])
        assert rank.code is not None
        return rank.code if rank.code >= 0 else 128 - rank.code

    def _obey(self, rank: RankProcess | None, said: dict[str, Any]) -> None:
        """Sends the rank the signal that the supervisor named."""
        number = said.get("signal")
        if rank is not None and number in _PASSED:
            processes.pass_on(rank, signal.Signals(number))

    def _hear(self, number: int, frame: FrameType | None) -> None:
        """Notes that what started this process wants it to end; the rank is told to."""
        self._told_to_end += 1


_PASSED = (signal.SIGTERM, signal.SIGKILL, signal.SIGUSR1, signal.SIGUSR2)
"""What the supervisor may have a rank sent."""


if __name__ == "__main__":
    sys.exit(main())
