"""Submits frozen runs, one as a job, many as few job arrays, and waits for a job.

Runs that want the same of Slurm become the tasks of one array, whose folder ``arrays/0`` has
``job.sbatch``. sbatch may die, or stop waiting, after the controller has taken the job: a second
job of the same run refuses to begin while the first waits or runs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from hires.core import programs
from hires.core.config.run_config import RunConfig
from hires.core.errors import ConfigError, HiresError, RunError
from hires.core.store import file_names
from hires.core.store.attempts import Attempt, next_attempt
from hires.core.store.ends import ENDS, End, State
from hires.core.store.file_names import StrPath, attempt_dir
from hires.core.store.files import make_folder
from hires.core.store.rundir import RunDir
from hires.core.units import listed
from hires.launcher.interface import (
    ENDED,
    GONE,
    UNKNOWN,
    FrozenRun,
    JobStatus,
    OnLine,
    SubmitOptions,
    Submitted,
    note_job,
)
from hires.launcher.launch_attempt import end_without_ranks
from hires.launcher.slurm import scheduler
from hires.launcher.status.run_progress import LinesTail
from hires.launcher.status.state import RunState, judge, select, states

CHECKUP = "--checkup"
"""Option of a job for the ranks of ``hires doctor``."""
ARRAYS = "arrays"
"""Folder of all arrays, below that of their campaign."""
FILES_S = 0.5
"""How often the run folder of a job that is waited for is read."""
QUERY_S = 5.0
"""How often the scheduler is queried."""
_EQUAL_ANSWERS = 2
"""So many answers in a row that the job has ended are believed."""
_MAX_TASKS = (1001, 10_000)
"""Tasks of an array: Slurm's default, and the most whose script it surely takes (4 MiB)."""
_TIMEOUT_S = 120
_JOB = re.compile(r"\d+(_\d+)?")
_NUMBER = re.compile(r"(?:Submitted batch job )?(\d+)(?:;\S+| on cluster \S+)?")
"""A line of sbatch that names a job, with ``--parsable`` and without."""


def submit_run(run: Path, attempt: int, config: RunConfig, after: str | None, *words: str) -> str:
    """Submits a run's script for an attempt, as :func:`_submit`, and writes ``job.json``."""
    job = _submit(run / file_names.JOB_SCRIPT, config, after, str(attempt), *words)
    note_job("slurm", attempt_dir(run, attempt), job)
    return job


def submit_all(
    runs: Sequence[FrozenRun], options: SubmitOptions, stopped: Callable[[], bool] = lambda: False
) -> Iterator[Submitted]:
    """Submits runs and yields each, see :meth:`hires.launcher.interface.Launcher.submit_many`.

    Slurm limits each array by itself, so with a limit each array waits for the one before.
    """
    most, before = _MAX_TASKS[0], None
    with contextlib.suppress(RunError):  # if Slurm is not here at all, sbatch will say so
        most = int(scheduler.config().get("MaxArraySize", most))  # the largest index is one less
    for tasks in _split(runs, max(1, min(most, _MAX_TASKS[1]))):
        if stopped():
            why = "it was cancelled before it was submitted"
            yield from (Submitted(run.path, None, why) for run in tasks)
            continue
        waits = [options.after or "", f"afterany:{before}" if options.limit and before else ""]
        after = ",".join(filter(None, waits)) or None
        submitted = _submit_array(tasks, dataclasses.replace(options, after=after))
        before = next((one.job.partition("_")[0] for one in submitted if one.job), before)
        yield from submitted


def _split(runs: Sequence[FrozenRun], most: int) -> list[list[FrozenRun]]:
    """Returns runs as arrays of at most so many tasks, in the order of their first run."""
    alike: dict[str, list[FrozenRun]] = {}
    for run in runs:
        config = run.config
        wants: list[Any] = [str(run.path.parent), run.ranks, run.attempts]
        wants += [dataclasses.asdict(one) for one in (config.launcher, config.cluster)]
        alike.setdefault(json.dumps(wants), []).append(run)
    arrays = []
    for some in alike.values():
        arrays += [some[first : first + most] for first in range(0, len(some), most)]
    return arrays


