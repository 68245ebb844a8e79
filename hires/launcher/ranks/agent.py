"""Runs beside one rank: ``python -m hires.launcher.ranks.agent RUN_DIR ATTEMPT``.

An MPI, ``srun`` or torchrun starts an agent for every rank, on the rank's machine. It starts the
rank, passes the supervisor's signals on, reports how the rank ended, and kills it when the
supervisor is gone (:mod:`hires.launcher.ranks.control_channel`). It ends only when the supervisor
disconnects, so the program that started the agents has no reason to end the others on its own.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
from pathlib import Path

from hires.core.errors import HiresError, RunError
from hires.core.ranks.mpi_dialects import numbers
from hires.core.store import file_names, provenance, records
from hires.launcher.ranks import control_channel
from hires.launcher.ranks.places import RankPlace, RankPlaces
from hires.launcher.ranks.rank_group import Launch, SeparateRanks

_CONNECT_S = 30.0
"""How long the supervisor may take to answer."""
_FILE_S = 10.0
"""How long its file may take to be seen here."""
_POLL_S = 0.05


def main() -> int:
    """Runs one rank; returns its exit code."""
    try:
        return run(Path(sys.argv[1]), int(sys.argv[2]))
    except HiresError as error:
        sys.stderr.write(f"hires: {error}\n")
        return error.exit_code


def run(run_dir: Path, attempt: int) -> int:
    """Runs the rank until it and the connection to the supervisor have ended; returns its code.

    A HiresError says that the environment names no rank, or the supervisor does not answer.
    """
    facts = control_channel.read(file_names.attempt_dir(run_dir, attempt), _FILE_S)
    own = numbers(facts["starter"], os.environ)
    if own.size != facts["size"]:
        raise RunError(
            f"{facts['starter']} started {own.size} processes, but the plan has "
            f"{facts['size']} ranks"
        )
    config = records.read_config(run_dir)
    supervisor = control_channel.connect(facts, own.rank, _CONNECT_S)
    # The program that started this process may end it; the rank ends, and this process stays.
    terminations: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda number, _: terminations.append(number))
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # the supervisor sends them by its connection
    places = RankPlaces((), (facts["port"],), facts["address"], facts["interface"])
    job = Launch(run_dir, attempt, config, facts["module"], facts["args"], places)
    group = SeparateRanks(job, facts["port"])  # of one rank, or none if that cannot be started
    try:
        os.chdir(facts["folder"])  # relative paths of the config count from there
        rank = group.start(own.rank, own.size, RankPlace(own.local_rank, own.local_size))
        supervisor.send(**provenance.myself() | {"started": rank.pid})
    except (HiresError, OSError) as error:
        with contextlib.suppress(OSError), job.log(own.rank).open("a", encoding="utf-8") as log:
            log.write(f"{socket.gethostname()} cannot start it: {error}\n")
        supervisor.send(code=1)
    while not supervisor.closed:
        supervisor.wait(_POLL_S)
        for line in supervisor.lines():
            group.send(signal.Signals(line["signal"]))
        for rank in group.poll():
            supervisor.send(code=rank.code)
        if terminations:
            group.send(signal.SIGTERM)
            terminations.clear()
    group.kill()
    code = group.ranks[0].code if group.ranks else 1
    assert code is not None
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())
