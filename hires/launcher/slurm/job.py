"""Supervises the run of a Slurm job, on its first node, where the job's script starts this module.

``python -m hires.launcher.slurm.job RUN_DIR [ATTEMPT]`` starts the ranks of a run on all nodes,
waits, and writes ``exit.json`` and ``record.json`` as the local launcher does. When Slurm ends the
job early, the ranks save their state, the job is queued again, and its next start makes the run's
next attempt:

    Slurm: SIGUSR2 ──▶ supervisor ──SIGUSR2──▶ ranks: checkpoint, exit PREEMPTED
                       exit.json: failed, timeout | preempted
                       scontrol requeue JOB  (at most launcher.requeues time-outs)
    Slurm: starts the job again ──▶ attempt a1 resumes from the checkpoint

``--attempts=N`` makes complete attempts one after the other, until one fails. ``--checkup`` starts
the ranks of ``hires doctor``, which measure no steps.
"""

from __future__ import annotations

import argparse
import dataclasses
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hires.core import streams
from hires.core.config.run_config import RunConfig
from hires.core.errors import INTERRUPTED, PREEMPTED, EditedError, HiresError, RunError
from hires.core.programs import module_command
from hires.core.store import (
    attempts,
    file_names,
    frozen,
    provenance,
    reading,
    records,
    rundir,
    trust,
)
from hires.core.store.attempts import Attempt
from hires.core.store.ends import End, State
from hires.core.store.file_names import attempt_dir, attempt_numbers, rank_logs
from hires.launcher.interface import note_job
from hires.launcher.launch_attempt import end_without_ranks, launch, say
from hires.launcher.ranks.places import Preemption
from hires.launcher.slurm import scheduler
from hires.launcher.slurm.scheduler import Allocation
from hires.launcher.slurm.submission import CHECKUP
from hires.launcher.status import running_elsewhere
from hires.launcher.supervision.supervisor import Interrupts

_CHECKUP_RANK = "hires.comm.node_report"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the job; returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m hires.launcher.slurm.job", allow_abbrev=False)
    parser.add_argument("run", metavar="RUN_DIR")
    parser.add_argument("attempt", type=int, nargs="?", help="the one that was submitted")
    parser.add_argument("--attempts", type=int, default=1, help="how many to complete")
    parser.add_argument(CHECKUP, action="store_true", help="start the ranks of hires doctor")
    args = parser.parse_args(argv)
    streams.setup_log()
    trust.keep_folders_private()
    try:
        path, job = rundir.frozen_folder(args.run), scheduler.current_job()
        return _work(JobRun(path, job, args.attempt, args.attempts, args.checkup))
    except HiresError as error:
        say(str(error))
        return error.exit_code


def _work(run: JobRun) -> int:
    """Makes the attempts of a run, one after the other, until one fails; returns its code."""
    job = run.job.name
    if run.final_code is not None:
        text = f"{run.path.name} has ended, or another attempt took its place"
        say(f"nothing is left to do for job {job}: {text}")
    with Interrupts() as interrupts:  # an attempt handles signals itself; here those in between
        while (code := run.final_code) is None:
            if interrupts.count:
                return INTERRUPTED
            if interrupts.requests:
                say(f"job {job} is preempted, and queued again for the next attempt")
                scheduler.ask("scontrol", "requeue", job)
                return PREEMPTED
            if code := run.make_attempt(run.take_attempt()):
                break
    return code


