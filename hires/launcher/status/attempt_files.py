"""What do the files of a run say about its latest attempt?"""

from __future__ import annotations

import contextlib
import json
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hires.core.ranks import heartbeat
from hires.core.store import file_names
from hires.core.store.reading import parse_lines
from hires.core.store.records import attempt_dir

Job = dict[str, Any]
"""``job.json`` of an attempt."""
REQUEST = file_names.CANCEL
"""File in the folder of an attempt that is a job, or shares one: somebody cancelled it."""
_EVENTS_BYTES = 2**13
"""The event that begins a launch is among the first so many bytes."""


@dataclass(frozen=True)
class Attempt:
    """What the files say of an attempt."""

    path: Path
    """The run folder."""
    number: int
    exit: dict[str, Any] | None
    """``exit.json``."""
    job: Job | None
    """``job.json``: what a scheduler knows it by; None: it was started on some machine at once."""
    launched: dict[str, Any] | None
    """The event of the process that started the ranks, see ``launcher.whois``."""
    damaged: tuple[str, ...] = ()
    """Files that are there and make no sense, by their names below the run folder; what they say
    is left out."""

    @property
    def folder(self) -> Path:
        """Its folder."""
        return attempt_dir(self.path, self.number)

    def last_sign(self) -> float:
        """Returns when it last showed that it is alive, by the file system's clock, in seconds."""
        beats = list(heartbeat.heartbeats(self.folder).values())
        if not beats:  # the ranks have not come that far
            for name in (file_names.EVENTS, file_names.JOB, file_names.ENV):
                with contextlib.suppress(OSError):
                    beats.append((self.folder / name).stat().st_mtime)
        return max(beats, default=0.0)


class Clock:
    """The time by the file systems' own clocks; that of each campaign is asked once."""

    def __init__(self) -> None:
        self._offsets: dict[Path, float] = {}

    def now(self, run: Path) -> float:
        """Returns the time where a run is kept, in seconds since the epoch."""
        folder = run.parent
        if folder not in self._offsets:
            self._offsets[folder] = heartbeat.file_clock(folder) - time.time()
        return time.time() + self._offsets[folder]


def latest(path: Path) -> Attempt | None:
    """Returns what the files say of a run's latest attempt; None if it has none."""
    number = last_number(path)
    return None if number is None else of_number(path, number)


def of_number(path: Path, number: int) -> Attempt:
    """Returns what the files say of one attempt of a run."""
    folder = attempt_dir(path, number)
    end, job = read_exit(folder), read_job(folder)
    damaged = tuple(
        f"{folder.name}/{name}"
        for name, value in ((file_names.EXIT, end), (file_names.JOB, job))
        if value is None and (folder / name).exists()
    )
    return Attempt(path, number, end, job, None if end else launched_by(folder), damaged)


def read_job(folder: Path) -> Job | None:
    """Returns what a scheduler knows an attempt by; None: it is no job, or the file is damaged."""
    job = read_json(folder / file_names.JOB)
    if job is None or not re.fullmatch(r"[0-9]+", str(job.get("job"))):
        return None
    index, pack = job.get("index"), job.get("pack", 1)
    whole = (index is None or type(index) is int) and type(pack) is int
    return job if whole else None


def job_of_attempt(folder: Path) -> str | None:
    """Returns the name of an attempt's job, ``123`` or ``123_4``; None if it has none."""
    job = read_job(folder)
    if job is None:
        return None
    return str(job["job"]) if job.get("index") is None else f"{job['job']}_{job['index']}"


def read_exit(folder: Path) -> dict[str, Any] | None:
    """Returns how an attempt ended; None if it left no word, or the file is damaged."""
    end = read_json(folder / file_names.EXIT)
    if end is None or not isinstance(end.get("state"), str):
        return None
    texts = (end.get(key) for key in ("reason", "cause"))
    return end if all(text is None or isinstance(text, str) for text in texts) else None


def last_number(path: Path) -> int | None:
    """Returns the number of a run's latest attempt; None if it has none."""
    try:
        names = [entry.name for entry in path.iterdir()]
    except OSError:
        return None
    return max((int(name[1:]) for name in names if re.fullmatch(r"a\d+", name)), default=None)


def is_asked(folder: Path) -> bool:
    """Whether somebody cancelled an attempt that is a job, or shares one.

    Args:
        folder: of the attempt.
    """
    return (folder / REQUEST).exists()


def launched_by(folder: Path) -> dict[str, Any] | None:
    """Returns the event of the process that started an attempt's ranks, without reading all."""
    found = None
    with contextlib.suppress(OSError):
        with (folder / file_names.EVENTS).open("rb") as file:
            head = file.read(_EVENTS_BYTES)
        whole = head[: head.rfind(b"\n") + 1]
        for line in parse_lines(whole):
            if line.get("event") == "launch_started":
                found = line  # the last one: a start whose port was taken was repeated
    return found


def read_json(path: Path) -> dict[str, Any] | None:
    """Returns the object in a JSON file; None if there is none, or half of one."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
