"""Makes the attempts of a run in a Slurm job: each start of the job makes the next one.

Slurm starts a job again after a time limit, a preemption or the failure of a node.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from hires.core.config.run_config import RunConfig
from hires.core.errors import EditedError, RunError
from hires.core.python_command import module_command
from hires.core.store import attempts, edits, file_names, provenance, reading, records, rundir
from hires.core.store.attempts import Attempt
from hires.core.store.file_names import attempt_dir, attempt_numbers, rank_logs
from hires.launcher.end_reasons import restarts
from hires.launcher.local.local_launcher import launch, leave, say
from hires.launcher.ranks.places import Preemption
from hires.launcher.slurm import scheduler
from hires.launcher.slurm.allocation import Allocation
from hires.launcher.slurm.job_script import CHECKUP, note_job
from hires.launcher.status import running_elsewhere

_CHECKUP_RANK = "hires.comm.node_report"


def is_restarted() -> bool:
    """Whether this is not the job's first start."""
    return os.environ.get("SLURM_RESTART_COUNT", "0") != "0"


@dataclass
class JobRun:
    """A run that a job makes."""

    path: Path
    job: Allocation
    submitted: int | None = None
    """The attempt that was submitted; None: the script was submitted by hand."""
    wanted: int = 1
    """How many complete attempts the job is to make."""
    checkup: bool = False
    """Whether the ranks are those of ``hires doctor``."""
    _goes_on: bool = field(default=False, init=False)

    @cached_property
    def config(self) -> RunConfig:
        """The frozen config; a RunError: it cannot be read."""
        return records.read_config(self.path)

    @cached_property
    def world(self) -> int:
        """How many ranks it has; a RunError: the plan cannot be read."""
        return records.read_world(self.path)

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
            return self.timeouts <= self.config.launcher.requeues
        return restarts(end.get("reason"))

    def take_attempt(self) -> int:
        """Returns the attempt to launch: the submitted one, or a new one if that was launched."""
        fresh = self.submitted if self._is_fresh() else None
        with running_elsewhere.alone(self.path, self.job.name, fresh):
            if fresh is None:
                self._close_silent()
            number = attempts.next_attempt(self.path) if fresh is None else fresh
            if Attempt(self.path, number).job_name != self.job.name:
                job, index = self.job.array or (self.job.job, None)
                note_job(attempt_dir(self.path, number), job, index)
        return number

    def make_attempt(self, number: int) -> int:
        """Runs an attempt that was not launched yet; returns the exit code of the job."""
        self._goes_on = False
        try:
            edits.require_unchanged(self.path)
        except EditedError as error:
            leave(self.path, number, "failed", str(error), "edited")
            raise
        config = self.config
        nodes = ", ".join(node.name for node in self.job.nodes)
        where = f"{self.world} ranks on {nodes}, job {self.job.name}"
        say(f"{self.path.name}: attempt {number}, {where}")
        try:
            self._refuse_other_code(number)
            places = self.job.places(self.world, config)
        except RunError as error:
            leave(self.path, number, "failed", str(error))
            raise
        folder = attempt_dir(self.path, number)

        def logs() -> list[Path]:
            return [*rank_logs(folder).values(), folder / file_names.LOGS / file_names.LAUNCHER_LOG]

        own = self.own  # no attempt of this job is added while this one runs
        places = dataclasses.replace(
            places,
            preemption=lambda: self._with_sequel(self.job.after_sigusr2(config.launcher.signal_s)),
            termination=lambda: (why := self.job.after_sigterm(logs())) and self._with_sequel(why),
            is_cancelled=lambda: any(attempt.is_cancelled for attempt in own),
        )
        ranks: dict[str, Any] = {}
        if self.checkup:
            ranks = {"module": _CHECKUP_RANK, "args": (CHECKUP,)}
        outcome = launch(self.path, number, places=places, aloud=True, **ranks)
        if outcome.state == "done" and not self.checkup:
            # Tables are the business of reports, which launchers do not import.
            command = module_command("hires.report.tables", str(self.path))
            subprocess.run(command, check=False)
        elif self._goes_on and restarts(outcome.reason):
            try:
                scheduler.ask("scontrol", "requeue", self.job.name)
            except RunError as error:  # the attempt's end is written, and stays as it is
                say(f"the job could not be queued again: {error}; start the run again to go on")
        return outcome.exit_code

    def _is_fresh(self) -> bool:
        """Whether the submitted attempt exists and was not launched yet."""
        attempt = Attempt(self.path, -1 if self.submitted is None else self.submitted)
        return attempt.folder.is_dir() and not attempt.has_ended and not attempt.launched

    def _close_silent(self) -> None:
        """Writes the end of this job's latest attempt if its supervisor could not.

        Slurm starts a job again unasked only after a node of it went down.
        """
        last = attempts.latest(self.path)
        if last is None or last.has_ended or last.job_name != self.job.name or not is_restarted():
            return
        cause = (
            f"job {self.job.name} was started again by Slurm, and the supervisor of this attempt "
            f"left no exit.json: its node went down, or it was killed"
        )
        leave(self.path, last.number, "failed", cause, "node")

    def _refuse_other_code(self, number: int) -> None:
        """Raises a RunError if another hires has planned the run, unless that is allowed."""
        envs = [Attempt(self.path, n).env for n in range(number, -1, -1)]
        envs.append(reading.read_json(self.path / file_names.PLANNED, []))
        typed = [env for env in envs if env.get("argv") is not None]  # not those of jobs by hand
        last = max(typed, key=lambda env: str(env.get("started")), default={})
        planned, here = dict(last.get("provenance") or {}), provenance.collect()
        pairs = [(planned.get(key), here[key]) for key in ("hires", "git")]
        if all(was == now or not was or not now for was, now in pairs):
            return
        by = f"the run was planned by hires {planned['hires']} ({planned['git']})"
        if not self.config.launcher.other_code:
            raise RunError(
                f"{by}, but this node has {here['hires']} ({here['git']}): start the run again "
                f"with this one, or allow it with launcher.other_code=true"
            )
        say(f"{by} and runs with {here['hires']} ({here['git']})")

    def _with_sequel(self, why: Preemption) -> Preemption:
        """Decides whether the job is queued again, and adds that to why it ends, in words."""
        requeues = self.config.launcher.requeues
        is_last = why.reason == "timeout" and self.timeouts >= requeues
        self._goes_on = not is_last and not why.requeued
        then = "the job is queued again and the run goes on as its next attempt"
        if is_last:
            then = f"launcher.requeues={requeues} are used up: run it again to go on"
        return dataclasses.replace(why, then=then)
