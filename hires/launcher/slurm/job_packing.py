"""Runs several runs in one Slurm job: one after the other, and side by side where they fit.

Each run has a supervisor process of its own, whose exit code is all that this one reads, so a run
that fails does not stop the others. When Slurm preempts the job, the runs that run save their
state, and no other begins.
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

from hires.core.config.launcher_config import spread
from hires.core.errors import HiresError, RunError
from hires.core.store import records
from hires.core.store.attempts import Attempt
from hires.core.store.files import cannot_write
from hires.launcher.interface import CANCELLED
from hires.launcher.local.local_launcher import leave
from hires.launcher.ranks.spawn import die_with
from hires.launcher.slurm import job_script
from hires.launcher.slurm.allocation import Allocation, cores
from hires.launcher.slurm.job_attempts import attempts_of, say, take_attempt
from hires.launcher.supervision.interrupts import Interrupts

POLL_S = 0.2
"""How often the processes are polled."""
DIE_S = 1.0
"""If Slurm kills the whole job, this process dies as well within so long after a supervisor."""
LOOK_S = 2.0
"""How often the run folders are searched for a request to cancel."""


@dataclass
class PackedRun:
    """One of the runs."""

    path: Path
    """The run folder."""
    needs: list[int]
    """Cores that it keeps busy on each node."""
    alone: bool
    """Whether it needs the job for itself, because its port is fixed."""
    submitted: int
    """The attempt that was submitted."""
    number: int = 0
    """The attempt that is launched."""
    process: subprocess.Popen[bytes] | None = None
    preempted: bool = False
    """Whether SIGUSR2 was passed on to it."""
    ended: int = 0
    """Signals to end that were passed on to it."""
    over: bool = False
    """Whether another start of this job would not help: it cannot be started, another job has it,
    its supervisor died, or it was cancelled before its turn."""

    @classmethod
    def read(cls, path: Path, submitted: int, job: Allocation) -> PackedRun:
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

    def send(self, number: int) -> None:
        """Sends a signal to the supervisor, unless it has ended."""
        assert self.process is not None
        if self.process.poll() is None:
            self.process.send_signal(number)


class PackedRuns:
    """The runs of one job that wait and run."""

    def __init__(self, job: Allocation, runs: Sequence[PackedRun], module: str) -> None:
        """Takes the job, its runs in the order of their start, and the module of supervisors."""
        self.job = job
        self.waiting = list(runs)
        self.running: list[PackedRun] = []
        self._size = len(runs)
        self._module = module
        self._room = cores(job)
        self._codes: list[int] = []
        self._looked_s = time.monotonic()

    def run(self) -> int:
        """Runs them all, unless the job is preempted or ended; returns the exit code."""
        with Interrupts() as interrupts:
            while self.running or self.waiting:
                self._collect()
                if interrupts.count or interrupts.requests:
                    self._pass_on(interrupts)
                    if not self.running:
                        break
                else:
                    self._start_fitting()
                    self._end_cancelled()
                time.sleep(POLL_S)
        if interrupts.count:
            self._leave_waiting(interrupts.name)
            return CANCELLED
        return next((code for code in self._codes if code), 0)

    def _start_fitting(self) -> None:
        for run in list(self.waiting):
            if self._fits(run):
                self.waiting.remove(run)
                run.over = self._is_cancelled(run)
                if not run.over:
                    self._start(run)

    def _fits(self, run: PackedRun) -> bool:
        """Whether a run has room beside those that run now; one alone always has."""
        if not self.running:
            return True
        if run.alone or any(other.alone for other in self.running):
            return False
        needs = zip(*(one.needs for one in [run, *self.running]), strict=True)
        return all(sum(some) <= room for some, room in zip(needs, self._room, strict=True))

    def _start(self, run: PackedRun) -> None:
        """Starts the supervisor of a run; one that cannot be started has failed."""
        number: int | None = None
        log = run.path / job_script.LOG
        try:
            run.number = number = take_attempt(run.path, self.job, run.submitted, self._size)
            words = [sys.executable, "-u", "-m", self._module, "--packed"]
            with log.open("ab") as output:
                run.process = subprocess.Popen(
                    [*words, str(run.path), str(number)],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    preexec_fn=die_with(os.getpid(), signal.SIGTERM),
                )
        except (OSError, subprocess.SubprocessError, RunError) as error:
            why = error if isinstance(error, RunError) else cannot_write(log, error)
            self._give_up(run, number, f"its supervisor could not be started: {why}")
            return
        say(f"{run.path.name}: attempt {number} begins")
        self.running.append(run)

    def _collect(self) -> None:
        """Removes the runs that ended."""
        for run in list(self.running):
            assert run.process is not None
            code = run.process.poll()
            if code is None:
                continue
            self.running.remove(run)
            say(f"{run.path.name}: attempt {run.number} ended with code {code}")
            if Attempt(run.path, run.number).has_ended:
                self._codes.append(code)
                continue
            how = f"ended with code {code}"
            if code < 0:
                time.sleep(DIE_S)
                how = f"was killed by {signal.Signals(-code).name}"
            see = "" if code < 0 else f"; see {run.path / job_script.LOG}"
            self._give_up(run, run.number, f"its supervisor {how}, and left no exit.json{see}")

    def _give_up(self, run: PackedRun, number: int | None, cause: str) -> None:
        """Writes that a run failed whose own supervisor cannot; this job does not retry it.

        Args:
            run: the run.
            number: its attempt; None: there is none to write to.
            cause: why it failed.
        """
        say(f"{run.path.name}: {cause}")
        run.over = True
        self._codes.append(RunError.exit_code)
        if number is None:
            return
        try:
            leave(run.path, number, "failed", cause)
        except HiresError as error:  # it does not stop the other runs
            say(f"{run.path.name}: {error}")

    def _pass_on(self, interrupts: Interrupts) -> None:
        for run in self.running:
            if interrupts.requests and not run.preempted:
                run.preempted = True
                run.send(signal.SIGUSR2)
            while run.ended < interrupts.count:
                run.ended += 1
                run.send(interrupts.number)

    def _end_cancelled(self) -> None:
        """Ends the runs that a user cancelled, but not the job."""
        if time.monotonic() - self._looked_s < LOOK_S:
            return
        self._looked_s = time.monotonic()
        for run in self.running:
            if not run.ended and self._is_cancelled(run):
                run.ended += 1
                run.send(signal.SIGTERM)

    def _is_cancelled(self, run: PackedRun) -> bool:
        """Whether a user cancelled a run since this job has it.

        While a run waits to go on, the request stands in an attempt that is over.
        """
        numbers = attempts_of(run.path, self.job) or [run.submitted]
        return any(Attempt(run.path, number).is_cancelled for number in numbers)

    def _leave_waiting(self, why: str) -> None:
        """Writes that the runs which were not begun are cancelled with the job."""
        for run in self.waiting:
            cause = f"job {self.job.name} was stopped by {why} before its turn"
            with contextlib.suppress(RunError):  # another job has it, and writes how it ends
                number = take_attempt(run.path, self.job, run.submitted, self._size)
                leave(run.path, number, "cancelled", cause)
