"""The supervisor of a Slurm job.

``python -m hires.launcher.slurm.batch [--packed] RUN_DIR [ATTEMPT]``

``job.sbatch`` runs it on the first node. It starts the ranks on all nodes, waits, and leaves
``exit.json`` and ``record.json`` behind as the local launcher does. When Slurm tells the job to
make way, the ranks may save their state, the job is queued again, and its next start is the next
attempt of the same run. ``--packed``: several runs share the job, and who started this one queues
it again.
"""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hires.core import log
from hires.core.errors import HiresError, RunError
from hires.core.store import attempts, file_names, provenance, reading, records, rundir
from hires.core.store.attempts import Attempt
from hires.launcher.interface import RESTARTED, Outcome
from hires.launcher.local.local_launcher import launch, leave
from hires.launcher.ranks.places import Preemption
from hires.launcher.slurm import allocation, job_script, preemption
from hires.launcher.slurm.allocation import Allocation
from hires.launcher.status import running_elsewhere
from hires.launcher.status.run_progress import Progress


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one attempt of a run as part of a Slurm job; returns the exit code."""
    words = sys.argv[1:] if argv is None else list(argv)
    packed = words[:1] == ["--packed"]
    words = words[packed:]
    if len(words) not in (1, 2) or not all(word.isdecimal() for word in words[1:]):
        _say("usage: python -m hires.launcher.slurm.batch RUN_DIR [ATTEMPT]")
        return 2
    log.setup()
    try:
        job = allocation.current()
        path = rundir.frozen_folder(words[0])
        if not packed and _is_restarted() and _is_over(path, job):
            _say(f"{path.name} is complete: nothing is left for this start of job {job.name}")
            return 0
        number = number_of(path, job, int(words[1]) if words[1:] else None)
        return JobAttempt(path, number, job, packed=packed).run()
    except HiresError as error:
        _say(str(error))
        return error.exit_code


class JobAttempt:
    """One attempt of a run in a Slurm job, from its first rank to what follows its last."""

    def __init__(self, path: Path, number: int, job: Allocation, *, packed: bool = False) -> None:
        """Takes a run folder, the number of an attempt that was not launched yet, and the job.

        With ``packed`` somebody else decides whether the job is queued again.
        """
        self.path = path
        self.number = number
        self.job = job
        self.config = records.read_config(path)
        self.world = int(records.read_plan(path)["world"])
        self._packed = packed
        self._goes_on = False

    def run(self) -> int:
        """Runs it; returns the exit code of the job."""
        nodes = ", ".join(node.name for node in self.job.nodes)
        name = self.path.name
        _say(f"{name}: attempt {self.number}, {self.world} ranks on {nodes}, job {self.job.name}")
        outcome = self._launch()
        for line in outcome.tail:
            _say(f"    {line}")
        _say(f"{name}: {outcome.state}" + (f": {outcome.cause}" if outcome.cause else ""))
        if outcome.state == "done":
            # Tables are the business of reports, which launchers do not import.
            command = [sys.executable, "-m", "hires.report.tables", str(self.path)]
            subprocess.run(command, check=False)
        elif self._goes_on and outcome.reason in RESTARTED and not self._packed:
            try:
                allocation.ask("scontrol", "requeue", self.job.name)
            except RunError as error:  # the attempt's end is written, and stays as it is
                _say(f"the job could not be queued again: {error}; start the run again to go on")
        return outcome.exit_code

    def _launch(self) -> Outcome:
        """Runs the ranks, and returns how they ended."""
        progress = Progress(self.world, self.config.batch, self.config.steps)

        def say_step(line: dict[str, object]) -> None:
            step = progress.feed(line)
            if step is not None:
                _say(progress.text(step))

        try:
            allocation.refuse_without_module()
            self._refuse_other_code()
            places = self.job.places(self.world, self.config, packed=self._packed)
        except RunError as error:
            leave(self.path, self.number, "failed", str(error))
            raise
        places = dataclasses.replace(
            places, preemption=self._preemption, termination=self._termination
        )
        return launch(self.path, self.number, on_line=say_step, places=places)

    def _refuse_other_code(self) -> None:
        """Refuses to run what another hires has planned, unless that is allowed.

        Raises:
            RunError: names both.
        """
        planned, here = _planned_by(self.path, self.number), provenance.collect()
        for key in ("hires", "git"):
            if planned.get(key) and here[key] and planned[key] != here[key]:
                told = f"the run was planned by hires {planned['hires']} ({planned['git']})"
                if not self.config.launcher.other_code:
                    raise RunError(
                        f"{told}, but this node has {here['hires']} ({here['git']}): start the run "
                        f"again with this one, or allow it with launcher.other_code=true"
                    )
                _say(f"{told} and runs with {here['hires']} ({here['git']})")
                return

    def _preemption(self) -> Preemption:
        """Returns why the job is to make way, and decides whether it is queued again."""
        making = allocation.why_make_way(self.job.name, self.config.launcher.signal_s)
        self._goes_on = not self._is_last(making)
        return dataclasses.replace(making, then=self._what_then(self._goes_on))

    def _termination(self) -> Preemption | None:
        """Returns why Slurm ends the job without having asked; None if its user cancelled it."""
        found = preemption.why(self.job)
        if found is None:
            return None
        last = self._is_last(found)
        # What Slurm has queued again needs nobody who asks for it.
        self._goes_on = not found.requeued and not last
        return dataclasses.replace(found, then=self._what_then(not last))

    def _is_last(self, making: Preemption) -> bool:
        """Whether the run has used up how often its job may reach the time limit."""
        if making.reason != "timeout":
            return False
        return timeouts(self.path, self.job, self.number) >= self.config.launcher.requeues

    def _what_then(self, goes_on: bool) -> str:
        """Returns in words what comes after a job that was stopped before its run was done."""
        if goes_on:
            return "the job is queued again and the run goes on as its next attempt"
        requeues = self.config.launcher.requeues
        return f"launcher.requeues={requeues} are used up: run it again to go on"


def attempts_of(path: Path, job: Allocation) -> list[int]:
    """Returns the attempts of a run that are this job's, in order."""
    numbers = file_names.attempt_numbers(path)
    return [n for n in numbers if Attempt(path, n).job_name == job.name]