@dataclass
class JobRun:
    """A run that a job makes: each start of the job makes its next attempt.

    Slurm starts a job again after a time limit, a preemption or the failure of a node.
    """

    path: Path
    job: Allocation
    submitted: int | None = None
    """The attempt that was submitted; None: the script was submitted by hand."""
    wanted: int = 1
    """How many complete attempts the job is to make."""
    checkup: bool = False
    """Whether the ranks are those of ``hires doctor``."""
    _requeues: bool = field(default=False, init=False)

    @property
    def attempts(self) -> list[Attempt]:
        """The attempts that are this job's, in order."""
        every = (Attempt(self.path, number) for number in attempt_numbers(self.path))
        return [attempt for attempt in every if attempt.job_name == self.job.name]

    @property
    def timeouts(self) -> int:
        """How many of them reached the time limit of the job."""
        return sum(
            attempt.exit is not None and attempt.exit.reason == "timeout"
            for attempt in self.attempts
        )

    @property
    def final_code(self) -> int | None:
        """The exit code of the job if nothing is left to do; None: it has something to do.

        That is so if it made no attempt yet, the last left no ``exit.json``, was preempted and may
        go on, or was stopped with the whole job: after the failure of a node Slurm starts it again.
        It is not if others have completed the run since it was submitted, or if the command that
        submitted it gave it up and another attempt has taken its place.
        """
        my_attempts = self.attempts
        first = my_attempts[0].number if my_attempts else self.submitted
        if first is None:
            return None
        done = [number for number in rundir.done_attempts(self.path) if number >= first]
        if len(done) >= self.wanted:
            return 0
        if not my_attempts:
            given_up = Attempt(self.path, first)
            later = (Attempt(self.path, n) for n in attempt_numbers(self.path) if n > first)
            taken = any(attempt.job or attempt.launched for attempt in later)
            is_over = taken and given_up.has_ended and not given_up.job
            return RunError.exit_code if is_over else None
        end = my_attempts[-1].exit
        if not end:
            return None
        if end.state == State.CANCELLED:
            is_over = my_attempts[-1].is_cancelled
        elif end.reason == "timeout":
            is_over = self.timeouts > records.read_config(self.path).launcher.requeues
        else:
            is_over = end.state != State.DONE and not end.restarts
        return end.exit_code if is_over else None

    def take_attempt(self) -> int:
        """Returns the attempt to launch: the submitted one, or a new one if that was launched."""
        attempt = Attempt(self.path, -1 if self.submitted is None else self.submitted)
        is_fresh = attempt.folder.is_dir() and not (attempt.has_ended or attempt.launched)
        fresh = attempt.number if is_fresh else None
        with running_elsewhere.exclusive_start(self.path, self.job.name, fresh):
            number = attempts.next_attempt(self.path) if fresh is None else fresh
            if Attempt(self.path, number).job_name != self.job.name:
                job, index = self.job.array or (self.job.job, None)
                note_job("slurm", attempt_dir(self.path, number), job, index)
        return number

    def make_attempt(self, number: int) -> int:
        """Runs an attempt that was not launched yet; returns the exit code of the job."""
        self._requeues, folder = False, attempt_dir(self.path, number)
        try:
            frozen.require_unchanged(self.path)
            config, world = records.read_config(self.path), records.read_world(self.path)
            nodes = ", ".join(node.name for node in self.job.nodes)
            where = f"{world} ranks on {nodes}, job {self.job.name}"
            say(f"{self.path.name}: attempt {number}, {where}")
            self._refuse_other_code(config)
            places = self.job.places(world, config)
        except HiresError as error:
            reason = "edited" if isinstance(error, EditedError) else "launch"
            end_without_ranks(self.path, number, End(State.FAILED, str(error), reason))
            raise

        def preemption() -> Preemption:
            return self._decide_requeue(self.job.after_sigusr2(config.launcher.signal_s), config)

        def termination() -> Preemption | None:
            logs = [*rank_logs(folder).values(), folder / file_names.LOGS / file_names.LAUNCHER_LOG]
            why = self.job.after_sigterm(logs)
            return why and self._decide_requeue(why, config)

        places = dataclasses.replace(places, preemption=preemption, termination=termination)
        ranks: dict[str, Any] = {}
        if self.checkup:
            ranks = {"module": _CHECKUP_RANK, "args": (CHECKUP,)}
        outcome = launch(self.path, number, places=places, aloud=True, **ranks)
        if outcome.state == State.DONE and not self.checkup:
            # Tables are the business of reports, which launchers do not import.
            command = module_command("hires.report.tables", str(self.path))
            subprocess.run(command, check=False)
        elif self._requeues and outcome.restarts:
            try:
                scheduler.ask("scontrol", "requeue", self.job.name)
            except RunError as error:  # the attempt's end is written, and stays as it is
                say(f"the job could not be queued again: {error}; start the run again to go on")
        return outcome.exit_code

    def _refuse_other_code(self, config: RunConfig) -> None:
        """Raises a RunError if another hires has planned the run, unless that is allowed."""
        planned = reading.read_json(self.path / file_names.PLANNED, []).get("provenance") or {}
        here = provenance.collect()
        pairs = [(planned.get(key), here[key]) for key in ("hires", "git")]
        if all(was == now or not was or not now for was, now in pairs):
            return
        by = f"the run was planned by hires {planned['hires']} ({planned['git']})"
        if not config.launcher.other_code:
            raise RunError(
                f"{by}, but this node has {here['hires']} ({here['git']}): start the run again "
                f"with this one, or allow it with launcher.other_code=true"
            )
        say(f"{by} and runs with {here['hires']} ({here['git']})")

    def _decide_requeue(self, why: Preemption, config: RunConfig) -> Preemption:
        """Decides whether the job is queued again, and adds that to why it ends, in words."""
        requeues = config.launcher.requeues
        is_last = why.reason == "timeout" and self.timeouts >= requeues
        self._requeues = not is_last and not why.requeued
        then = "the job is queued again and the run goes on as its next attempt"
        if is_last:
            then = f"launcher.requeues={requeues} are used up: run it again to go on"
        return dataclasses.replace(why, then=then)


if __name__ == "__main__":
    streams.secure()
    sys.exit(main())
