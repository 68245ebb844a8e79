"""Waits for the job of a submitted run, through all attempts that the job makes.

``exit.json``, which the supervisor writes, counts first. The scheduler answers what the run folder
cannot: whether a preempted job starts again, and whether a job that left no ``exit.json`` was
cancelled or is lost. A failed query, or a single empty answer, never marks a run as lost.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from hires.core.store import file_names
from hires.core.store.attempts import Attempt
from hires.core.store.ends import ENDS, End, State
from hires.core.store.rundir import RunDir
from hires.launcher.interface import ENDED, GONE, UNKNOWN, JobStatus, Launcher, OnLine
from hires.launcher.launch_attempt import end_without_ranks
from hires.launcher.status.run_progress import LinesTail
from hires.launcher.status.state import judge

FILES_S = 0.5
"""How often the run folder is read."""
QUERY_S = 5.0
"""How often the scheduler is queried."""
_EQUAL_ANSWERS = 2
"""So many answers in a row that the job has ended are believed."""


class JobWait:
    """Waits for one submitted run."""

    def __init__(
        self, launcher: Launcher, run: RunDir, job: str, on_line: OnLine | None = None
    ) -> None:
        self.launcher, self.run, self.job, self.on_line = launcher, run, job, on_line
        self.status = JobStatus(UNKNOWN)
        """What the scheduler answered last."""
        self.attempt = run.attempt
        number, _, index = job.partition("_")
        named = {"job": number, "index": int(index) if index.isdecimal() else None}
        self._submitted = Attempt(run, run.attempt).job or named  # its file may be damaged
        self._tail = LinesTail(run.attempt_dir, file_names.METRICS)
        self._queried_s = 0.0
        self._ends: list[
            JobStatus
        ] = []  # the scheduler's last answers, if all say that the job ended

    def wait(self) -> End:
        """Returns how the run ended, in the last attempt that the job made."""
        while (end := self.poll()) is None:
            time.sleep(FILES_S)
        return end

    def poll(self) -> End | None:
        """Returns how the run ended; None while it goes on."""
        self._follow()
        if time.monotonic() - self._queried_s >= QUERY_S:
            self._queried_s = time.monotonic()
            [self.status] = self.launcher.job_states([self._submitted]).values()
            if self.status.state in (ENDED, GONE):
                self._ends.append(self.status)
            elif self.status.state != UNKNOWN:
                self._ends.clear()
        over = len(self._ends) >= _EQUAL_ANSWERS
        attempt = Attempt(self.run, self.attempt)
        end = attempt.exit
        if end is None:
            return self._without_exit(attempt, self._ends[-1]) if over else None
        if over and self._ends[-1].reason == "CANCELLED" and end.restarts:
            end = end.cancelled(f"job {self.job} was cancelled while it waited to go on")
            end.write(self.run.path, self.attempt)
        if not over and end.restarts:
            return None
        self._follow()
        return end

    def _follow(self) -> None:
        """Passes new metrics on, and turns to the job's next attempt if there is one."""
        for line in self._tail.read():
            if self.on_line is not None:
                self.on_line(line)
        for number in file_names.attempt_numbers(self.run.path):
            attempt = Attempt(self.run, number)
            if number > self.attempt and attempt.job_name == self.job:
                self.attempt, self._ends = number, []
                self._tail = LinesTail(attempt.folder, file_names.METRICS)

    def _without_exit(self, attempt: Attempt, answer: JobStatus) -> End | None:
        """Returns the end of a job that left no ``exit.json``; a certain one is written."""
        state = judge(attempt, answer)
        if state.state not in ENDS:
            return None
        end = End(state.state, state.cause, state.reason)
        if state.state != State.LOST:
            end_without_ranks(self.run.path, self.attempt, end)
        return end


class JobLauncher(Launcher):
    """A launcher whose runs are jobs of a scheduler."""

    def wait(
        self, run: RunDir, job: str | None, on_line: OnLine | None, args: Sequence[str] = ()
    ) -> End:
        """Waits until the job has ended."""
        assert job is not None
        return JobWait(self, run, job, on_line).wait()
