"""Launches a run: starts its ranks, waits, and leaves ``exit.json`` and ``record.json`` behind.

``python -m hires.launcher.local.local_launcher RUN_DIR ATTEMPT`` does so in a process of its own,
for an attempt of the local queue whose folder exists already. It prints nothing but errors.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hires.core import log, units
from hires.core.errors import HiresError, RunError
from hires.core.store import provenance, records
from hires.core.store.attempts import Attempt
from hires.core.store.file_names import StrPath
from hires.core.store.run_index import write_exit
from hires.launcher.interface import OnLine, Outcome, launcher_of
from hires.launcher.ranks import ports
from hires.launcher.ranks.places import RankPlaces, here
from hires.launcher.ranks.rank_group import Launch
from hires.launcher.supervision.interrupts import Interrupts
from hires.launcher.supervision.supervisor import Supervisor

RANK = "hires.worker"
"""Python module that every rank runs."""

_FULL_BYTES = 2**20


def launch(
    run_dir: StrPath,
    attempt: int,
    *,
    args: Sequence[str] = (),
    on_line: OnLine | None = None,
    module: str = RANK,
    places: RankPlaces | None = None,
) -> Outcome:
    """Runs all ranks of a run and returns how it ended; none is left then.

    Call it from a thread that lives until it returns: ranks die with the thread that started them.

    Args:
        run_dir: the run folder.
        attempt: number of an attempt whose folder exists and was not launched yet.
        args: more arguments for every rank, as ``--verify``; with any, no step is measured, so
            success is what the exit codes say and no ``record.json`` is written.
        on_line: called with every new line of ``metrics.jsonl``.
        module: the Python module that every rank runs.
        places: where the ranks run; unset: where the config's launcher places them.

    Raises:
        ConfigError: ``launcher.port`` is taken.
        RunError: the run folder cannot be read, or the ranks cannot be started.
    """
    run_dir = Path(run_dir).absolute()
    config = records.read_config(run_dir)
    if places is None:
        world = int(records.read_plan(run_dir)["world"])
        places = launcher_of(config).rank_places(config, world)
    job = Launch(run_dir, attempt, config, module, args, places, on_line)
    started = provenance.now()
    with Interrupts() as interrupts:
        try:
            end = _run(job, interrupts)
        except BaseException as error:
            why = f"the launcher stopped: {str(error) or type(error).__name__}"
            _write_end(job, Outcome("failed", why, reason="launch"), started)
            raise
        return _write_end(job, end, started)


def leave(
    run_dir: StrPath, attempt: int, state: str, cause: str, reason: str | None = None
) -> None:
    """Writes ``exit.json`` and ``record.json`` of an attempt whose own launcher cannot.

    A failure without a ``reason`` is ``launch``: its ranks were not started.

    Raises:
        RunError: the run folder cannot be read.
    """
    run_dir = Path(run_dir).absolute()
    job = Launch(run_dir, attempt, records.read_config(run_dir), "", (), here(0, 0))
    reason = reason or ("launch" if state == "failed" else None)
    _write_end(job, Outcome(state, cause, reason=reason), provenance.now())


def main(argv: Sequence[str] | None = None) -> int:
    """Launches an attempt, maybe with another Python module as its ranks; returns its exit code."""
    path, attempt, *module = sys.argv[1:] if argv is None else argv
    log.setup()
    try:
        return launch(path, int(attempt), module=module[0] if module else RANK).exit_code
    except HiresError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code


def say(text: str) -> None:
    """Prints a line at once: the output of launchers that scripts start often goes to a file."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _run(job: Launch, interrupts: Interrupts) -> Outcome:
    """Runs the ranks, with another port if one was taken between choosing and listening."""
    *others, last = job.places.ports
    for choice in others:
        try:
            with ports.reserve(choice) as port:
                end = Supervisor(job, port, interrupts).run()
        except ports.PortTakenError:
            continue
        if not _lost_its_port(job, end):
            return end
        records.event(job.run_dir, job.attempt, "port_taken", port=port)
    with ports.reserve(last) as port:
        end = Supervisor(job, port, interrupts).run()
    if _lost_its_port(job, end):
        why = f"port {port} was taken while the ranks started"
        return replace(end, cause=f"{why}; run it again, with another launcher.port or 0")
    return end


def _lost_its_port(job: Launch, end: Outcome) -> bool:
    """Whether the ranks could not meet because another process listens at their port."""
    rank_failed = end.failed_rank is not None  # else its log may be that of the try before
    return rank_failed and end.reason == "launch" and ports.was_taken(job.log(0))


def _write_end(job: Launch, end: Outcome, started: str) -> Outcome:
    """Writes how an attempt ended; returns the end, failed if it is not whole or not written."""
    record: dict[str, Any] | None = None
    if end.state == "failed" and Attempt(job.run_dir, job.attempt).is_cancelled:
        end = replace(end, state="cancelled", cause=f"cancelled; {end.cause}", reason=None)
    try:
        if not job.args:
            record = {}
            record = records.finish(job.run_dir, job.attempt, end.state, end.cause)
            end = replace(end, state=record["state"], cause=record["cause"])
    except RunError as error:
        end = _failed_too(end, str(error))
    except Exception as error:  # a bug in making the record must not hide how the ranks ended
        end = _failed_too(end, f"no record could be made: {type(error).__name__}: {error}")
    facts: dict[str, Any] = {"reason": end.reason, "exit_codes": end.exit_codes}
    try:
        write_exit(job.run_dir, job.attempt, end.state, end.cause, record, started=started, **facts)
    except RunError as error:
        end = _failed_too(end, str(error))
    # A rank that cannot even log does not say that the disk is full.
    if end.state == "failed" and "No space" not in (end.cause or ""):
        try:
            free_bytes = shutil.disk_usage(job.run_dir).free
        except OSError:
            return end
        if free_bytes < _FULL_BYTES:
            why = f"the disk of {job.run_dir} is full ({units.size(free_bytes)} free)"
            end = _failed_too(end, why)
    return end


def _failed_too(end: Outcome, why: str) -> Outcome:
    """Returns the end with one more reason; what was done is failed, cancelled stays."""
    state = "failed" if end.state == "done" else end.state
    return replace(end, state=state, cause=f"{end.cause}; {why}" if end.cause else why)


if __name__ == "__main__":
    sys.exit(main())
