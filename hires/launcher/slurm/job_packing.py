"""How do several runs share one Slurm job?

One after the other, and side by side where the job has room: each has a supervisor of its own, a
process that tells this one nothing but how it ended. So a run that fails takes no other along, and
when Slurm tells the job to make way those that run save their state, and no other begins.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hires.core.errors import HiresError, RunError
from hires.core.store import file_names, records
from hires.core.store.attempts import Attempt
from hires.core.store.files import cannot_write
from hires.launcher.interface import CANCELLED
from hires.launcher.local import local_launcher
from hires.launcher.ranks.spawn import die_with
from hires.launcher.slurm import job_script
from hires.launcher.slurm.allocation import Allocation, cores, spread
from hires.launcher.slurm.batch import attempts_of, number_of
from hires.launcher.supervision.interrupts import Interrupts

POLL_S = 0.2
"""How often the processes are looked at."""
DIE_S = 1.0
"""If Slurm kills the whole job, this process goes as well within so long after a supervisor."""
LOOK_S = 2.0
"""How often the run folders are asked whether somebody cancelled one of the runs."""


@dataclass
class Packed:
    """One of the runs."""

    path: Path
    """The run folder."""
    needs: list[int]
    """Cores that it keeps busy on each node."""
    alone: bool
    """Whether it may have no neighbours."""
    submitted: int
    """The attempt that was submitted."""
    number: int = 0
    """The attempt that is launched."""
    process: subprocess.Popen[bytes] | None = None
    made_way: bool = False
    """Whether it was told to make way."""
    ended: int = 0
    """Signals to end that were passed on to it."""
    over: bool = False
    """Whether another start of this job would not help: it cannot be started, another job has it,
    its supervisor died, or somebody cancelled it before its turn."""

    @classmethod
    def read(cls, path: Path, submitted: int, job: Allocation) -> Packed:
        """Returns the run of a folder.

        Args:
            path: the folder.
            submitted: the attempt that was submitted.
            job: this job.

        Raises:
            RunError: it cannot be read.
        """
        config, world = records.read_config(path), int(records.read_plan(path)["world"])
        sizes = spread(world, len(job.nodes))
        sizes += [0] * (len(job.nodes) - len(sizes))
        needs = [size * config.launcher.threads for size in sizes]
        return cls(path, needs, config.launcher.port != 0, submitted)

    @property
    def folder(self) -> Path:
        """Folder of the attempt that is launched."""
        return file_names.attempt_dir(self.path, self.number)


class Pack:
    """Runs that wait, and run."""

    def __init__(self, job: Allocation, runs: Sequence[Packed], module: str) -> None:
        """Takes the job, its runs in the order of their start, and what supervises each."""
        self.job = job
        self.waiting = list(runs)
        self.running: list[Packed] = []
        self._size = len(runs)
        self._module = module
        self._room = cores(job)
        self._codes: list[int] = []
        self._looked_s = time.monotonic()

    def run(self) -> int:
        """Runs them all, unless the job is to make way or to end; returns the exit code."""
        with Interrupts() as interrupts:
            while self.running or self.waiting:
                self._collect()
                if interrupts.count or interrupts.requests:
                    self._pass_on(interrupts)
                    if not self.running:
                        break
                else:
                    self._start_some()
                    self._look_for_cancelled()
                time.sleep(POLL_S)
        if interrupts.count:
            self._leave_others(interrupts.name)
            return CANCELLED
        return next((code for code in self._codes if code), 0)

    def _start_some(self) -> None:
        """Starts what fits, the first in order first."""
        for run in list(self.waiting):
            if not self._fits(run):
                continue
            self.waiting.remove(run)
            run.over = self._is_cancelled(run)
            if not run.over:
                self._start(run)

    def _fits(self, run: Packed) -> bool:
        """Whether a run has room beside those that run now; one alone always has."""
        if not self.running:
            return True
        if run.alone or any(other.alone for other in self.running):
            return False
        needs = zip(*(one.needs for one in [run, *self.running]), strict=True)
        return all(sum(some) <= room for some, room in zip(needs, self._room, strict=True))

    def _start(self, run: Packed) -> None:
        """Starts the supervisor of a run; one that cannot be started has failed."""
        number: int | None = None
        try:
            run.number = number = number_of(run.path, self.job, run.submitted, self._size)
            words = [sys.executable, "-u", "-m", self._module, "--packed"]
            with (run.path / job_script.LOG).open("ab") as output:
                run.process = subprocess.Popen(
                    [*words, str(run.path), str(run.number)],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    preexec_fn=die_with(os.getpid(), signal.SIGTERM),
                )
        except (OSError, subprocess.SubprocessError, RunError) as error:
            cause = str(
                error
                if isinstance(error, RunError)
                else cannot_write(run.path / job_script.LOG, error)
            )
            self._give_up(run, number, f"its supervisor could not be started: {cause}")
            return
        _say(f"{run.path.name}: attempt {run.number} begins")
        self.running.append(run)

    def _collect(self) -> None:
        """Takes in the runs that ended."""
        for run in list(self.running):
            assert run.process is not None
            code = run.process.poll()
            if code is None:
                continue
            self.running.remove(run)
            _say(f"{run.path.name}: attempt {run.number} ended with code {code}")
            if Attempt.at(run.folder).has_ended:
                self._codes.append(code)
                continue
            if code < 0:
                time.sleep(DIE_S)
            self._give_up(run, run.number, _silent(run.path, code))

    def _give_up(self, run: Packed, number: int | None, cause: str) -> None:
        """Writes down that a run failed whose own supervisor cannot: this job tries it no more.

        Args:
            run: the run.
            number: its attempt; None: there is none to write to.
            cause: why it failed.
        """
        _say(f"{run.path.name}: {cause}")
        run.over = True
        self._codes.append(RunError.exit_code)
        if number is None:
            return
        try:
            local_launcher.leave(run.path, number, "failed", cause)
        except HiresError as error:  # the other runs are as good as before
            _say(f"{run.path.name}: {error}")

    def _pass_on(self, interrupts: Interrupts) -> None:
        """Passes on to each run that the job makes way, or what ends it."""
        for run in self.running:
            if interrupts.requests and not run.made_way:
                run.made_way = True
                _send(run, signal.SIGUSR2)
            while run.ended < interrupts.count:
                run.ended += 1
                _send(run, interrupts.number)

    def _look_for_cancelled(self) -> None:
        """Ends the runs that somebody cancelled, but not the job."""
        if time.monotonic() - self._looked_s < LOOK_S:
            return
        self._looked_s = time.monotonic()
        for run in self.running:
            if not run.ended and self._is_cancelled(run):
                run.ended += 1
                _send(run, signal.SIGTERM)

    def _is_cancelled(self, run: Packed) -> bool:
        """Whether somebody cancelled a run since this job has it.

        Who did so while the run waited to go on could only say it in an attempt that was over.
        """
        numbers = attempts_of(run.path, self.job) or [run.submitted]
        return any(Attempt(run.path, number).is_cancelled for number in numbers)

    def _leave_others(self, why: str) -> None:
        """Writes down that the runs which were not begun are cancelled with the job."""
        for run in self.waiting:
            cause = f"job {self.job.name} was stopped by {why} before its turn"
            with contextlib.suppress(RunError):  # another job has it, and tells how it ends
                number = number_of(run.path, self.job, run.submitted, self._size)
                local_launcher.leave(run.path, number, "cancelled", cause)


def _silent(path: Path, code: int) -> str:
    """Returns how a supervisor ended that left no ``exit.json``."""
    if code < 0:
        return f"its supervisor was killed by {signal.Signals(-code).name}, and left no word"
    return f"its supervisor ended with code {code}, and left no word; see {path / job_script.LOG}"


def _send(run: Packed, number: int) -> None:
    """Sends a signal to the supervisor of a run, unless it has ended."""
    assert run.process is not None
    if run.process.poll() is None:
        run.process.send_signal(number)


def _say(text: str) -> None:
    """Writes a line to the array's log."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
