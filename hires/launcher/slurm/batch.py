"""Supervises the runs of a Slurm job, on its first node, where the job's script starts this module.

``python -m hires.launcher.slurm.batch RUN_DIR [ATTEMPT]`` starts the ranks of a run on all nodes,
waits, and writes ``exit.json`` and ``record.json`` as the local launcher does. When Slurm ends the
job early, the ranks save their state, the job is queued again, and its next start makes the run's
next attempt:

    Slurm: SIGUSR2 ──▶ supervisor ──SIGUSR2──▶ ranks: checkpoint, exit PREEMPTED
                       exit.json: failed, timeout | preempted
                       scontrol requeue JOB  (at most launcher.requeues time-outs)
    Slurm: starts the job again ──▶ attempt a1 resumes from the checkpoint

``... ARRAY_DIR [INDEX]`` runs one task of a job array, whose list of runs is in that folder. It
supervises a single run itself; several runs share the task, each with a supervisor of its own
(``... --packed RUN_DIR ATTEMPT``). If Slurm preempts such a job, the runs that run save their
state, and no other begins. The output of a run goes to ``job.log`` in its own folder.
``... FOLDER ATTEMPT --checkup`` starts the ranks of ``hires doctor``, which measure no steps.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hires.core import log
from hires.core.errors import PREEMPTED, HiresError, RunError
from hires.core.store import file_names, provenance, reading, records, rundir
from hires.core.store.attempts import Attempt
from hires.core.store.campaign import read_array
from hires.core.store.files import cannot_write
from hires.launcher.attempt_queue import AttemptQueue, Running
from hires.launcher.end_reasons import restarts
from hires.launcher.interface import CANCELLED
from hires.launcher.local.local_launcher import launch, leave, say
from hires.launcher.ranks.places import Preemption
from hires.launcher.slurm import allocation, scheduler
from hires.launcher.slurm.allocation import Allocation
from hires.launcher.slurm.job_attempts import JobRun, is_restarted
from hires.launcher.slurm.job_script import BATCH, CHECKUP
from hires.launcher.supervision.interrupts import Interrupts

_CHECKUP_RANK = "hires.comm.node_report"


def main(argv: Sequence[str] | None = None, module: str = BATCH) -> int:
    """Runs the job; returns its exit code.

    Args:
        argv: the words of the command line.
        module: the Python module that supervises one of several runs.
    """
    words = sys.argv[1:] if argv is None else list(argv)
    packed, checkup = "--packed" in words[:1], CHECKUP in words[2:]
    words = [word for word in words if word not in ("--packed", CHECKUP)]
    if len(words) not in (1, 2) or not all(word.isdecimal() for word in words[1:]):
        say("usage: python -m hires.launcher.slurm.batch RUN_DIR [ATTEMPT] | ARRAY_DIR [INDEX]")
        return 2
    log.setup()
    number = int(words[1]) if words[1:] else None
    try:
        job = allocation.current()
        if (Path(words[0]) / file_names.POINTS).exists():
            return _run_task(Path(words[0]).absolute(), number, job, module)
        run = JobRun(rundir.frozen_folder(words[0]), job, number)
        if not packed and is_restarted() and run.is_over:
            say(f"{run.path.name} is complete: nothing is left for this start of job {job.name}")
            return 0
        return JobAttempt(run, run.take_attempt(), packed=packed, checkup=checkup).run()
    except HiresError as error:
        say(str(error))
        return error.exit_code


def _run_task(folder: Path, index: int | None, job: Allocation, module: str) -> int:
    if index is None:
        if job.array is None:
            raise RunError("this is no job array: name the task, as `sbatch job.sbatch 4`")
        index = job.array[1]
    tasks = read_array(folder, index)
    if not 0 <= index < len(tasks):
        raise RunError(f"{folder} has {len(tasks)} tasks, of which none is task {index}")
    entries = tasks[index]
    campaign = folder.parent.parent
    runs = [JobRun(campaign / e.run, job, e.attempt, e.attempts, len(entries)) for e in entries]
    runs = [run for run in runs if run.is_open]
    if not runs:
        say(f"nothing is left to do for job {job.name}: its runs have ended")
        return 0
    return _run_single(runs[0]) if len(entries) == 1 else _run_packed(runs, job, module)


def _run_single(run: JobRun) -> int:
    """Makes the attempts of one run, one after the other, until one fails; returns its code."""
    rundir.frozen_folder(run.path)
    number, output = run.take_attempt(), run.path / file_names.JOB_LOG
    try:
        sys.stdout.flush()
        with output.open("ab") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
    except OSError as error:
        cause = str(cannot_write(output, error))
        leave(run.path, number, "failed", cause)
        raise RunError(f"{run.path.name}: {cause}") from None
    with Interrupts() as interrupts:  # an attempt handles signals itself; here those in between
        code = JobAttempt(run, number).run()
        while code == 0 and run.is_open:
            if interrupts.count:
                return CANCELLED
            if interrupts.requests:
                say(f"job {run.job.name} is preempted, and queued again for the next attempt")
                scheduler.ask("scontrol", "requeue", run.job.name)
                return PREEMPTED
            code = JobAttempt(run, run.take_attempt()).run()
    return code


def _run_packed(runs: Sequence[JobRun], job: Allocation, module: str) -> int:
    """Runs several runs; returns the exit code of the first that failed, or 0."""
    whole, failed = [], 0
    for run in runs:
        try:
            if run.needs:  # it is read before the first run starts
                whole.append(run)
        except HiresError as error:  # it does not stop the others
            say(str(error))
            failed = error.exit_code
    queue = _PackedRuns(job, whole, module)
    queue.work()
    if queue.interrupts.count:
        for run in queue.waiting:
            cause = f"job {job.name} was stopped by {queue.interrupts.name} before its turn"
            with contextlib.suppress(RunError):  # another job has it, and writes how it ends
                leave(run.path, run.take_attempt(), "cancelled", cause)
        return CANCELLED
    left = [run for run in whole if run not in queue.refused and run.is_open]
    left = [run for run in left if not run.is_cancelled]
    if left:
        say(f"job {job.name} is queued again: {len(left)} of its runs go on")
        scheduler.ask("scontrol", "requeue", job.name)
    return queue.code or failed


class _PackedRuns(AttemptQueue[JobRun]):
    """The runs of one job: one after the other, and side by side where they fit."""

    def __init__(self, job: Allocation, runs: Sequence[JobRun], module: str) -> None:
        """Takes the job, its runs in the order of their start, and the module of supervisors."""
        super().__init__(runs, allocation.cores(job))
        self.refused: list[JobRun] = []
        """Those that this job cannot start, nor would another start of it."""
        self.code = 0
        """The first exit code that tells of a failure."""
        self._words = [module, "--packed"]

    def begin(self, task: JobRun) -> None:
        """Starts the supervisor of a run unless the run was cancelled meanwhile."""
        if task.is_cancelled:
            return
        path = task.path
        try:
            number = task.take_attempt()
            words = [*self._words, str(path), str(number)]
            self.launch(task, number, words, path / file_names.JOB_LOG)
        except RunError as error:
            say(f"{path.name}: {error}")
            self.refused.append(task)
            self.code = self.code or RunError.exit_code
        else:
            say(f"{path.name}: attempt {number} begins")

    def ended(self, run: Running[JobRun], code: int, state: str, cause: str | None) -> None:
        """Keeps the first exit code that tells of a failure."""
        say(f"{run.task.path.name}: attempt {run.attempt} ended with code {code}: {cause or state}")
        if state != "done" and not self.code:
            self.code = code if code > 0 else RunError.exit_code


class JobAttempt:
    """One attempt of a run in a Slurm job, from its first rank to what follows its last."""

    def __init__(
        self, run: JobRun, number: int, *, packed: bool = False, checkup: bool = False
    ) -> None:
        """Takes a run and the number of an attempt that was not launched yet.

        With ``packed`` another process decides whether the job is queued again; with ``checkup``
        the ranks are those of ``hires doctor``.
        """
        self._run, self.path, self.job, self.number = run, run.path, run.job, number
        self.config = records.read_config(run.path)
        self._packed, self._checkup = packed, checkup
        self._goes_on = False

    def run(self) -> int:
        """Runs it; returns the exit code of the job."""
        world, name = int(records.read_plan(self.path)["world"]), self.path.name
        nodes = ", ".join(node.name for node in self.job.nodes)
        say(f"{name}: attempt {self.number}, {world} ranks on {nodes}, job {self.job.name}")
        try:
            self._refuse_other_code()
            places = self.job.places(world, self.config, packed=self._packed)
        except RunError as error:
            leave(self.path, self.number, "failed", str(error))
            raise
        places = dataclasses.replace(
            places,
            preemption=self._preemption,
            termination=self._termination,
            is_cancelled=lambda: self._run.is_cancelled,
        )
        ranks: dict[str, Any] = {}
        if self._checkup:
            ranks = {"module": _CHECKUP_RANK, "args": (CHECKUP,)}
        outcome = launch(self.path, self.number, places=places, aloud=True, **ranks)
        if outcome.state == "done" and not self._checkup:
            # Tables are the business of reports, which launchers do not import.
            command = [sys.executable, "-m", "hires.report.tables", str(self.path)]
            subprocess.run(command, check=False)
        elif self._goes_on and restarts(outcome.reason) and not self._packed:
            try:
                scheduler.ask("scontrol", "requeue", self.job.name)
            except RunError as error:  # the attempt's end is written, and stays as it is
                say(f"the job could not be queued again: {error}; start the run again to go on")
        return outcome.exit_code

    def _refuse_other_code(self) -> None:
        """Raises a RunError if another hires has planned the run, unless that is allowed."""
        envs = [Attempt(self.path, number).env for number in range(self.number, -1, -1)]
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

    def _preemption(self) -> Preemption:
        return self._with_sequel(self.job.after_sigusr2(self.config.launcher.signal_s))

    def _termination(self) -> Preemption | None:
        why = self.job.after_sigterm()
        return None if why is None else self._with_sequel(why)

    def _with_sequel(self, why: Preemption) -> Preemption:
        """Decides whether the job is queued again, and adds that to why it ends, in words."""
        requeues = self.config.launcher.requeues
        is_last = why.reason == "timeout" and self._run.timeouts >= requeues
        self._goes_on = not is_last and not why.requeued
        then = "the job is queued again and the run goes on as its next attempt"
        if is_last:
            then = f"launcher.requeues={requeues} are used up: run it again to go on"
        return dataclasses.replace(why, then=then)


if __name__ == "__main__":
    sys.exit(main())
