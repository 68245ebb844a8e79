"""Writes the heartbeat of a rank: files from which other machines see whether it lives and moves.

    rank: main thread      F0 ---- wait ---------------------------------- (stuck)
          heartbeat thread  |    |    |    |    |    |    |    |
                            touch every 5 s                look: no move for comm.timeout_s
                            v                              v
    a<k>/alive/rank0000     mtime is the heartbeat         an event "rank_stuck"
    a<k>/alive/asked        a launcher requests the status of every rank
    a<k>/preempt            a launcher requests that every rank saves its state and ends (SIGUSR2)
    a<k>/alive/rank0000.json     the status
    a<k>/logs/stacks-rank0000.txt   the Python stacks of all threads

Files work across machines, where signals do not. The launcher decides what becomes of a stuck rank.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import itertools
import json
import os
import signal
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from hires.core.config.fields import build
from hires.core.errors import ConfigError, RunError
from hires.core.ranks.call_records import CallRing
from hires.core.ranks.timeline import COLLECTIVE, Recorder
from hires.core.store import file_names, provenance, records
from hires.core.store.attempts import Attempt
from hires.core.store.file_names import StrPath, attempt_dir
from hires.core.store.files import cannot_write, write_atomically
from hires.core.store.reading import read_json

BEAT_S = 5.0
"""How often a rank touches its file."""
LOOK_S = 1.0
"""The longest time between two looks for a lack of progress or a request."""
PREPARES = 15
"""A rank that prepares its steps, as by opening data, may be idle for so many ``timeout_s``."""
IDLE_SHARE = 0.05
"""A rank that used less of a core than this since the last look does not compute."""


class Op(NamedTuple):
    """A communication that a rank waits in, or has left."""

    what: str
    """In words, as ``a receive from rank 1``."""
    begin_s: float
    """On the clock of ``time.perf_counter``."""
    peer: int = -1
    """The other rank of a message; -1: it is no message."""
    tag: int = -1
    """Of the message, as the plan counts."""
    ranks: tuple[int, ...] = ()
    """All members, if it is a collective."""
    number: int = -1
    """Of the call in one of :attr:`Activity.rings`; -1: it is none of these."""
    operation: str = ""
    """As ``recv`` or ``all_reduce``; empty: no operation of a step."""


@dataclass
class RankStatus:
    """Where a rank stands."""

    rank: int
    step: int = -1
    """From 0; -1: it has not begun one."""
    action: str = ""
    """As ``F0``; empty between actions."""
    what: str = ""
    """The communication that it waits in; empty: it computes, reads or sleeps."""
    peer: int = -1
    tag: int = -1
    ranks: list[int] = field(default_factory=list)
    nth: int = -1
    """Collectives of this action that came before, if it waits in one; -1: it does not."""
    since_s: float = 0.0
    """How long it has been there, in seconds."""
    calls: dict[str, Any] = field(default_factory=dict)
    """The fields of its ``RankCalls``, if it keeps its calls."""
    operation: str = ""
    """That it waits in, as ``recv`` or ``all_reduce``; empty: no operation of a step."""


class Activity:
    """What this process waits in. The main thread writes; another thread may read at any time."""

    def __init__(self) -> None:
        self.now: Op | None = None
        self.recorder: Recorder | None = None
        """Holds step and action, once the rank has one."""
        self.still_s = 0.0
        """A rank may stand still for so long, if that is longer than ``comm.timeout_s``."""
        self.rings: list[CallRing] = []
        """The calls in each of its worlds, compared where ranks wait for each other."""
        self.ended_s = time.perf_counter()
        """When the last communication ended."""
        self._count = 0

    def begin(
        self,
        what: str,
        peer: int = -1,
        tag: int = -1,
        ranks: tuple[int, ...] = (),
        number: int = -1,
        operation: str = "",
    ) -> Op | None:
        """Notes that a communication begins; pass what comes back to :meth:`end`."""
        outer = self.now
        if outer is not None:  # a message of a collective
            ranks, operation = ranks or outer.ranks, outer.operation or operation
            number = outer.number if number < 0 else number
        self.now = Op(what, time.perf_counter(), peer, tag, ranks, number, operation)
        return outer

    def end(self, outer: Op | None) -> None:
        """Notes that the communication has ended; ``outer`` is the one around it, if any."""
        if self.now is not None:
            self.ended_s = time.perf_counter()
            self._count += 1
        self.now = outer

    @contextlib.contextmanager
    def may_stand_still(self, most_s: float) -> Iterator[None]:
        """Allows the rank to stand still for ``most_s`` seconds in the block, as at large files."""
        self.still_s = most_s
        try:
            yield
        finally:
            self._count += 1  # a move: what follows has the usual time
            self.still_s = 0.0

    def mark(self) -> tuple[Any, ...]:
        """Returns a value that changes with every communication, action and step."""
        recorder = self.recorder
        if recorder is None or not recorder.steps:
            return (self._count, self.now)
        step = recorder.steps[-1]
        spans = len(step.spans) + step.dropped
        return (self._count, self.now, step.step, recorder.action, spans)

    def status(self, rank: int, since_s: float) -> RankStatus:
        """Returns where the rank stands; ``since_s`` counts if it waits in no communication."""
        status = RankStatus(rank, since_s=since_s)
        if self.recorder is not None and self.recorder.steps:
            status.step, status.action = self.recorder.steps[-1].step, self.recorder.action
        now = self.now
        if now is not None:
            status.what, status.operation = now.what, now.operation
            status.peer, status.tag = now.peer, now.tag
            status.ranks, status.since_s = list(now.ranks), time.perf_counter() - now.begin_s
            if now.ranks and status.action and self.recorder is not None:
                spans = reversed(self.recorder.steps[-1].spans)
                own = itertools.takewhile(lambda span: span.action == status.action, spans)
                status.nth = sum(span.kind == COLLECTIVE for span in own)
        if self.rings:
            number = -1 if now is None else now.number
            ring = next((one for one in self.rings if one.has(number)), self.rings[0])
            status.calls = asdict(ring.record(rank, number, status.since_s))
        return status


def alive_file(attempt: StrPath, rank: int) -> Path:
    """Returns the file that a rank touches."""
    return Path(attempt) / file_names.ALIVE / f"rank{rank:04d}"


def status_file(attempt: StrPath, rank: int) -> Path:
    """Returns where a rank writes its status when it is requested."""
    return alive_file(attempt, rank).with_suffix(".json")


def read_status(attempt: StrPath, rank: int) -> RankStatus | None:
    """Returns the status that a rank wrote on request; None if it has not written one."""
    with contextlib.suppress(ConfigError):  # not there yet, or of another hires
        return build(RankStatus, read_json(status_file(attempt, rank), []))
    return None


def stacks_file(attempt: StrPath, rank: int) -> Path:
    """Returns where a rank's Python stacks go."""
    return Path(attempt) / file_names.LOGS / f"stacks-rank{rank:04d}.txt"


