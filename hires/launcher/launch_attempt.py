"""Launches a run: starts its ranks, waits, and leaves ``exit.json`` and ``record.json`` behind."""

from __future__ import annotations

import contextlib
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from hires.core import units
from hires.core.errors import ConfigError, EditedError, RunError
from hires.core.ranks import meeting
from hires.core.store import attempts, file_names, frozen, provenance, records, trust
from hires.core.store.attempts import Attempt
from hires.core.store.ends import ENDS, End, State
from hires.core.store.file_names import StrPath
from hires.core.store.reading import printable
from hires.launcher.interface import OnLine, launcher_of
from hires.launcher.ranks.places import RankPlaces
from hires.launcher.ranks.rank_group import Launch
from hires.launcher.status.run_progress import RunProgress
from hires.launcher.supervision.supervisor import Interrupts, Supervisor

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
    aloud: bool = False,
    interrupts: Interrupts | None = None,
    gpus: Sequence[str] = (),
) -> End:
    """Runs all ranks of a run and returns how it ended; none is left then.

    Call it from a thread that lives until it returns: ranks die with the thread that started them.

    The attempt's folder exists, and it was not launched yet. A ConfigError says that
    ``launcher.port`` is taken, a RunError that the run cannot be read or its ranks not be started.

    With ``args`` for every rank, as ``--verify``, no step is measured and no ``record.json``
    written: the exit codes decide. Without ``places`` the config's launcher places the ranks. With
    ``aloud`` the steps, and how it ended, are printed; why it failed goes to stderr. Its signals
    are those of ``interrupts``; else of this process, in the main thread. Ranks see ``gpus`` only,
    if there are any.
    """
    run_dir = Path(run_dir).absolute()
    trust.refuse_untrusted(run_dir)
    ending, started = Attempt(run_dir, attempt), provenance.now()
    if (why := edited(run_dir)) is not None:
        end = _write_end(ending, End(State.FAILED, why, "edited", started=started), not args)
        return _print_end(ending, end) if aloud else end
    config = records.read_config(run_dir)
    if places is None:
        places = launcher_of(config).rank_places(config, records.read_world(run_dir))
    places = replace(places, gpus=gpus)
    if aloud:
        on_line = RunProgress(places.num_ranks, config.batch, config.steps).printer(say)
    job = Launch(run_dir, attempt, config, module, args, places, on_line)
    with interrupts or Interrupts() as interrupts:
        try:
            end = _run(job, interrupts)
        except BaseException as error:
            why = f"the launcher stopped: {str(error) or type(error).__name__}"
            _write_end(ending, End(State.FAILED, why, "launch", started=started), not args)
            raise
        end = _write_end(ending, replace(end, started=started), not args)
    return _print_end(ending, end) if aloud else end


def edited(run_dir: Path) -> str | None:
    """Returns what was edited since a run was planned, in words; None if nothing was."""
    try:
        frozen.require_unchanged(run_dir)
        planned = frozen.read(run_dir)
        if planned is not None and planned.inputs.data is not None:
            # numpy and readers of images: half the start of a supervisor that has none
            from hires.data.content import is_unchanged

            data = records.read_config(run_dir).data
            if not is_unchanged(data, planned.inputs.data):
                again = attempts.reproduce_line_of(run_dir)
                return (
                    f"the images of data.path={data.path} have changed since the run was planned; "
                    f"bring them back, or start it as a run of its own: `{again}`"
                )
    except (EditedError, ConfigError) as error:
        return str(error)
    return None


def end_without_ranks(run_dir: StrPath, attempt: int, end: End) -> None:
    """Writes the end of an attempt whose ranks never started, or whose launcher cannot.

    Its ``record.json`` is written, too, if it can be. If there is one, its launcher knew the end
    but could not write that: what the record says counts then, and it stays.
    """
    ending = Attempt(Path(run_dir).absolute(), attempt)
    if (known := ending.record.get("state")) in ENDS:
        reason = end.reason if known == end.state else None
        end = replace(end, state=known, cause=ending.record.get("cause"), reason=reason)
        with contextlib.suppress(RunError):
            end.write(ending.run, attempt)
    else:
        _write_end(ending, end)


def say(text: str) -> None:
    """Prints a line and flushes: stdout is often a file."""
    sys.stdout.write(printable(text) + "\n")
    sys.stdout.flush()


def _print_end(attempt: Attempt, end: End) -> End:
    """Prints how an attempt ended, and returns that."""
    for line in end.tail:
        sys.stderr.write(f"    {printable(line)}\n")
    if end.cause:
        logs = attempt.folder / file_names.LOGS
        sys.stderr.write(printable(f"{end.cause}; the logs are in {logs}\n"))
    say(f"{attempt.run.name}: {end.state}")
    return end


def _run(job: Launch, interrupts: Interrupts) -> End:
    """Runs the ranks, which meet at a port of their own."""
    with meeting.reserve_port(job.places.port) as port:
        return Supervisor(job, port, interrupts).run()


def _write_end(attempt: Attempt, end: End, measured: bool = True) -> End:
    """Writes how an attempt ended; returns the end, failed if it is not whole or not written."""
    end = replace(end, started=end.started or provenance.now())
    if end.state == State.FAILED and attempt.is_cancelled:
        cause = f"cancelled; {end.cause}"
        end = replace(end, state=State.CANCELLED, cause=cause, reason=None)
    try:
        if measured:
            record = records.finish(attempt.run, attempt.number, end.state, end.cause)
            end = replace(end, state=record["state"], cause=record["cause"])
    except RunError as error:
        end = _failed_too(end, str(error))
    except Exception as error:  # a bug in making the record must not hide how the ranks ended
        end = _failed_too(end, f"no record could be made: {type(error).__name__}: {error}")
    try:
        end.write(attempt.run, attempt.number)
    except RunError as error:
        end = _failed_too(end, str(error))
    if end.state == State.FAILED:  # a rank that cannot even log does not say that the disk is full
        with contextlib.suppress(OSError):
            free_bytes = shutil.disk_usage(attempt.run).free
            if free_bytes < _FULL_BYTES:
                why = f"the disk of {attempt.run} is full ({units.size(free_bytes)} free)"
                end = _failed_too(end, why)
    return end


def _failed_too(end: End, why: str) -> End:
    """Returns the end with one more reason; what was done is failed, cancelled stays."""
    state = State.FAILED if end.state == State.DONE else end.state
    return replace(end, state=state, cause=f"{end.cause}; {why}" if end.cause else why)