def _submit_array(runs: Sequence[FrozenRun], options: SubmitOptions) -> list[Submitted]:
    """Submits one array; returns its runs."""
    from hires.launcher.slurm.job_script import ArrayShape, write_script

    submitted: list[Submitted] = []
    begun: list[tuple[Path, int]] = []
    first = runs[0]  # all want the same
    for run in runs:
        try:
            begun.append((run.path, next_attempt(run.path, run.argv)))
        except RunError as error:
            submitted.append(Submitted(run.path, None, str(error)))
    if not begun:
        return submitted
    try:
        shape = ArrayShape(begun, options.limit, options.exclude, first.attempts)
        arrays = first.path.parent / ARRAYS
        numbers = [int(path.name) for path in arrays.glob("*") if path.name.isdecimal()]
        folder = arrays / str(max(numbers, default=-1) + 1)  # no other command submits now
        make_folder(folder)
        script = write_script(folder, first.config, first.ranks, options.argv, shape)
        job = _submit(script, first.config, options.after)
    except HiresError as error:
        for path, attempt in begun:
            end_without_ranks(path, attempt, End(State.FAILED, str(error), "launch"))
            submitted.append(Submitted(path, None, str(error)))
        return submitted
    for index, (path, attempt) in enumerate(begun):
        note_job("slurm", attempt_dir(path, attempt), job, index)
        submitted.append(Submitted(path, f"{job}_{index}", None))
    return submitted


class JobWait:
    """Waits for one submitted run, through all attempts that its job makes.

    ``exit.json``, which the supervisor writes, counts first. The scheduler answers what the run
    folder cannot: whether a preempted job starts again, and whether a job that left no
    ``exit.json`` was cancelled or is lost. A failed query, or a single empty answer, never marks a
    run as lost.
    """

    def __init__(self, run: RunDir, job: str, on_line: OnLine | None = None) -> None:
        self.run, self.job, self.on_line = run, job, on_line
        self.status = JobStatus(UNKNOWN)
        """What the scheduler answered last."""
        self.attempt = run.attempt
        number, _, index = job.partition("_")
        self._submitted = {"job": number, "index": int(index) if index else None}
        self._tail = LinesTail(run.attempt_dir, file_names.METRICS)
        self._queried_s = 0.0
        self._ends: list[JobStatus] = []  # its last answers, if all say that the job ended

    def wait(self) -> End:
        """Returns how the run ended, in the last attempt that the job made."""
        while (end := self.poll()) is None:
            time.sleep(FILES_S)
        return end

    def poll(self) -> End | None:
        """Returns how the run ended; None while it runs."""
        self._follow()
        if time.monotonic() - self._queried_s >= QUERY_S:
            self._queried_s = time.monotonic()
            [self.status] = scheduler.job_states([self._submitted]).values()
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


def start_estimate(config: RunConfig) -> str:
    """Returns when Slurm would start a run, in its own words; a ConfigError: it would refuse it."""
    from hires.launcher.slurm.job_script import write_script

    with tempfile.TemporaryDirectory(prefix="hires-plan-") as folder:
        ranks = config.parallel.num_processes
        script = write_script(Path(folder), config, ranks, ["hires", "run"])
        try:
            lines = _sbatch("--test-only", str(script)).splitlines()
        except RunError as error:
            return str(error)
    estimates = [line for line in lines if " to start at " in line] or lines
    return " ".join(estimates).removeprefix("sbatch: ").strip()


def dependency(
    after: Sequence[str], after_any: Sequence[str], results: StrPath = "results"
) -> str | None:
    """Returns the value of sbatch's ``--dependency``, as ``Launcher.dependency`` describes it."""
    parts = [_condition("afterok", name, results) for name in after]
    parts += [_condition("afterany", name, results) for name in after_any]
    return ",".join(filter(None, parts)) or None


