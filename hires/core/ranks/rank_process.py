"""Runs the process of a rank, and ends it so that its launcher sees how.

A rank that a launcher starts itself has its log and its number already, and its exit code is seen.
One command (mpirun, srun, torchrun) that starts all ranks keeps their exit codes to itself: such a
rank opens its log, says in an event where it runs, and how it ends:

    rank_started    pid, host
    rank_ended      code

To that command a preempted rank exits with 0, or it would end the others before they have saved.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from hires.core import streams
from hires.core.errors import PREEMPTED, HiresError, RunError
from hires.core.ranks import heartbeat
from hires.core.ranks.world import STARTER, World, from_environment
from hires.core.store import file_names, provenance, records, trust
from hires.core.store.attempts import Attempt
from hires.core.store.files import cannot_write


def run(main: Callable[[], int | None]) -> NoReturn:
    """Runs a rank, whose run folder is the first word of its command, and ends the process."""
    streams.secure()
    world = None
    try:
        if STARTER in os.environ:
            world = _join(Path(sys.argv[1]))
        code = main() or 0
    except HiresError as error:
        sys.stderr.write(f"hires: {error}\n")
        code = error.exit_code
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except Exception:
        sys.excepthook(*sys.exc_info())
        code = 1
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    if world is not None:
        with contextlib.suppress(RunError):  # the end of the command says that it is gone
            records.rank_event(sys.argv[1], world.attempt, "rank_ended", world.rank, code=code)
        code = 0 if code == PREEMPTED else code
    os._exit(code)  # threads of a broken transport must not keep a failed rank alive


def _join(run_dir: Path) -> World:
    """Takes the place of a rank that one command has started; returns its world.

    RunError: this node does not see the run folder, its log cannot be written, or its launcher has
    ended meanwhile.
    """
    records.require_seen(run_dir)
    trust.refuse_untrusted(run_dir)
    world = from_environment()
    attempt = Attempt(run_dir, world.attempt)
    heartbeat.require_launcher(attempt)
    log = file_names.rank_log(attempt.folder, world.rank)
    try:
        with log.open("ab") as file:
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
                os.dup2(file.fileno(), stream.fileno())
    except OSError as error:
        raise cannot_write(log, error) from error
    del os.environ[STARTER]
    # With those of torchrun, torch expects a store that another process hosts, and none does.
    for name in [name for name in os.environ if name.startswith("TORCHELASTIC_")]:
        del os.environ[name]
    os.environ |= world.to_environment()
    records.rank_event(run_dir, world.attempt, "rank_started", world.rank, **provenance.myself())
    return world