def request_status(attempt: StrPath) -> None:
    """Makes all ranks write their status within seconds; raises RunError if it cannot."""
    write_atomically(_request(attempt), "")


def heartbeats(attempt: StrPath) -> dict[int, float]:
    """Returns when every rank last touched its file, by the file system's clock, in seconds."""
    beats: dict[int, float] = {}
    with contextlib.suppress(OSError):  # reading the folder may fail too, as with NFS
        for file in (Path(attempt) / file_names.ALIVE).glob("rank*[0-9]"):
            with contextlib.suppress(OSError, ValueError):
                beats[int(file.name.removeprefix("rank"))] = file.stat().st_mtime
    return beats


def file_clock(folder: StrPath) -> float:
    """Returns the time by a folder's file system; this machine's if nothing can be written."""
    probe = Path(folder) / f".clock-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    try:
        probe.touch()
        return probe.stat().st_mtime
    except OSError:
        return time.time()
    finally:
        with contextlib.suppress(OSError):
            probe.unlink()


def last_sign(attempt: StrPath) -> float:
    """Returns when an attempt last showed that it runs, by the file system's clock, in seconds."""
    signs = list(heartbeats(attempt).values())
    if not signs:  # its ranks have not come that far
        for name in (file_names.EVENTS, file_names.JOB, file_names.ENV):
            with contextlib.suppress(OSError):
                signs.append((Path(attempt) / name).stat().st_mtime)
    return max(signs, default=0.0)


@functools.cache
def clock_ahead_s(folder: Path) -> float:
    """Returns how far a file system's clock is ahead of this machine's; it is read once."""
    return file_clock(folder) - time.time()


@contextlib.contextmanager
def beat(
    run_dir: StrPath, attempt: int, rank: int, activity: Activity, timeout_s: float
) -> Iterator[None]:
    """Shows in files that this rank lives, and whether it moves; RunError: they cannot be written.

    Without a move of its ``activity`` for longer than ``timeout_s`` seconds the rank is stuck.
    """
    thread = HeartbeatThread(run_dir, attempt, rank, activity, timeout_s)
    require_launcher(Attempt(run_dir, attempt))  # from here on the end of the parent is seen
    stacks = thread.stacks
    with contextlib.ExitStack() as stack:
        try:
            for file in (thread.file, stacks):
                file.parent.mkdir(parents=True, exist_ok=True)
            output = stack.enter_context(stacks.open("w", encoding="utf-8"))
            # In C, and at once: it works while another thread does not let go of the interpreter.
            faulthandler.register(signal.SIGUSR1, output, all_threads=True)
            # A late request must not kill the rank.
            stack.callback(signal.signal, signal.SIGUSR1, signal.SIG_IGN)
            stack.callback(faulthandler.unregister, signal.SIGUSR1)
            thread.file.touch()  # the first beat: signals are safe now
        except OSError as error:
            raise cannot_write(thread.file, error) from error
        thread.start()
        try:
            yield
        finally:
            thread.stopped.set()
            thread.join(LOOK_S)
            with contextlib.suppress(OSError):
                if not stacks.stat().st_size:
                    stacks.unlink()


