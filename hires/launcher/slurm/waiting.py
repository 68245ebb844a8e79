"""How does a submitted run end? Waits for its Slurm job, through all its attempts.

What the run folder says counts first: the supervisor writes ``exit.json``. Slurm is asked for what
the folder cannot say: whether a job that made way starts again, and whether one that left no word
was cancelled or is lost. No answer, or a single empty one, is no verdict.
"""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from hires.core.errors import RunError
from hires.core.store import file_names, launch_file, records, rundir
from hires.core.store.rundir import RunDir
from hires.launcher.local import local_launcher
from hires.launcher.local.local_launcher import Outcome
from hires.launcher.slurm import orphan_jobs, scheduler, slurm_launcher
from hires.launcher.status.attempt_files import last_number, read_json
from hires.launcher.status.run_progress import MetricsTail
from hires.launcher.supervision.supervisor import OnLine

LOOK_S = 0.5
"""How often the run folder is looked at."""
ASK_S = 5.0
"""How often Slurm is asked."""
_REASONS = {
    "BOOT_FAIL": "node",
    "DEADLINE": "timeout",
    "NODE_FAIL": "node",
    "OUT_OF_MEMORY": "oom",
    "PREEMPTED": "preempted",
    "TIMEOUT": "timeout",
}
"""Why a job that left no word ended, where its state tells."""
_VERDICTS = 2
"""Equal answers in a row that make a verdict."""


def refuse_queued(run: Path) -> None:
    """Refuses a second submission of a run whose job waits, runs, or was queued again.

    Raises:
        RunError: names the job.
    """
    for text in queued([run]).values():
        raise RunError(text)


def refuse_begun(run: Path, seen: int | None) -> None:
    """Refuses to start a run that another command has begun since it was looked at.

    Args:
        run: the run folder.
        seen: the latest attempt that it had; None: it had none.

    Raises:
        RunError: names the attempt.
    """
    last = last_number(run)
    if last != seen:
        raise RunError(
            f"{run.name} was begun meanwhile, by another command, as attempt a{last}; `hires "
            f"status {run.parent.name}` watches it"
        )


def queued(runs: Iterable[Path]) -> dict[Path, str]:
    """Returns why runs must not be submitted now: a job of each waits, runs or starts again."""
    runs = list(runs)
    jobs = {(run, slurm_launcher.read_job(folder)) for run in runs for folder in _unfinished(run)}
    answers = scheduler.ask_slurm(scheduler.job_of(job) for _, job in jobs if job is not None)
    found = {}
    for run, job in sorted(jobs, key=str):
        answer = answers.get(job or "")
        if answer is not None and answer.state in (scheduler.PENDING, scheduler.RUNNING):
            found[run] = (
                f"{run.name} is job {job} already ({answer.state}); wait for it, stop it with "
                f"`{_stop_line(run, job or '')}`, or start this one with another campaign=NAME"
            )
    for run, job in orphan_jobs.jobs_of(run for run in runs if run not in found).items():
        found[run] = (
            f"{run.name} is job {job} already, though sbatch did not say so in time; wait for it, "
            f"stop it with `scancel {job}`, or start this one with another campaign=NAME"
        )
    return found


def _stop_line(run: Path, job: str) -> str:
    """Returns the command that stops a job of a run.

    ``scancel`` leaves nothing behind in the run, but alone knows a job that was replaced.
    """
    last = last_number(run)
    if last is not None and slurm_launcher.read_job(records.attempt_dir(run, last)) == job:
        return f"hires cancel {shlex.quote(str(run))}"
    return f"scancel {job}"


def _unfinished(run: Path) -> Iterator[Path]:
    """Yields the folders of attempts that are jobs and left no word, or go on as another."""
    for number in rundir.attempt_numbers(run):
        folder = records.attempt_dir(run, number)
        end = read_json(folder / file_names.EXIT)
        if (folder / file_names.JOB).exists() and (
            end is None or end.get("reason") in slurm_launcher.GOES_ON
        ):
            yield folder


