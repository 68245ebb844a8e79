"""Detects that a world of ranks has stopped moving, and finds out where each rank stands.

    rank stuck > comm.timeout_s ── rank_stuck in events.jsonl ──┐
    heartbeat file unchanged > comm.timeout_s + SILENT_S ───────┴▶ Watchdog.look() is True
    investigate():  SIGUSR1 to ranks here, a request file for ranks elsewhere
                    ◀── every rank writes its status and its Python stacks (up to ANSWER_S)
                    hang.txt: who waits for whom, by the plan

All of it goes through files of the attempt, so it works for ranks on other machines, too.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from hires.core.errors import HiresError, RunError
from hires.core.ranks import heartbeat
from hires.core.ranks.heartbeat import RankStatus
from hires.core.store import file_names, provenance, records
from hires.core.store.files import write_atomically
from hires.launcher.status.run_progress import MetricsTail
from hires.launcher.supervision import hang_page
from hires.plan.plan import Plan
from hires.plan.proof.stalled import stall

FILE = file_names.HANG
LOOK_S = 0.5
"""How often the files are read."""
SILENT_S = 2 * heartbeat.BEAT_S
"""A heartbeat may be later than ``comm.timeout_s`` by two beats before it counts as stopped."""
ANSWER_S = 5.0
"""How long the ranks may take to write their status."""
_POLL_S = 0.05


@dataclass(frozen=True)
class Hang:
    """What is known about a world that does not move."""

    cause: str
    """One paragraph."""
    rank: int | None
    """The rank that the others wait for, if it is one."""


class Watchdog:
    """Looks at the files of an attempt for ranks that are stuck or silent."""

    def __init__(self, attempt: Path, timeout_s: float) -> None:
        """Takes the attempt's folder, and how long a rank may stand still."""
        self.attempt = attempt
        self.timeout_s = timeout_s
        self._events = MetricsTail(attempt / file_names.EVENTS)
        self._events.read()  # of an earlier start of the same attempt
        self._looked_s = 0.0
        self._beats: dict[int, tuple[float, float]] = {}  # last beat, and when it was seen here

    def look(self, ended: Container[int] = ()) -> bool:
        """Returns whether some rank is stuck, or silent though it is not among ``ended``."""
        now_s = time.monotonic()
        if now_s - self._looked_s < LOOK_S:
            return False
        self._looked_s = now_s
        if any(line.get("event") == "rank_stuck" for line in self._events.read()):
            return True
        return self._is_silent(now_s, ended)

    def _is_silent(self, now_s: float, ended: Container[int]) -> bool:
        """Whether a heartbeat has stopped for as long as this process has watched it.

        Only this process's own clock counts: after a laptop has slept all beats are old, and all
        clocks of machines differ.
        """
        for rank, beat in heartbeat.heartbeats(self.attempt).items():
            if rank not in self._beats or self._beats[rank][0] != beat:
                self._beats[rank] = beat, now_s
        return any(
            now_s - seen > self.timeout_s + SILENT_S
            for rank, (_, seen) in self._beats.items()
            if rank not in ended
        )


def investigate(
    run_dir: Path, attempt: int, pids: Mapping[int, int], hurry: Callable[[], bool]
) -> Hang:
    """Finds out where all ranks stand, and writes ``hang.txt`` into the attempt.

    Args:
        run_dir: the run folder.
        attempt: its attempt.
        pids: the processes of the ranks that run on this machine and have not ended.
        hurry: called again and again; True ends the wait for answers.
    """
    folder = file_names.attempt_dir(run_dir, attempt)
    beats = heartbeat.heartbeats(folder)
    for rank, pid in pids.items():
        if rank in beats:  # before its first beat the signal would kill it
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGUSR1)
    with contextlib.suppress(RunError):
        heartbeat.request_status(folder)
    silent = {rank: _why_silent(rank, pid, beats) for rank, pid in pids.items()}
    unable = {rank for rank, why in silent.items() if why is not None}
    told = _answers(folder, set(beats) - unable, hurry)
    plan, world = _plan(run_dir)
    found = hang_page.HangFindings(folder, told, {r: w or "" for r, w in silent.items()}, world)
    found.ages_s = _ages(folder)
    if plan is not None:
        found.stall = stall(plan, told, world)
    with contextlib.suppress(RunError):
        write_atomically(folder / FILE, hang_page.page(found))
    culprits = found.culprits
    return Hang(hang_page.cause(found), culprits[0] if len(culprits) == 1 else None)


def head(attempt: Path) -> list[str]:
    """Returns the first part of an attempt's page, for the screen; nothing if there is none."""
    try:
        text = (attempt / FILE).read_text(encoding="utf-8")
    except OSError:
        return []
    return text.partition(hang_page.AFTER_HEAD)[0].rstrip().splitlines()


def _answers(folder: Path, wanted: set[int], hurry: Callable[[], bool]) -> dict[int, RankStatus]:
    """Returns where the ranks say they stand, waiting a little for those that can answer."""
    told: dict[int, RankStatus] = {}
    deadline = time.monotonic() + ANSWER_S
    while True:
        for rank in sorted(wanted - told.keys()):
            with contextlib.suppress(OSError, ValueError):
                text = heartbeat.status_file(folder, rank).read_text(encoding="utf-8")
                told[rank] = _status(json.loads(text))
        if wanted <= told.keys() or time.monotonic() > deadline or hurry():
            return told
        time.sleep(_POLL_S)


def _status(values: dict[str, Any]) -> RankStatus:
    """Returns the status that plain values describe; what another hires adds is left out."""
    known = {field.name for field in fields(RankStatus)}
    return RankStatus(**{name: value for name, value in values.items() if name in known})


def _why_silent(rank: int, pid: int, beats: Mapping[int, float]) -> str | None:
    """Returns why a rank of this machine cannot answer, as far as its process shows it."""
    state = provenance.state_of(pid)
    if state in ("T", "t"):
        return "its process is stopped (by SIGSTOP, a debugger or a scheduler)"
    if state == "D":
        return "its process waits in the kernel, as for a disk or a file server that is gone"
    if state is None or state == "Z":
        return "its process has ended"
    if rank not in beats:
        return "it has not come to its start yet"
    return None


def _ages(folder: Path) -> dict[int, float]:
    """Returns how old every rank's heartbeat is, in seconds."""
    now_s = heartbeat.file_clock(folder / file_names.ALIVE)
    return {rank: max(0.0, now_s - beat) for rank, beat in heartbeat.heartbeats(folder).items()}


def _plan(run_dir: Path) -> tuple[Plan | None, int]:
    """Returns the frozen plan if it can be read, and the number of ranks."""
    try:
        values = records.read_plan(run_dir)
    except RunError:
        return None, 0
    world = int(values.get("world", 0))
    try:
        return Plan.from_dict(values), world
    except (HiresError, KeyError, TypeError):
        return None, world
