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
import os
import signal
import time
from collections.abc import Callable, Container, Mapping
from pathlib import Path

from hires.core.errors import HiresError, RunError
from hires.core.ranks import heartbeat
from hires.core.ranks.heartbeat import RankStatus
from hires.core.store import file_names, provenance, records
from hires.core.store.files import write_atomically
from hires.launcher.status.run_progress import MetricsTail
from hires.launcher.supervision.hang_page import Hang
from hires.plan.plan import Plan
from hires.plan.proof.stalled import stall

LOOK_S = 0.5
"""How often the files are read."""
SILENT_S = 2 * heartbeat.BEAT_S
"""A heartbeat may be later than ``comm.timeout_s`` by two beats before it counts as stopped."""
ANSWER_S = 5.0
"""How long the ranks may take to write their status."""
_POLL_S = 0.05


class Watchdog:
    """Looks at the files of an attempt for ranks that are stuck or silent."""

    def __init__(self, attempt: Path, timeout_s: float) -> None:
        """Takes the attempt's folder, and how long a rank may stand still."""
        self.attempt, self.timeout_s = attempt, timeout_s
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
        # Only this process's own clock counts, from when it saw a beat change: after a laptop has
        # slept all beats are old, and the clocks of machines differ.
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

    ``pids`` are the processes of the ranks that run on this machine. The wait for answers ends when
    ``hurry`` returns True.
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
    able = {rank for rank in beats if not silent.get(rank)}
    answers = _answers(folder, able, hurry)
    now_s = heartbeat.file_clock(folder / file_names.ALIVE)
    ages_s = {rank: max(0.0, now_s - at) for rank, at in heartbeat.heartbeats(folder).items()}
    hang = Hang(folder, answers, silent, 0, ages_s)
    with contextlib.suppress(RunError):
        values = records.read_plan(run_dir)
        hang.world = int(values.get("world", 0))
        with contextlib.suppress(HiresError, KeyError, TypeError):  # another hires wrote it
            hang.stall = stall(Plan.from_dict(values), answers, hang.world)
    with contextlib.suppress(RunError):
        write_atomically(folder / file_names.HANG, hang.page())
    return hang


def _answers(folder: Path, able: set[int], hurry: Callable[[], bool]) -> dict[int, RankStatus]:
    """Returns where the ranks stand, waiting a little for those that are able to answer."""
    answers: dict[int, RankStatus] = {}
    deadline = time.monotonic() + ANSWER_S
    while True:
        for rank in sorted(able - answers.keys()):
            status = heartbeat.read_status(folder, rank)
            if status is not None:
                answers[rank] = status
        if able <= answers.keys() or time.monotonic() > deadline or hurry():
            return answers
        time.sleep(_POLL_S)


def _why_silent(rank: int, pid: int, beats: Mapping[int, float]) -> str:
    """Returns why a rank of this machine cannot answer, if its process shows it; empty: it can."""
    state = provenance.state_of(pid)
    if state in ("T", "t"):
        return "its process is stopped (by SIGSTOP, a debugger or a scheduler)"
    if state == "D":
        return "its process waits in the kernel, as for a disk or a file server that is gone"
    if state is None or state == "Z":
        return "its process has ended"
    return "" if rank in beats else "it has not come to its start yet"
