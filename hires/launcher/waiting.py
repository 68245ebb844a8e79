"""How does a submitted run end? Waits for its Slurm job, through all its attempts.

What the run folder says counts first: the supervisor writes ``exit.json``. Slurm is asked for what
the folder cannot say: whether a job that made way starts again, and whether one that left no word
was cancelled or is lost. No answer, or a single empty one, is no verdict.
"""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path
from typing import Any

from hires.core import records
from hires.core.errors import RunError
from hires.core.rundir import RunDir
from hires.launcher import local, slurm
from hires.launcher.attempt_files import read_json
from hires.launcher.local import Outcome
from hires.launcher.progress import MetricsTail
from hires.launcher.supervisor import OnLine

LOOK_S = 0.5
"""How often the run folder is looked at."""
ASK_S = 5.0
"""How often Slurm is asked."""
GONE = "GONE"
"""State of a job that Slurm has forgotten."""

_OVER = (
    GONE,
    "BOOT_FAIL",
    "CANCELLED",
    "COMPLETED",
    "DEADLINE",
    "FAILED",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
    "PREEMPTED",
    "REVOKED",
    "TIMEOUT",
)
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


def queue_state(job: str) -> str | None:
    """Returns a job's state in Slurm's words, :data:`GONE`, or None if Slurm gives no answer."""
    command = ["squeue", "--noheader", "--states=all", f"--jobs={job}", "--format=%T"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode != 0:
        return GONE if "Invalid job id" in done.stderr else None
    return (done.stdout.split() or [GONE])[0]


def refuse_queued(run: Path) -> None:
    """Refuses a second submission of a run whose job waits, runs, or was queued again.

    Raises:
        RunError: names the job.
    """
    for number in reversed(_attempts(run)):
        folder = records.attempt_dir(run, number)
        job = slurm.read_job(folder)
        end = read_json(folder / "exit.json")
        if job is None or (end is not None and end.get("reason") not in slurm.GOES_ON):
            continue
        state = queue_state(job)
        if state is not None and state not in _OVER:
            raise RunError(
                f"{run.name} is job {job} already ({state.lower()}); wait for it, stop it with "
                f"`scancel {job}`, or start this one with another campaign=NAME"
            )


class Waiting:
    """Waits for one submitted run."""

    def __init__(self, run: RunDir, job: str, on_line: OnLine | None = None) -> None:
        """Takes the run with the submitted attempt, its job, and who hears of new metrics."""
        self.run = run
        self.job = job
        self.on_line = on_line
        self.attempt = run.attempt
        self._tail = MetricsTail(run.attempt_dir / "metrics.jsonl")
        self._asked_s = 0.0
        self._answers: list[str] = []

    def wait(self) -> Outcome:
        """Returns how the run ended, in the last attempt that the job made."""
        while True:
            self._follow()
            over = self._is_over()
            values = self._exit()
            if values is not None and (over or values.get("reason") not in slurm.GOES_ON):
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
        for number in _attempts(self.run.path):
            folder = records.attempt_dir(self.run, number)
            if number > self.attempt and slurm.read_job(folder) == self.job:
                self.attempt, self._answers = number, []
                self._tail = MetricsTail(folder / "metrics.jsonl")

    def _exit(self) -> dict[str, Any] | None:
        """Returns what ``exit.json`` of the current attempt holds, if it is there."""
        path = records.attempt_dir(self.run, self.attempt) / "exit.json"
        try:
            values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return values

    def _is_over(self) -> bool:
        """Whether Slurm has said often enough that the job has ended."""
        if time.monotonic() - self._asked_s >= ASK_S:
            self._asked_s = time.monotonic()
            state = queue_state(self.job)
            if state in _OVER:
                self._answers.append(state)
            elif state is not None:
                self._answers.clear()
        return len(self._answers) >= _VERDICTS

    def _without_word(self) -> Outcome:
        """Returns the end of a job that left no ``exit.json``."""
        state = self._answers[-1]
        if state == "CANCELLED":
            cause = f"job {self.job} was cancelled before it could tell"
            local.leave(self.run.path, self.attempt, "cancelled", cause)
            return Outcome("cancelled", cause, {}, [])
        if state in _REASONS:
            cause = f"job {self.job} ended with {state} before it could tell"
            local.leave(self.run.path, self.attempt, "failed", cause, _REASONS[state])
            return Outcome("failed", cause, {}, [], None, _REASONS[state])
        cause = (
            f"job {self.job} ended ({state.lower()}) and left no word: its supervisor was killed, "
            f"or its node does not see {self.run.path}; `scontrol show job {self.job}` may say more"
        )
        return Outcome("lost", cause, {}, [])


def _attempts(run: Path) -> list[int]:
    """Returns the numbers of a run's attempts, in order."""
    names = (path.name[1:] for path in run.glob("a[0-9]*"))
    return sorted(int(name) for name in names if name.isdecimal())


def _outcome(values: dict[str, Any]) -> Outcome:
    """Returns what ``exit.json`` tells."""
    codes = {int(rank): code for rank, code in values.get("exit_codes", {}).items()}
    return Outcome(values["state"], values["cause"], codes, [], None, values.get("reason"))
