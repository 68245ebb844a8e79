"""Detects that a world of ranks has stopped moving, and explains on a page why.

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
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from hires.core.errors import HiresError, RunError
from hires.core.ranks import heartbeat
from hires.core.ranks.call_records import RankCalls, explanation, read_calls
from hires.core.ranks.heartbeat import RankStatus
from hires.core.store import file_names, provenance, reading, records
from hires.core.store.files import write_atomically
from hires.launcher.status.run_progress import LinesTail
from hires.plan.plan import Plan
from hires.plan.stalled import Stall, stall

LOOK_S = 0.5
"""How often the files are read."""
SILENT_S = 2 * heartbeat.BEAT_S
"""A heartbeat may be later than ``comm.timeout_s`` by two beats before it counts as stopped."""
ANSWER_S = 5.0
"""How long the ranks may take to write their status."""
_POLL_S = 0.05
SHOWN_RANKS = 16
"""Ranks that get more than one line each."""
SHOWN_WAITS = 6
SHOWN_FRAMES = 6
_AFTER_HEAD = "\n\nPython stacks"
"""What comes before it is shown on the screen."""
_NO_STACK = ["no stack: it did not answer"]


class Watchdog:
    """Looks at the files of an attempt for ranks that are stuck or silent."""

    def __init__(self, attempt: Path, timeout_s: float, world: int = 0) -> None:
        """``world``: ranks that must show a first heartbeat, for which they may take longer."""
        self.attempt, self.timeout_s = attempt, timeout_s
        self._events = LinesTail(attempt, file_names.EVENTS)
        # Last beat of each rank, and when it was seen here; no beat yet counts as one to come.
        first_s = time.monotonic() + (heartbeat.PREPARES - 1) * timeout_s
        self._beats = dict.fromkeys(range(world), (0.0, first_s))

    def look(self, ended: Container[int] = ()) -> bool:
        """Returns whether some rank is stuck, or silent though it is not among ``ended``."""
        if any(line.get("event") == "rank_stuck" for line in self._events.read()):
            return True
        # Only this process's own clock counts, from when it saw a beat change: after a laptop has
        # slept all beats are old, and the clocks of machines differ.
        now_s = time.monotonic()
        for rank, beat in heartbeat.heartbeats(self.attempt).items():
            if rank not in self._beats or self._beats[rank][0] != beat:
                self._beats[rank] = beat, now_s
        return any(
            now_s - seen > self.timeout_s + SILENT_S
            for rank, (_, seen) in self._beats.items()
            if rank not in ended
        )


def investigate(
    run_dir: Path, attempt: int, pids: Mapping[int, int], interrupted: Callable[[], bool]
) -> Hang:
    """Finds out where all ranks stand, and writes ``hang.txt`` into the attempt.

    ``pids`` are the processes of the ranks that run on this machine. The wait for answers ends when
    ``interrupted`` returns True.
    """
    folder = file_names.attempt_dir(run_dir, attempt)
    beats = heartbeat.heartbeats(folder)
    # The signal makes the interpreter write the stacks even if a thread never lets go of it; the
    # request reaches ranks of other machines, whose heartbeat threads answer within seconds.
    for rank, pid in pids.items():
        if rank in beats:  # before its first beat the signal would kill it
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGUSR1)
    with contextlib.suppress(RunError):
        heartbeat.request_status(folder)
    silent = {rank: _why_silent(rank, pid, beats) for rank, pid in pids.items()}
    able = {rank for rank in beats if not silent.get(rank)}
    answers = _answers(folder, able, interrupted)
    now_s = heartbeat.file_clock(folder / file_names.ALIVE)
    ages_s = {rank: max(0.0, now_s - at) for rank, at in heartbeat.heartbeats(folder).items()}
    hang = Hang(folder, answers, silent, 0, ages_s)
    with contextlib.suppress(RunError):
        values, hang.world = records.read_plan(run_dir), records.read_world(run_dir)
        with contextlib.suppress(HiresError):  # another hires wrote it
            plan = Plan.from_dict(values)
            # Of several residents a process shows one wait alone.
            hang.stall = stall(plan, answers) if plan.resident == 1 else None
    with contextlib.suppress(RunError):
        write_atomically(folder / file_names.HANG, hang.page())
    return hang


def _answers(
    folder: Path, able: set[int], interrupted: Callable[[], bool]
) -> dict[int, RankStatus]:
    """Returns where the ranks stand, waiting a little for those that are able to answer."""
    answers: dict[int, RankStatus] = {}
    deadline = time.monotonic() + ANSWER_S
    while True:
        for rank in sorted(able - answers.keys()):
            status = heartbeat.read_status(folder, rank)
            if status is not None:
                answers[rank] = status
        if able <= answers.keys() or time.monotonic() > deadline or interrupted():
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


@dataclass
class Hang:
    """Where the ranks stand, and who waits for whom."""

    attempt: Path
    answers: Mapping[int, RankStatus]
    """Status of each rank that answered."""
    silent: Mapping[int, str]
    """Why each rank on this machine cannot answer; empty: it can."""
    world: int
    ages_s: Mapping[int, float] = field(default_factory=dict)
    """How old each rank's heartbeat is."""
    stall: Stall | None = None
    """Who waits for whom, if there is a plan."""

    @property
    def culprits(self) -> list[int]:
        """The ranks that keep the others from going on."""
        if self.stall is not None and (self.stall.culprits or self.stall.circle):
            return self.stall.culprits or self.stall.circle
        mute = [rank for rank in range(self.world) if rank not in self.answers]
        return mute or [rank for rank, where in self.answers.items() if not where.what]

    @property
    def calls(self) -> dict[int, RankCalls]:
        """The last communication calls of each rank that keeps them."""
        read = {rank: read_calls(rank, status.calls) for rank, status in self.answers.items()}
        return {rank: record for rank, record in read.items() if record is not None}

    @property
    def cause(self) -> str:
        """Why nothing moves, in one paragraph."""
        parts = [self._state_of(rank) for rank in self.culprits[:SHOWN_WAITS]]
        if self.stall is not None and self.stall.circle:
            parts = ["ranks wait for each other in a circle"]
        waits = self.stall.waits if self.stall is not None else []
        blamed = set(self.culprits)
        first = next((w for w in waits if blamed & set(w.others)), waits[0] if waits else None)
        if first is not None:
            parts.append(first.text)
        return "no progress: " + ("; ".join(parts) or "no rank answers")

    def page(self) -> str:
        """Returns the whole page."""
        lines = [self.cause, ""]
        if text := explanation(self.calls):
            lines += [f"calls: {text}"]
        if self.stall is not None:
            lines += [f"unmatched: {text}" for text in self.stall.unmatched[:SHOWN_WAITS]]
            others = len(self.stall.waits) - SHOWN_WAITS
            lines += [wait.text for wait in self.stall.waits[:SHOWN_WAITS]]
            lines += [f"and {others} more ranks wait"] if others > 0 else []
        # Culprits first; of the others as many as fit the page, and the rest in groups.
        order = list(dict.fromkeys([*self.culprits, *range(self.world)]))
        detailed = sorted(order[:SHOWN_RANKS])
        lines += ["", "where every rank stands"]
        lines += [f"  {self._state_of(rank)}" for rank in detailed]
        lines += [f"  {text}" for text in self._alike(order[SHOWN_RANKS:])]
        logs = self.attempt / file_names.LOGS
        lines += ["", f"Python stacks, innermost first (whole: {logs}/stacks-*.txt)"]
        for rank in detailed:
            lines += [f"  rank {rank}", *(f"    {frame}" for frame in self._frames(rank))]
        return "\n".join(lines) + "\n"

    def _alike(self, ranks: list[int]) -> Iterator[str]:
        """Yields how many of some ranks are at the same place."""
        places: dict[str, list[int]] = {}
        for rank in sorted(ranks):
            places.setdefault(self._place_of(rank), []).append(rank)
        for place, same in places.items():
            yield f"{len(same)} more, as rank {same[0]}, which {place}"

    def _place_of(self, rank: int) -> str:
        """Returns where a rank stands, without times: alike for all ranks at one place."""
        status = self.answers.get(rank)
        if status is None:
            unknown = "no reason is known" if rank in self.ages_s else "no sign of life"
            return f"does not answer: {self.silent.get(rank) or unknown}"
        where = f"step {status.step}" if status.step >= 0 else "before the first step"
        where = f"{status.action} of {where}" if status.action else where
        if not status.what:
            return f"is in {where} and waits for no rank"
        record = read_calls(rank, status.calls)
        call = record.waiting if record is not None else None
        called = f" ({call.text}, called at {call.site})" if call is not None else ""
        return f"is in {where} and waits in {status.what}{called}"

    def _state_of(self, rank: int) -> str:
        """Returns where a rank stands and since when, in one line."""
        status, age_s = self.answers.get(rank), self.ages_s.get(rank)
        if status is not None:
            since = f"{status.since_s:.1f} s"
            since = f", {since}" if status.what else f"; nothing moved for {since}"
        else:
            since = "" if age_s is None else f" (last heartbeat {age_s:.0f} s ago)"
        return f"rank {rank} {self._place_of(rank)}{since}"

    def _frames(self, rank: int) -> list[str]:
        """Returns the innermost frames of a rank's main thread."""
        data = reading.read_bytes(heartbeat.stacks_file(self.attempt, rank), [])
        if data is None:
            return _NO_STACK
        text = data.decode(errors="replace")
        main = text.rstrip().split("\n\n")[-1]  # the main thread comes last
        frames = [line.strip() for line in main.splitlines() if line.startswith("  File ")]
        return frames[:SHOWN_FRAMES] or _NO_STACK


def hang_head(attempt: Path) -> list[str]:
    """Returns the first part of an attempt's page, for the screen; nothing if there is none."""
    text = (reading.read_bytes(attempt / file_names.HANG, []) or b"").decode(errors="replace")
    return text.partition(_AFTER_HEAD)[0].rstrip().splitlines()
