"""Reads and begins attempts: every start of a run is a folder ``a0``, ``a1``, ... of its own.

An exclusive mkdir takes the number. ``env.json`` holds what is known before the ranks start.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from hires.core.config.launcher_config import is_secret
from hires.core.config.run_config import from_dict
from hires.core.errors import ConfigError, RunError
from hires.core.ranks import mpi_starter
from hires.core.store import file_names, provenance, reading, trust
from hires.core.store.ends import End, State, end_of
from hires.core.store.file_names import StrPath, attempt_dir, last_number
from hires.core.store.files import (
    cannot_write,
    make_folder,
    remove_leftovers,
    write_atomically,
)
from hires.core.store.reading import Note, Notes, Values

_WRONG_VALUE = "a value is missing or of another type"


class Attempt:
    """One attempt of a run: its folder, which need not exist, and what its files hold.

    A file is read at its first use and kept: an Attempt is a snapshot; make another one
    to look again. A file that is missing or cannot be used is an empty dict, or None.
    """

    def __init__(
        self, run: StrPath, number: int, notes: list[Note] | None = None, *, strict: bool = False
    ) -> None:
        """Notes what is wrong with its files, or raises a RunError if ``strict``."""
        self.run = Path(run)
        self.number = number
        self.folder = attempt_dir(run, number)
        self.notes: Notes = None if strict else notes if notes is not None else []

    @cached_property
    def exit(self) -> End | None:
        """How it ended, by ``exit.json``; None: it has not, or the file is damaged."""
        values = self._read(file_names.EXIT)
        try:
            return end_of(values) if values else None
        except ValueError:
            reading.damaged(self.folder / file_names.EXIT, _WRONG_VALUE, self.notes)
            return None

    @property
    def is_done(self) -> bool:
        """Whether it completed the run."""
        return self.exit is not None and self.exit.state == State.DONE

    @property
    def may_go_on(self) -> bool:
        """Whether it has not ended, or ended for a reason after which jobs start again."""
        return self.exit is None or self.exit.restarts

    @cached_property
    def job(self) -> Values:
        """``job.json``: number, index and share of the scheduler's job that runs it."""
        job = {"launcher": "slurm", "index": None, **self._read(file_names.JOB)}
        if "job" not in job:
            return {}
        if isinstance(job["index"], int | None) and re.fullmatch(r"[0-9]+", str(job["job"])):
            return job
        return reading.damaged(self.folder / file_names.JOB, _WRONG_VALUE, self.notes)

    @property
    def job_name(self) -> str | None:
        """The name of its job, ``123``, or ``123_4`` in an array; None if it is no job."""
        return job_name(self.job) if self.job else None

    @cached_property
    def env(self) -> Values:
        """``env.json``: what was known before its ranks started."""
        return self._read(file_names.ENV)

    @cached_property
    def record(self) -> Values:
        """``record.json`` of its own; empty if it did not end with numbers."""
        return self._read(file_names.RECORD)

    @cached_property
    def launched(self) -> Values:
        """The event of the process that started its ranks; empty if they were not started."""
        path = self.folder / file_names.EVENTS
        lines = reading.parse_lines(reading.read_bytes(path, self.notes) or b"")
        starts = [line for line in lines if line.get("event") == "launch_started"]
        return starts[-1] if starts else {}

    @property
    def events(self) -> list[Values]:
        """The events of launcher and ranks up to now, in the order of their times."""
        lines = reading.read_rank_lines(self.folder, file_names.EVENTS, self.notes)
        return sorted(lines, key=lambda line: str(line.get("time")))

    @property
    def metrics(self) -> list[Values]:
        """What the ranks have measured up to now."""
        return reading.read_rank_lines(self.folder, file_names.METRICS, self.notes)

    @property
    def has_ended(self) -> bool:
        """Whether there is an ``exit.json`` now, damaged or not."""
        return os.path.exists(self.folder / file_names.EXIT)  # noqa: PTH110 (no PermissionError)

    @property
    def is_cancelled(self) -> bool:
        """Whether `hires cancel` has left a request to end it."""
        return os.path.exists(self.folder / file_names.CANCEL)  # noqa: PTH110

    @property
    def damaged(self) -> tuple[str, ...]:
        """Which of its small files, and its record, are there and cannot be used: ``a0/NAME``."""
        values: dict[str, object] = {file_names.EXIT: self.exit, file_names.JOB: self.job}
        sizes = {reading.size_of(folder / file_names.RECORD) for folder in (self.folder, self.run)}
        # The run's record is a copy of one attempt's: of equal size, both are whole, or neither.
        if len(sizes) > 1 or -1 in sizes:
            values[file_names.RECORD] = self.record
        names = [n for n, held in values.items() if not held and os.path.lexists(self.folder / n)]
        return tuple(f"{self.folder.name}/{name}" for name in names)

    def _read(self, name: str) -> Values:
        return reading.read_json(self.folder / name, self.notes)


def job_name(job: Mapping[str, Any]) -> str:
    """Returns the name of a job of ``job.json``, ``123``, or of an array's task, ``123_4``."""
    index = job.get("index")
    return str(job["job"]) if index is None else f"{job['job']}_{index}"


def latest(run: StrPath) -> Attempt | None:
    """Returns a run's latest attempt; None if it has none."""
    number = last_number(run)
    return None if number is None else Attempt(run, number)


def next_attempt(path: StrPath, argv: Sequence[str] | None = None) -> int:
    """Makes the folder of a new attempt of a run, ``env.json`` included, and returns its number.

    ``argv`` is the command line as typed, which makes this run alone; None: that of its planner
    reproduces it. The caller makes sure that the run is not under way.

    Raises:
        RunError: the folder cannot be written.
    """
    path = Path(path)
    trust.refuse_untrusted(path)
    reproduce = reproduce_line_of(path) if argv is None else mpi_starter.reproduce_line(argv)
    last = last_number(path)
    for number in itertools.count(0 if last is None else last + 1):
        folder = attempt_dir(path, number)
        try:
            folder.mkdir()
            break
        except FileExistsError:  # another process took this number
            continue
        except OSError as error:
            raise cannot_write(folder, error) from error
    remove_leftovers(path, below=True)
    try:
        make_folder(folder / file_names.LOGS)
        values = environment(argv, reproduce)
        values["variables"] = _variables(path)
        write_atomically(folder / file_names.ENV, json.dumps(values, indent=1) + "\n")
    except RunError:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return number


def reproduce_line_of(path: StrPath) -> str | None:
    """Returns the command line that made a run, as its planner wrote it; None: it is not known."""
    line = reading.read_json(Path(path) / file_names.PLANNED, reading.Warned()).get("reproduce")
    return None if line is None else str(line)


def _variables(path: Path) -> dict[str, str]:
    # What the config sets in the environment of the ranks, with the values that they get.
    try:
        config = from_dict(reading.read_yaml(path / file_names.CONFIG))
    except (ConfigError, RunError):  # whatever starts the ranks says why
        return {}
    site = config.cluster.environment
    held = {k: v if is_secret(v) else os.environ.get(k, v) for k, v in site.items()}
    return held | config.library_variables


def environment(argv: Sequence[str] | None, reproduce: str | None) -> dict[str, Any]:
    """Returns what ``env.json`` holds of an attempt, known before anything starts."""
    return {
        "started": provenance.now(),
        "argv": None if argv is None else list(argv),
        "reproduce": reproduce,
        "provenance": provenance.collect(),
    }
