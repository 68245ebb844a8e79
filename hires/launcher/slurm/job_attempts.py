"""Decides which attempt of a run a Slurm job makes, and whether the run needs another one.

Slurm starts one job again and again: after a time limit, a preemption or the failure of a node.
Each start makes the next attempt of its run. All state is in the run folder, none in the job.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from hires.core.config.launcher_config import spread
from hires.core.store import attempts, records, rundir
from hires.core.store.attempts import Attempt
from hires.core.store.file_names import attempt_dir, attempt_numbers
from hires.launcher.end_reasons import restarts
from hires.launcher.local.local_launcher import leave
from hires.launcher.slurm.allocation import Allocation
from hires.launcher.slurm.job_script import note_job
from hires.launcher.status import running_elsewhere


def is_restarted() -> bool:
    """Whether this is not the job's first start."""
    return os.environ.get("SLURM_RESTART_COUNT", "0") != "0"


@dataclass(frozen=True)
class JobRun:
    """A run that a job makes."""

    path: Path
    """The run folder."""
    job: Allocation
    submitted: int | None = None
    """The attempt that was submitted; None: the script was submitted by hand."""
    wanted: int = 1
    """How many complete attempts the job is to make."""
    pack: int = 1
    """How many runs share the job."""

    @cached_property
    def needs(self) -> Sequence[float]:
        """Cores that it keeps busy on each node, all if its port is fixed; a RunError: unknown."""
        config, world = records.read_config(self.path), int(records.read_plan(self.path)["world"])
        each = math.inf if config.launcher.port else config.launcher.threads
        nodes = len(self.job.nodes)
        sizes = spread(world, nodes)
        return [size * each for size in sizes] + [0] * (nodes - len(sizes))

    @property
    def own(self) -> list[Attempt]:
        """The attempts that are this job's, in order."""
        every = (Attempt(self.path, number) for number in attempt_numbers(self.path))
        return [attempt for attempt in every if attempt.job_name == self.job.name]

    @property
    def timeouts(self) -> int:
        """How many of them reached the time limit of the job."""
        return sum(attempt.exit.get("reason") == "timeout" for attempt in self.own)

    @property
    def is_cancelled(self) -> bool:
        """Whether a user cancelled the run since this job has it.

        While a run waits to go on, the request stands in an attempt that is over.
        """
        own = self.own or [Attempt(self.path, self.submitted or 0)]
        return any(attempt.is_cancelled for attempt in own)

    @property
    def is_over(self) -> bool:
        """Whether the run was completed since this job has it: a run may be made again."""
        own = self.own
        return bool(own) and any(n >= own[0].number for n in rundir.done_attempts(self.path))

    @property
    def is_open(self) -> bool:
        """Whether the run still has something to do.

        That is so if it was never begun, left no ``exit.json``, or was preempted and may go on.
        What was stopped with the whole job has something to do, too: after the failure of a node
        Slurm starts the job again. What was submitted by hand runs what is not complete.
        """
        own = self.own
        if not own:
            return self._is_fresh() or records.done_attempt(self.path) is None
        end = own[-1].exit
        if not end:
            return True
        if end["state"] == "done":
            return [attempt.exit.get("state") for attempt in own].count("done") < self.wanted
        if end["state"] == "cancelled":
            return not own[-1].is_cancelled
        if end.get("reason") == "timeout":
            return self.timeouts <= records.read_config(self.path).launcher.requeues
        return restarts(end.get("reason"))

    def take_attempt(self) -> int:
        """Returns the attempt to launch: the submitted one, or the next if that was launched.

        A job that is queued again, and one that was submitted by hand, take a new attempt.

        Raises:
            RunError: another job has the run, or a process on some machine.
        """
        fresh = self.submitted if self._is_fresh() else None
        with running_elsewhere.alone(self.path, self.job.name, fresh):
            if fresh is None:
                self._close_silent()
            number = attempts.next_attempt(self.path) if fresh is None else fresh
            if Attempt(self.path, number).job_name != self.job.name:
                job, index = self.job.array or (self.job.job, None)
                note_job(attempt_dir(self.path, number), job, index, self.pack)
        return number

    def _is_fresh(self) -> bool:
        """Whether the submitted attempt exists and was not launched yet."""
        if self.submitted is None:
            return False
        attempt = Attempt(self.path, self.submitted)
        return attempt.folder.is_dir() and not attempt.has_ended and not attempt.launched

    def _close_silent(self) -> None:
        """Writes the end of this job's latest attempt if its supervisor could not.

        Slurm starts a job again unasked only after a node of it went down. (A job that several runs
        share writes the end of a supervisor that was killed at once, so it is none of these.)
        """
        last = attempts.latest(self.path)
        if last is None or last.has_ended or last.job_name != self.job.name or not is_restarted():
            return
        cause = (
            f"job {self.job.name} was started again by Slurm, and the supervisor of this attempt "
            f"left no exit.json: its node went down, or it was killed"
        )
        leave(self.path, last.number, "failed", cause, "node")
