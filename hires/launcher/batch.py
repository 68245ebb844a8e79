"""The supervisor of a Slurm job: ``python -m hires.launcher.batch RUN_DIR [ATTEMPT]``.

``job.sbatch`` runs it on the first node. It starts the ranks on all nodes, waits, and leaves
``exit.json`` and ``record.json`` behind as the local launcher does. When Slurm tells the job to
make way, the ranks may save their state, the job is queued again, and its next start is the next
attempt of the same run.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hires.core import log, provenance, records, rundir
from hires.core.errors import HiresError, RunError
from hires.core.rundir import RunDir
from hires.launcher import allocation, slurm, taken
from hires.launcher.allocation import Allocation
from hires.launcher.local import Outcome, launch, leave
from hires.launcher.places import Making
from hires.launcher.progress import Progress


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one attempt of a run as part of a Slurm job; returns the exit code."""
    words = sys.argv[1:] if argv is None else list(argv)
    if len(words) not in (1, 2) or not all(word.isdecimal() for word in words[1:]):
        _say("usage: python -m hires.launcher.batch RUN_DIR [ATTEMPT]")
        return 2
    log.setup()
    try:
        job = allocation.current()
        run = rundir.open_run(words[0])
        if run.complete and os.environ.get("SLURM_RESTART_COUNT", "0") != "0":
            _say(f"{run.name} is complete: nothing is left for this start of job {job.job}")
            return 0
        return Attempt(run, _number(run, job, words[1:]), job).run()
    except HiresError as error:
        _say(str(error))
        return error.exit_code


class Attempt:
    """One attempt of a run in a Slurm job, from its first rank to what follows its last."""

    def __init__(self, run: RunDir, number: int, job: Allocation) -> None:
        """Takes the run, the number of an attempt that was not launched yet, and the job."""
        self.folder = run
        self.number = number
        self.job = job
        self.config = records.read_config(run.path)
        self.world = int(records.read_plan(run.path)["world"])
        self._goes_on = False

    def run(self) -> int:
        """Runs it; returns the exit code of the job."""
        nodes = ", ".join(node.name for node in self.job.nodes)
        name = self.folder.name
        _say(f"{name}: attempt {self.number}, {self.world} ranks on {nodes}, job {self.job.job}")
        outcome = self._launch()
        for line in outcome.tail:
            _say(f"    {line}")
        _say(f"{name}: {outcome.state}" + (f": {outcome.cause}" if outcome.cause else ""))
        if outcome.state == "done":
            # Tables are the business of reports, which launchers do not import.
            command = [sys.executable, "-m", "hires.report.tables", str(self.folder.path)]
            subprocess.run(command, check=False)
        elif self._goes_on and outcome.reason in slurm.GOES_ON:
            try:
                allocation.ask("scontrol", "requeue", self.job.job)
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
            self._refuse_other_code()
            places = self.job.places(self.world, self.config)
        except RunError as error:
            leave(self.folder.path, self.number, "failed", str(error))
            raise
        places = dataclasses.replace(places, making_way=self._make_way, stopped=self._stopped)
        return launch(self.folder.path, self.number, on_line=say_step, places=places)

    def _refuse_other_code(self) -> None:
        """Refuses to run what another hires has planned, unless that is allowed.

        Raises:
            RunError: names both.
        """
        planned, here = _planned_by(self.folder, self.number), provenance.collect()
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

    def _make_way(self) -> Making:
        """Returns why the job is to make way, and decides whether it is queued again."""
        launcher = self.config.launcher
        making = allocation.why_make_way(self.job.job, launcher.signal_s)
        self._goes_on = making.reason != "timeout" or self._timeouts() < launcher.requeues
        return dataclasses.replace(making, then=self._what_then(self._goes_on))

    def _stopped(self) -> Making | None:
        """Returns why Slurm ends the job without having asked; None if its user cancelled it."""
        found = taken.why(self.job)
        if found is None:
            return None
        often = found.making.reason == "timeout" and self._timeouts() >= (
            self.config.launcher.requeues
        )
        # What Slurm has queued again needs nobody who asks for it.
        self._goes_on = not found.queued and not often
        return dataclasses.replace(found.making, then=self._what_then(not often))

    def _what_then(self, goes_on: bool) -> str:
        """Returns in words what comes after a job that was stopped before its run was done."""
        if goes_on:
            return "the job is queued again and the run goes on as its next attempt"
        requeues = self.config.launcher.requeues
        return f"launcher.requeues={requeues} are used up: run it again to go on"

    def _timeouts(self) -> int:
        """Returns how many attempts of this job reached its time limit."""
        own = slurm.job_name(*_name_of(self.job))
        attempts = (records.attempt_dir(self.folder, n) for n in range(self.number))
        return sum(
            slurm.read_job(folder) == own and _reason(folder / "exit.json") == "timeout"
            for folder in attempts
        )


def _number(run: RunDir, job: Allocation, words: Sequence[str]) -> int:
    """Returns the attempt to launch: the one that was submitted, or the next if that one was.

    A job that is queued again, and one that was submitted by hand, take a new attempt.
    """
    number = int(words[0]) if words else None
    if number is None or not _is_fresh(run, number):
        _close_silent(run, job)
        number = rundir.next_attempt(run.path)
    folder = records.attempt_dir(run, number)
    if slurm.read_job(folder) != slurm.job_name(*_name_of(job)):
        slurm.note_job(folder, *_name_of(job))
    return number


def _close_silent(run: RunDir, job: Allocation) -> None:
    """Writes the end of this job's latest attempt if its supervisor could not.

    Slurm starts a job again, which was not asked for, only when a node of it went down.
    """
    if os.environ.get("SLURM_RESTART_COUNT", "0") == "0":
        return
    number, own = run.attempt, slurm.job_name(*_name_of(job))
    folder = records.attempt_dir(run, number)
    if slurm.read_job(folder) != own or (folder / "exit.json").exists():
        return
    cause = (
        f"job {own} was started again by Slurm, and the supervisor of this attempt left no word: "
        f"its node went down, or it was killed"
    )
    leave(run.path, number, "failed", cause, "node")


def _is_fresh(run: RunDir, number: int) -> bool:
    """Whether an attempt exists and was not launched yet."""
    folder = records.attempt_dir(run, number)
    if not folder.is_dir() or (folder / "exit.json").exists():
        return False
    lines = records.read_lines(folder / "events.jsonl")
    return not any(line.get("event") == "launch_started" for line in lines)


def _name_of(job: Allocation) -> tuple[str, int | None]:
    """Returns the number and the index that ``job.json`` has."""
    return job.array or (job.job, None)


def _planned_by(run: RunDir, number: int) -> dict[str, Any]:
    """Returns the provenance of the hires that planned a run: of its last start by command line."""
    for attempt in range(number, -1, -1):
        path = records.attempt_dir(run, attempt) / "env.json"
        try:
            env = json.loads(path.read_text(encoding="utf-8"))
            if env["argv"] is not None:
                return dict(env["provenance"])
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return {}


def _reason(path: Path) -> str | None:
    """Returns the reason in an ``exit.json``."""
    try:
        reason = json.loads(path.read_text(encoding="utf-8"))["reason"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return None if reason is None else str(reason)


def _say(text: str) -> None:
    """Writes a line to the job's log."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