def _condition(kind: str, name: str, results: StrPath) -> str:
    option = "--after" if kind == "afterok" else "--after-any"
    if _JOB.fullmatch(name):
        # Slurm treats a job that it does not list as one that has ended well.
        if scheduler.is_unknown(name):
            raise ConfigError(
                f"{option} {name}: Slurm lists no such job, or no longer; if it has ended as it "
                f"should, leave the option out"
            )
        return f"{kind}:{name}"
    chosen = select([name], results)
    points = [*states(chosen.paths), *chosen.planned]
    live = [state for state in points if state.state in (State.PENDING, State.RUNNING)]
    without = [state for state in live if state.job is None]
    if without:
        raise ConfigError(
            f"{option} {name}: {_named(without)} no Slurm job that could be waited for; submit "
            f"what is pending with launcher=slurm first, or wait until it has ended"
        )
    failed = [state for state in points if state not in live and state.state != State.DONE]
    if failed and kind == "afterok":
        raise ConfigError(
            f"{option} {name}: {_named(failed)} not done and will not be; mend it with "
            f"`hires retry {name}`, or use --after-any {name}"
        )
    jobs = dict.fromkeys(str(state.job) for state in live)
    return ":".join([kind, *jobs]) if jobs else ""


def _named(states_: Sequence[RunState]) -> str:
    return f"{listed([one.name for one in states_])} {'is' if len(states_) == 1 else 'are'}"


def _submit(script: Path, config: RunConfig, after: str | None, *words: str) -> str:
    """Submits a script with its ``words`` and returns the number of the job or array.

    A site may have put a command of its own in sbatch's place, that greets and advises; only the
    line that names the job counts. A ConfigError names the key that Slurm refuses; a RunError:
    it is not here, does not answer, or names no job.
    """
    options = ["--parsable"]
    if after:  # on the command line it hides that line of the script, so it repeats the site's
        site = config.cluster.options.get("dependency")
        options.append(f"--dependency={','.join(filter(None, (str(site or ''), after)))}")
    answer = _sbatch(*options, str(script), *words, script=script)
    matches = [_NUMBER.fullmatch(line.strip()) for line in answer.splitlines()]
    numbers = [match[1] for match in matches if match]
    if numbers:
        return str(numbers[-1])
    text = " ".join(answer.split()) or "nothing"
    raise RunError(
        f"sbatch took the job, but names no number; it said: {text}; `squeue --me` shows whether "
        f"the job is queued, and scancel removes it"
    )


def _sbatch(*words: str, script: Path | None = None) -> str:
    """Returns what sbatch prints; a ConfigError or RunError: it refuses the job.

    ``script`` is named in the error, if it stays.
    """
    try:
        done = programs.run("sbatch", *words, most_s=_TIMEOUT_S)
    except programs.MissingProgramError:
        raise RunError(
            "there is no sbatch here: start it on a machine of a Slurm cluster, or use "
            "launcher=local; --dry-run writes the script all the same"
        ) from None
    except RunError as error:
        if script is None:
            raise
        raise RunError(
            f"{error}, and may have queued the job: `squeue --me` shows it, scancel removes it"
        ) from None
    if done.returncode == 0:
        return done.stderr + done.stdout  # of two lines that name a job the last one counts
    message = done.stderr or done.stdout
    why = "; ".join(line.removeprefix("sbatch: error: ") for line in message.splitlines() if line)
    text = f"sbatch refused the job: {why or 'it gave no reason'}; "
    keys = next((keys for words, keys in _CAUSES.items() if re.search(words, message, re.I)), None)
    where = "" if script is None else f"; its options are in {script}"
    if keys is None:
        raise RunError(f"{text}see what its options ask for{where}")
    raise ConfigError(f"{text}change {keys}{where}")


_CAUSES = {
    "dependency": "--after",
    "node name": "cluster.options.exclude",
    "account": "launcher.account",
    "qos": "launcher.qos",
    "array": "--max-parallel, or sweep fewer points at once",
    "partition": "launcher.partition (sinfo lists all)",
    "time limit|--time|deadline": "launcher.minutes",
    "signal": "launcher.signal_s",
    "cpu count|processors|cpus-per-task|--ntasks": "launcher.threads or the number of ranks",
    "node count|node configuration|--nodes": (
        "launcher.nodes, launcher.threads, the number of ranks or cluster.options"
    ),
}
"""Words of sbatch's message, and what to change; the first whose words occur counts."""
