"""Runs several runs in one Slurm job: one after the other, and side by side where they fit.

When Slurm preempts the job, the runs that run save their state, and no other begins.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hires.core.config.launcher_config import spread
from hires.core.errors import RunError
from hires.core.store import file_names, records
from hires.launcher.attempt_queue import AttemptQueue, Running
from hires.launcher.interface import CANCELLED
from hires.launcher.local.local_launcher import leave, say
from hires.launcher.slurm.allocation import Allocation, cores
from hires.launcher.slurm.job_attempts import JobRun


@dataclass(frozen=True)
class PackedRun:
    """One of the runs."""

    run: JobRun
    needs: Sequence[float]
    """Cores that it keeps busy on each node; all, if its port is fixed."""

    @classmethod
    def read(cls, run: JobRun) -> PackedRun:
        """Returns a run with what its folder says that it needs.

        Raises:
            RunError: the folder cannot be read.
        """
        config, world = records.read_config(run.path), int(records.read_plan(run.path)["world"])
        nodes = len(run.job.nodes)
        sizes = spread(world, nodes)
        each = math.inf if config.launcher.port else config.launcher.threads
        return cls(run, [size * each for size in sizes] + [0] * (nodes - len(sizes)))

    @property
    def path(self) -> Path:
        """The run folder."""
        return self.run.path


class PackedRuns(AttemptQueue[PackedRun]):
    """The runs of one job."""

    def __init__(self, job: Allocation, runs: Sequence[PackedRun], module: str) -> None:
        """Takes the job, its runs in the order of their start, and the module of supervisors."""
        super().__init__(runs, cores(job))
        self.job = job
        self.refused: list[PackedRun] = []
        """Those that this job cannot start, nor would another start of it."""
        self._words = [module, "--packed"]
        self._code = 0

    def run(self) -> int:
        """Runs them all, unless the job is preempted or ended; returns the exit code."""
        self.work()
        if not self.interrupts.count:
            return self._code
        for one in self.waiting:
            cause = f"job {self.job.name} was stopped by {self.interrupts.name} before its turn"
            with contextlib.suppress(RunError):  # another job has it, and writes how it ends
                leave(one.path, one.run.take_attempt(), "cancelled", cause)
        return CANCELLED

    def begin(self, task: PackedRun) -> None:
        """Starts the supervisor of a run unless the run was cancelled meanwhile."""
        if task.run.is_cancelled:
            return
        path = task.path
        try:
            number = task.run.take_attempt()
            words = [*self._words, str(path), str(number)]
            self.launch(task, number, words, path / file_names.JOB_LOG)
        except RunError as error:
            say(f"{path.name}: {error}")
            self.refused.append(task)
            self._code = self._code or RunError.exit_code
        else:
            say(f"{path.name}: attempt {number} begins")

    def ended(self, run: Running[PackedRun], code: int, state: str, cause: str | None) -> None:
        """Keeps the first exit code that tells of a failure."""
        say(f"{run.task.path.name}: attempt {run.attempt} ended with code {code}: {cause or state}")
        if state != "done" and not self._code:
            self._code = code if code > 0 else RunError.exit_code
