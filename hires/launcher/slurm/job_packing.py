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

from hires.core.config.launcher_config import spread
from hires.core.errors import HiresError, RunError
from hires.core.store import file_names, records
from hires.core.store.attempts import Attempt
from hires.core.store.files import cannot_write
from hires.launcher.interface import CANCELLED
from hires.launcher.local.local_launcher import leave, say
from hires.launcher.ranks.spawn import die_with
from hires.launcher.slurm.allocation import Allocation, cores
from hires.launcher.slurm.job_attempts import JobRun
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

    run: JobRun
    needs: list[int]
    """Cores that it keeps busy on each node."""
    alone: bool
    """Whether it needs the job for itself, because its port is fixed."""
    number: int | None = None
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
    def read(cls, run: JobRun) -> PackedRun:
        """Returns a run with what its folder says that it needs.

        Raises:
            RunError: the folder cannot be read.
        """
        config, world = records.read_config(run.path), int(records.read_plan(run.path)["world"])
        sizes = spread(world, len(run.job.nodes))
        sizes += [0] * (len(run.job.nodes) - len(sizes))
        needs = [size * config.launcher.threads for size in sizes]
        return cls(run, needs, config.launcher.port != 0)

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
                    for one in list(self.waiting):
                        if self._fits(one):
                            self.waiting.remove(one)
                            self._start(one)
                    self._end_cancelled()
                time.sleep(POLL_S)
        if interrupts.count:
            self._leave_waiting(interrupts.name)
            return CANCELLED
        return next((code for code in self._codes if code), 0)

    def _fits(self, one: PackedRun) -> bool:
        """Whether a run has room beside those that run now; one alone always has."""
        if not self.running:
            return True
        if one.alone or any(other.alone for other in self.running):
            return False
        needs = zip(*(other.needs for other in [one, *self.running]), strict=True)
        return all(sum(some) <= room for some, room in zip(needs, self._room, strict=True))

    def _start(self, one: PackedRun) -> None:
        """Starts the supervisor of a run unless the run was cancelled meanwhile."""
        one.over = one.run.is_cancelled
        if one.over:
            return
        path = one.run.path
        log = path / file_names.JOB_LOG
        try:
            one.number = one.run.take_attempt()
            words = [sys.executable, "-u", "-m", self._module, "--packed"]
            with log.open("ab") as output:
                one.process = subprocess.Popen(
                    [*words, str(path), str(one.number)],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    preexec_fn=die_with(os.getpid(), signal.SIGTERM),
                )
        except (OSError, subprocess.SubprocessError, RunError) as error:
            why = error if isinstance(error, RunError) else cannot_write(log, error)
            self._give_up(one, f"its supervisor could not be started: {why}")
            return
        say(f"{path.name}: attempt {one.number} begins")
        self.running.append(one)

    def _collect(self) -> None:
        for one in list(self.running):
            assert one.process is not None
            assert one.number is not None
            code = one.process.poll()
            if code is None:
                continue
            self.running.remove(one)
            path = one.run.path
            say(f"{path.name}: attempt {one.number} ended with code {code}")
            if Attempt(path, one.number).has_ended:
                self._codes.append(code)
                continue
            cause = "its supervisor {}, and left no exit.json"
            if code < 0:
                time.sleep(DIE_S)
                cause = cause.format(f"was killed by {signal.Signals(-code).name}")
            else:
                log = path / file_names.JOB_LOG
                cause = f"{cause.format(f'ended with code {code}')}; see {log}"
            self._give_up(one, cause)

    def _give_up(self, one: PackedRun, cause: str) -> None:
        """Writes that a run failed whose own supervisor cannot; this job does not retry it."""
        say(f"{one.run.path.name}: {cause}")
        one.over = True
        self._codes.append(RunError.exit_code)
        if one.number is None:
            return  # there is no attempt to write to
        try:
            leave(one.run.path, one.number, "failed", cause)
        except HiresError as error:  # it does not stop the other runs
            say(f"{one.run.path.name}: {error}")

    def _pass_on(self, interrupts: Interrupts) -> None:
        for one in self.running:
            if interrupts.requests and not one.preempted:
                one.preempted = True
                one.send(signal.SIGUSR2)
            while one.ended < interrupts.count:
                one.ended += 1
                one.send(interrupts.number)

    def _end_cancelled(self) -> None:
        """Ends the runs that a user cancelled, but not the job."""
        if time.monotonic() - self._looked_s < LOOK_S:
            return
        self._looked_s = time.monotonic()
        for one in self.running:
            if not one.ended and one.run.is_cancelled:
                one.ended += 1
                one.send(signal.SIGTERM)

    def _leave_waiting(self, why: str) -> None:
        """Writes that the runs which were not begun are cancelled with the job."""
        for one in self.waiting:
            cause = f"job {self.job.name} was stopped by {why} before its turn"
            with contextlib.suppress(RunError):  # another job has it, and writes how it ends
                leave(one.run.path, one.run.take_attempt(), "cancelled", cause)
