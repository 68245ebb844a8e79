"""Supervises one run in a Slurm job.

``python -m hires.launcher.slurm.batch [--packed] RUN_DIR [ATTEMPT]``

``job.sbatch`` runs it on the first node. It starts the ranks on all nodes, waits, and writes
``exit.json`` and ``record.json`` as the local launcher does. When Slurm ends the job early, the
ranks save their state, the job is queued again, and its next start makes the run's next attempt:

    Slurm: SIGUSR2 ──▶ supervisor ──SIGUSR2──▶ ranks: checkpoint, exit PREEMPTED
                       exit.json: failed, timeout | preempted
                       scontrol requeue JOB  (at most launcher.requeues time-outs)
    Slurm: starts the job again ──▶ attempt a1 resumes from the checkpoint

``--packed``: several runs share the job, and the process that started this one queues it again.
"""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hires.core import log
from hires.core.errors import HiresError, RunError
from hires.core.store import file_names, provenance, reading, records, rundir
from hires.core.store.attempts import Attempt
from hires.launcher.end_reasons import restarts
from hires.launcher.interface import Outcome
from hires.launcher.local.local_launcher import launch, leave
from hires.launcher.ranks.places import Preemption
from hires.launcher.slurm import allocation, preemption
from hires.launcher.slurm.allocation import Allocation
from hires.launcher.slurm.job_attempts import is_over, is_restarted, say, take_attempt, timeouts
from hires.launcher.status.run_progress import Progress


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one attempt of a run as part of a Slurm job; returns the exit code."""
    words = sys.argv[1:] if argv is None else list(argv)
    packed = words[:1] == ["--packed"]
    words = words[packed:]
    if len(words) not in (1, 2) or not all(word.isdecimal() for word in words[1:]):
        say("usage: python -m hires.launcher.slurm.batch RUN_DIR [ATTEMPT]")
        return 2
    log.setup()
    try:
        job = allocation.current()
        path = rundir.frozen_folder(words[0])
        if not packed and is_restarted() and is_over(path, job):
            say(f"{path.name} is complete: nothing is left for this start of job {job.name}")
            return 0
        number = take_attempt(path, job, int(words[1]) if words[1:] else None)
        return JobAttempt(path, number, job, packed=packed).run()
    except HiresError as error:
        say(str(error))
        return error.exit_code


class JobAttempt:
    """One attempt of a run in a Slurm job, from its first rank to what follows its last."""

    def __init__(self, path: Path, number: int, job: Allocation, *, packed: bool = False) -> None:
        """Takes a run folder, the number of an attempt that was not launched yet, and the job.

        With ``packed`` another process decides whether the job is queued again.
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
        say(f"{name}: attempt {self.number}, {self.world} ranks on {nodes}, job {self.job.name}")
        outcome = self._launch()
        for line in outcome.tail:
            say(f"    {line}")
        say(f"{name}: {outcome.state}" + (f": {outcome.cause}" if outcome.cause else ""))
        if outcome.state == "done":
            # Tables are the business of reports, which launchers do not import.
            command = [sys.executable, "-m", "hires.report.tables", str(self.path)]
            subprocess.run(command, check=False)
        elif self._goes_on and restarts(outcome.reason) and not self._packed:
            try:
                allocation.ask("scontrol", "requeue", self.job.name)
            except RunError as error:  # the attempt's end is written, and stays as it is
                say(f"the job could not be queued again: {error}; start the run again to go on")
        return outcome.exit_code

    def _launch(self) -> Outcome:
        progress = Progress(self.world, self.config.batch, self.config.steps)

        def show_step(line: dict[str, object]) -> None:
            step = progress.feed(line)
            if step is not None:
                say(progress.text(step))

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
        return launch(self.path, self.number, on_line=show_step, places=places)

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
                say(f"{told} and runs with {here['hires']} ({here['git']})")
                return

    def _preemption(self) -> Preemption:
        """Returns why Slurm sent SIGUSR2, and decides whether the job is queued again."""
        found = preemption.after_sigusr2(self.job.name, self.config.launcher.signal_s)
        self._goes_on = not self._is_last(found)
        return dataclasses.replace(found, then=self._what_then(self._goes_on))

    def _termination(self) -> Preemption | None:
        """Returns why Slurm ends the job by SIGTERM; None if its user cancelled it."""
        found = preemption.after_sigterm(self.job)
        if found is None:
            return None
        last = self._is_last(found)
        self._goes_on = not found.requeued and not last
        return dataclasses.replace(found, then=self._what_then(not last))

    def _is_last(self, found: Preemption) -> bool:
        """Whether the run has used up how often its job may reach the time limit."""
        if found.reason != "timeout":
            return False
        return timeouts(self.path, self.job, self.number) >= self.config.launcher.requeues

    def _what_then(self, goes_on: bool) -> str:
        """Returns in words what comes after a job that was stopped before its run was done."""
        if goes_on:
            return "the job is queued again and the run goes on as its next attempt"
        requeues = self.config.launcher.requeues
        return f"launcher.requeues={requeues} are used up: run it again to go on"


def _planned_by(run: Path, number: int) -> dict[str, Any]:
    """Returns the provenance of the hires that planned a run: of its last start by command line."""
    envs = [Attempt(run, attempt).env for attempt in range(number, -1, -1)]
    envs.append(reading.read_json(run / file_names.PLANNED, []))
    typed = [env for env in envs if env.get("argv") is not None]
    last: dict[str, Any] = max(typed, key=lambda env: str(env.get("started")), default={})
    return dict(last.get("provenance") or {})


if __name__ == "__main__":
    sys.exit(main())
