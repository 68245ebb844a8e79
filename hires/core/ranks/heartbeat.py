"""Is a rank alive, and does it move? A thread of the rank tells, by files that everybody can see.

    a<k>/alive/rank0000          touched every 5 s: its age is the heartbeat's
    a<k>/alive/asked             somebody wants to know what every rank is at
    a<k>/alive/rank0000.json     the answer
    a<k>/logs/stacks-rank0000.txt   and the Python stacks of its threads

Files work across machines, where signals do not. SIGUSR1 makes the interpreter itself write the
stacks, even if a thread that never comes back holds up all others. A rank that finds itself stuck
says ``rank_stuck`` in ``events.jsonl``; what becomes of the run is up to who started it. Once the
attempt has an ``exit.json`` it is over for everybody: a rank that is still there ends at once.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from hires.core.errors import RunError
from hires.core.ranks.activity import Doing, Standing
from hires.core.store import file_names, records
from hires.core.store.files import StrPath, cannot_write, write_atomically

BEAT_S = 5.0
"""How often a rank touches its file."""
LOOK_S = 1.0
"""How often it looks whether it is stuck or asked, at most."""
IDLE_SHARE = 0.05
"""A rank that used less of a core than this since it was last looked at does not compute."""


def alive_file(attempt: StrPath, rank: int) -> Path:
    """Returns the file that a rank touches."""
    return Path(attempt) / file_names.ALIVE / f"rank{rank:04d}"


def answer_file(attempt: StrPath, rank: int) -> Path:
    """Returns where a rank answers what it is at."""
    return alive_file(attempt, rank).with_suffix(".json")


def stacks_file(attempt: StrPath, rank: int) -> Path:
    """Returns where a rank's Python stacks go."""
    return Path(attempt) / file_names.LOGS / f"stacks-rank{rank:04d}.txt"


def ask(attempt: StrPath) -> None:
    """Asks all ranks of an attempt what they are at; they answer within seconds.

    Raises:
        RunError: the question cannot be written.
    """
    write_atomically(_question(attempt), "")


def heartbeats(attempt: StrPath) -> dict[int, float]:
    """Returns when every rank last touched its file, by the file system's clock, in seconds."""
    found: dict[int, float] = {}
    with contextlib.suppress(OSError), os.scandir(Path(attempt) / file_names.ALIVE) as entries:
        for entry in entries:
            number = entry.name.removeprefix("rank")
            if number.isdigit():
                with contextlib.suppress(OSError):
                    found[int(number)] = entry.stat().st_mtime
    return found


def file_clock(folder: StrPath) -> float:
    """Returns the time by the clock of a folder's file system, in seconds since the epoch.

    Where nothing can be written, as in somebody else's results, this machine's clock has to do.
    """
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


class FileClock:
    """The time by the clocks of file systems; that of each campaign is read once."""

    def __init__(self) -> None:
        self._offsets: dict[Path, float] = {}

    def now(self, run: Path) -> float:
        """Returns the time where a run is kept, in seconds since the epoch."""
        folder = run.parent
        if folder not in self._offsets:
            self._offsets[folder] = file_clock(folder) - time.time()
        return time.time() + self._offsets[folder]


@contextlib.contextmanager
def beating(
    run_dir: StrPath, attempt: int, rank: int, doing: Doing, timeout_s: float
) -> Iterator[None]:
    """Shows that this rank is alive, and whether it moves, while the block runs.

    Args:
        run_dir: the run folder.
        attempt: its attempt.
        rank: this process.
        doing: what its main thread is at.
        timeout_s: without a move for longer than this the rank is stuck.

    Raises:
        RunError: the files cannot be written.
    """
    folder = records.attempt_dir(run_dir, attempt)
    stacks = stacks_file(folder, rank)
    pulse = Pulse(Path(run_dir), attempt, rank, doing, timeout_s)
    file = _open(folder, rank)
    try:
        # In C, and at once: it works while another thread does not let go of the interpreter.
        faulthandler.register(signal.SIGUSR1, file, all_threads=True)
        with pulse:
            yield
    finally:
        faulthandler.unregister(signal.SIGUSR1)
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # who asks late must not kill the rank
        file.close()
        with contextlib.suppress(OSError):
            if not stacks.stat().st_size:
                stacks.unlink()