class Waiting:
    """Waits for one submitted run."""

    def __init__(self, run: RunDir, job: str, on_line: OnLine | None = None) -> None:
        """Takes the run with the submitted attempt, its job, and who hears of new metrics."""
        self.run = run
        self.job = job
        self.on_line = on_line
        self.attempt = run.attempt
        self._tail = MetricsTail(run.attempt_dir / file_names.METRICS)
        self._asked_s = 0.0
        self._answers: list[str] = []

    def wait(self) -> Outcome:
        """Returns how the run ended, in the last attempt that the job made."""
        while True:
            self._follow()
            over = self._is_over()
            values = self._exit()
            if values is not None and (over or values.get("reason") not in slurm_launcher.GOES_ON):
                self._follow()
                return _outcome(values)
            if values is None and over:
                return self._without_word()
            time.sleep(LOOK_S)

    def _follow(self) -> None:
        """Passes on what the ranks recorded; turns to the job's next attempt if there is one."""
        for line in self._tail.read():
            if self.on_line is not None:
                self.on_line(line)
        for number in rundir.attempt_numbers(self.run.path):
            folder = records.attempt_dir(self.run, number)
            if number > self.attempt and slurm_launcher.read_job(folder) == self.job:
                self.attempt, self._answers = number, []
                self._tail = MetricsTail(folder / file_names.METRICS)

    def _exit(self) -> dict[str, Any] | None:
        """Returns what ``exit.json`` of the current attempt holds, if it is there."""
        path = records.attempt_dir(self.run, self.attempt) / file_names.EXIT
        try:
            values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return values

    def _is_over(self) -> bool:
        """Whether Slurm has said often enough that the job has ended."""
        if time.monotonic() - self._asked_s >= ASK_S:
            self._asked_s = time.monotonic()
            [answer] = scheduler.ask_slurm([scheduler.job_of(self.job)]).values()
            if answer.state in (scheduler.ENDED, scheduler.GONE):
                self._answers.append(answer.reason or "forgotten")
            elif answer.state != scheduler.UNKNOWN:
                self._answers.clear()
        return len(self._answers) >= _VERDICTS

    def _without_word(self) -> Outcome:
        """Returns the end of a job that left no ``exit.json``."""
        state = self._answers[-1]
        if state == "CANCELLED":
            cause = f"job {self.job} was cancelled before it could tell"
            local_launcher.leave(self.run.path, self.attempt, "cancelled", cause)
            return Outcome("cancelled", cause, {}, [])
        if state in _REASONS:
            cause = f"job {self.job} ended with {state} before it could tell"
            local_launcher.leave(self.run.path, self.attempt, "failed", cause, _REASONS[state])
            return Outcome("failed", cause, {}, [], None, _REASONS[state])
        code = scheduler.exit_code(self.job)
        if code == launch_file.NO_FOLDER:
            cause = (
                f"job {self.job} ended with exit code {code}: its node does not see "
                f"{self.run.path}, or cannot write {slurm_launcher.LOG} there; keep results= "
                f"on a file system that all nodes mount at the same place"
            )
            local_launcher.leave(self.run.path, self.attempt, "failed", cause)
            return Outcome("failed", cause, {}, [], None, "launch")
        cause = (
            f"job {self.job} ended ({state.lower()}) and left no word: its supervisor was killed, "
            f"or its node does not see {self.run.path}; `scontrol show job {self.job}` may say more"
        )
        return Outcome("lost", cause, {}, [])


def _outcome(values: dict[str, Any]) -> Outcome:
    """Returns what ``exit.json`` tells."""
    codes = {int(rank): code for rank, code in values.get("exit_codes", {}).items()}
    return Outcome(values["state"], values["cause"], codes, [], None, values.get("reason"))