def timeouts(path: Path, job: Allocation, before: int) -> int:
    """Returns how many attempts of a run, below a number, reached the time limit of a job."""
    own = [number for number in attempts_of(path, job) if number < before]
    return sum(Attempt(path, n).exit.get("reason") == "timeout" for n in own)


def number_of(path: Path, job: Allocation, number: int | None, pack: int = 1) -> int:
    """Returns the attempt to launch: the one that was submitted, or the next if that one was.

    A job that is queued again, and one that was submitted by hand, take a new attempt.

    Args:
        path: the run folder.
        job: this job.
        number: the attempt that was submitted, if any was.
        pack: how many runs share the job.

    Raises:
        RunError: another job has the run, or a process on some machine.
    """
    fresh = number if number is not None and is_fresh(path, number) else None
    with running_elsewhere.alone(path, job.name, fresh):
        if fresh is None:
            _close_silent(path, job)
        mine = attempts.next_attempt(path) if fresh is None else fresh
        folder = file_names.attempt_dir(path, mine)
        if Attempt(path, mine).job_name != job.name:
            own, index = job.array or (job.job, None)
            job_script.note_job(folder, own, index, pack)
    return mine


def _close_silent(path: Path, job: Allocation) -> None:
    """Writes the end of this job's latest attempt if its supervisor could not.

    Slurm starts a job again, which was not asked for, only when a node of it went down. One of
    several supervisors that is killed while its job goes on is written down by the job at once, see
    :mod:`hires.launcher.slurm.job_packing`, so it is none of these.
    """
    numbers = file_names.attempt_numbers(path)
    if os.environ.get("SLURM_RESTART_COUNT", "0") == "0" or not numbers:
        return
    last = Attempt(path, numbers[-1])
    if last.job_name != job.name or last.has_ended:
        return
    cause = (
        f"job {job.name} was started again by Slurm, and the supervisor of this attempt left no "
        f"word: its node went down, or it was killed"
    )
    leave(path, numbers[-1], "failed", cause, "node")


def is_fresh(path: Path, number: int) -> bool:
    """Whether an attempt exists and was not launched yet."""
    attempt = Attempt(path, number)
    return attempt.folder.is_dir() and not attempt.has_ended and not attempt.launched


def _is_over(path: Path, job: Allocation) -> bool:
    """Whether a run was completed since this job has it.

    What was complete before is no reason to stop: a run may be made again.
    """
    own = attempts_of(path, job)
    return bool(own) and any(number >= own[0] for number in rundir.done_attempts(path))


def _is_restarted() -> bool:
    """Whether this is not the job's first start."""
    return os.environ.get("SLURM_RESTART_COUNT", "0") != "0"


def _planned_by(run: Path, number: int) -> dict[str, Any]:
    """Returns the provenance of the hires that planned a run: of its last start by command line."""
    envs = [Attempt(run, attempt).env for attempt in range(number, -1, -1)]
    envs.append(reading.read_json(run / file_names.PLANNED, []))
    typed = [env for env in envs if env.get("argv") is not None]
    last: dict[str, Any] = max(typed, key=lambda env: str(env.get("started")), default={})
    return dict(last.get("provenance") or {})


def _say(text: str) -> None:
    """Writes a line to the job's log."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