def require_launcher(attempt: Attempt) -> None:
    """Refuses to begin a rank whose launcher or attempt has ended: RunError: none would end it."""
    if attempt.has_ended or provenance.lives(attempt.launched) is False:
        raise RunError(f"the launcher of {attempt.folder} has ended before this rank began")


class HeartbeatThread(threading.Thread):
    """The thread that touches the rank's file and looks for a lack of progress."""

    def __init__(
        self, run_dir: StrPath, attempt: int, rank: int, activity: Activity, timeout_s: float
    ) -> None:
        super().__init__(name="heartbeat", daemon=True)
        self.run_dir, self.attempt, self.rank = run_dir, attempt, rank
        self.activity, self.timeout_s = activity, timeout_s
        self.folder = attempt_dir(run_dir, attempt)
        self.file, self.stacks = alive_file(self.folder, rank), stacks_file(self.folder, rank)
        self.stopped = threading.Event()
        self._mark: tuple[object, ...] = ()
        self._moved_s = self._idle_s = self._seen_s = time.perf_counter()
        self._cpu_s = time.process_time()
        self._is_reported = False
        self._parent = os.getppid()
        self._exit_file = self.folder / file_names.EXIT

    def run(self) -> None:
        """Touches the file, looks for progress and writes the status, until it is stopped."""
        beat_s, is_answered, is_preempted = time.monotonic(), False, False
        while not self.stopped.wait(min(LOOK_S, self.timeout_s / 4)):
            if os.getppid() != self._parent:  # what started the ranks was killed
                os.kill(os.getpid(), signal.SIGKILL)
            # A full disk or a folder that was removed does not stop a rank that computes.
            with contextlib.suppress(OSError, RunError):
                if not is_preempted and (self.folder / file_names.PREEMPT).exists():
                    is_preempted = True
                    os.kill(os.getpid(), signal.SIGUSR2)
                if time.monotonic() - beat_s >= BEAT_S:
                    beat_s = time.monotonic()
                    os.utime(self.file)
                self._look()
                # A cluster gives up a node that does not answer, and the run goes on elsewhere in
                # the same folder: a rank of the attempt that was given up must not write there.
                if self._exit_file.exists():
                    os.kill(os.getpid(), signal.SIGTERM)
                if not is_answered and _request(self.folder).exists():
                    is_answered = True
                    status = json.dumps(asdict(self._status()))
                    if not self.stacks.stat().st_size:  # the signal did not write them
                        with self.stacks.open("a", encoding="utf-8") as file:
                            faulthandler.dump_traceback(file, all_threads=True)
                    write_atomically(status_file(self.folder, self.rank), status)

    def _look(self) -> None:
        """Reports once that the rank is stuck.

        A wait in a communication counts from the last move, however much the process computes. A
        rank outside communication is stuck only if it neither moves nor computes, before its first
        step for much longer:

            move            compute...........  sleep...........  -> stuck
            ^ _moved_s                        ^ _idle_s         ^ _idle_s + timeout_s
        """
        mark, now_s, cpu_s = self.activity.mark(), time.perf_counter(), time.process_time()
        computes = cpu_s - self._cpu_s > IDLE_SHARE * (now_s - self._seen_s)
        self._cpu_s, self._seen_s = cpu_s, now_s
        if mark != self._mark:
            self._mark, self._moved_s, self._idle_s = mark, now_s, now_s
            self._is_reported = False
            return
        if computes:
            self._idle_s = now_s
        waits, recorder = self.activity.now is not None, self.activity.recorder
        still_s = now_s - (self._moved_s if waits else self._idle_s)
        most_s = max(self.timeout_s, self.activity.still_s)
        in_step = recorder is not None and bool(recorder.steps)
        if self._is_reported or still_s < most_s * (1 if waits or in_step else PREPARES):
            return
        self._is_reported, status = True, self._status()
        facts = {"step": status.step, "action": status.action, "what": status.what}
        facts["since_s"] = round(status.since_s, 3)
        records.rank_event(self.run_dir, self.attempt, "rank_stuck", self.rank, **facts)

    def _status(self) -> RankStatus:
        return self.activity.status(self.rank, time.perf_counter() - self._moved_s)


def _request(attempt: StrPath) -> Path:
    return Path(attempt) / file_names.ALIVE / "asked"