class Pulse:
    """The thread that beats; it ends with the block."""

    def __init__(
        self, run_dir: Path, attempt: int, rank: int, doing: Doing, timeout_s: float
    ) -> None:
        self.run_dir, self.attempt, self.rank = run_dir, attempt, rank
        self.doing, self.timeout_s = doing, timeout_s
        self.folder = records.attempt_dir(run_dir, attempt)
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pulse", daemon=True)
        self._mark: tuple[object, ...] = ()
        self._moved_s = self._idle_s = self._seen_s = time.perf_counter()
        self._cpu_s = time.process_time()
        self._told = False
        self._end_file = self.folder / file_names.EXIT
        self._may_end = not self._end_file.exists()

    def __enter__(self) -> Pulse:
        """Beats for the first time, when signals are safe; then the thread takes over."""
        try:
            alive_file(self.folder, self.rank).touch()
        except OSError as error:
            raise cannot_write(alive_file(self.folder, self.rank), error) from error
        self._thread.start()
        return self

    def __exit__(self, *failure: object) -> None:
        """Ends the thread."""
        self._end.set()
        self._thread.join(LOOK_S)

    def _run(self) -> None:
        """Beats, looks, and answers, until the end."""
        beat_s, answered = time.monotonic(), False
        while not self._end.wait(min(LOOK_S, self.timeout_s / 4)):
            # A full disk or a folder that was removed does not stop a rank that computes.
            with contextlib.suppress(OSError, RunError):
                if time.monotonic() - beat_s >= BEAT_S:
                    beat_s = time.monotonic()
                    os.utime(alive_file(self.folder, self.rank))
                self._look()
                self._end_if_over()
                if not answered and _question(self.folder).exists():
                    answered = True
                    self._answer()

    def _look(self) -> None:
        """Says once that the rank is stuck."""
        mark, now_s, cpu_s = self.doing.mark(), time.perf_counter(), time.process_time()
        computes = cpu_s - self._cpu_s > IDLE_SHARE * (now_s - self._seen_s)
        self._cpu_s, self._seen_s = cpu_s, now_s
        if mark != self._mark:
            self._mark, self._moved_s, self._idle_s, self._told = mark, now_s, now_s, False
            return
        if computes:
            self._idle_s = now_s
        # Whoever computes may take as long as it likes, until somebody waits for it too long.
        waits = self.doing.now is not None
        still_s = now_s - (self._moved_s if waits else self._idle_s)
        most_s = max(self.timeout_s, self.doing.patience_s)
        if self._told or still_s < most_s or not (waits or self.doing.in_step):
            return
        self._told = True
        standing = self._standing()
        told = {"step": standing.step, "action": standing.action, "what": standing.what}
        told["since_s"] = round(standing.since_s, 3)
        records.event(self.run_dir, self.attempt, "rank_stuck", rank=self.rank, **told)

    def _end_if_over(self) -> None:
        """Ends this process if its attempt was ended without it.

        A cluster gives up a node that does not answer, and the run goes on elsewhere, in the same
        folder; what still runs on the node would write into it, too.
        """
        if self._may_end and self._end_file.exists():
            os.kill(os.getpid(), signal.SIGTERM)

    def _answer(self) -> None:
        """Tells what the rank is at, and writes its stacks unless the signal did it."""
        text = json.dumps(self._standing().to_dict())
        stacks = stacks_file(self.folder, self.rank)
        if not stacks.stat().st_size:
            with stacks.open("a", encoding="utf-8") as file:
                faulthandler.dump_traceback(file, all_threads=True)
        write_atomically(answer_file(self.folder, self.rank), text)

    def _standing(self) -> Standing:
        """Returns where the main thread stands."""
        return self.doing.standing(self.rank, time.perf_counter() - self._moved_s)


def _open(folder: Path, rank: int) -> TextIO:
    """Makes the folders; returns the file for the stacks, open."""
    stacks = stacks_file(folder, rank)
    try:
        for file in (alive_file(folder, rank), stacks):
            file.parent.mkdir(parents=True, exist_ok=True)
        return stacks.open("w", encoding="utf-8")
    except OSError as error:
        raise cannot_write(stacks, error) from error


def _question(attempt: StrPath) -> Path:
    """Returns the file by which all ranks are asked."""
    return Path(attempt) / file_names.ALIVE / "asked"
