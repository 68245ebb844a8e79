"""Writes the script of a Slurm job, ``job.sbatch``, and submits it.

It runs one supervisor (``slurm.batch``), which starts the ranks, and may be submitted by hand, too.

submitit quotes and writes the lines of options. Its public executors only submit pickled functions,
whereas all that a job of hires needs is in the run folder; the text alone comes from a private
function, so the version is pinned and ``tests/launcher/test_slurm_script.py`` reads every line.
"""

from __future__ import annotations

import functools
import re
import shlex
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hires.core import programs
from hires.core.config.launcher_config import spread
from hires.core.config.run_config import RunConfig
from hires.core.errors import ConfigError, RunError
from hires.core.python_command import python
from hires.core.store import file_names, launch_file
from hires.core.store.file_names import StrPath
from hires.core.store.files import write_atomically
from hires.launcher import interface
from hires.launcher.slurm import scheduler
from hires.launcher.status.run_selection import select
from hires.launcher.status.run_state import DONE, PENDING, RUNNING, RunState
from hires.launcher.status.state import states

BATCH, CHECKUP = "hires.launcher.slurm.batch", "--checkup"
"""What a job starts, and its option for the ranks of ``hires doctor``."""
_TIMEOUT_S = 120
_JOB = re.compile(r"\d+(_\d+)?")
_SHOWN = 3
"""Runs that one error names."""
_NUMBER = re.compile(r"(?:Submitted batch job )?(\d+)(?:;\S+| on cluster \S+)?")
"""A line of sbatch that names a job, with ``--parsable`` and without."""
note_job = functools.partial(interface.note_job, "slurm")


@dataclass(frozen=True)
class ArrayShape:
    """Options of a job array."""

    count: int
    limit: int | None = None
    """Most tasks that run at once; None: as many as the cluster allows."""
    exclude: Sequence[str] = ()
    """Nodes that none may run on."""
    attempts: int = 1
    """Attempts of a run that each task makes, one after the other, each within the time limit."""


def write_script(
    folder: Path,
    config: RunConfig,
    num_ranks: int,
    argv: Sequence[str],
    array: ArrayShape | None = None,
) -> Path:
    """Writes ``job.sbatch`` into the folder of a run, or of an array of such; returns its path."""
    from submitit.slurm.slurm import _make_sbatch_string

    launcher, name, attempts = config.launcher, folder.name, 1
    options = dict(config.cluster.options)
    if array is not None:
        name, attempts = f"{config.campaign}-{name}", array.attempts
        limit = "" if array.limit is None else f"%{array.limit}"
        options["array"] = f"0-{array.count - 1}{limit}"
        if array.exclude:  # nodes that the site excludes stay excluded
            options["exclude"] = _joined(options.get("exclude"), *array.exclude)
    run, modules = [str(folder)], config.cluster.modules
    setup = launch_file.render(argv, "job.sh", RUN=run, MODULES=modules)
    text = _make_sbatch_string(
        command=f'exec {shlex.join(python())} -u -m {BATCH} "$run_dir" "$@"',
        folder="/dev",
        # A folder that was renamed may have a name that no line of options can hold.
        job_name=re.sub(r"[^A-Za-z0-9._+-]+", "_", name),
        nodes=launcher.nodes,
        ntasks_per_node=max(spread(num_ranks, launcher.nodes)),
        cpus_per_task=launcher.threads,
        time=launcher.minutes * attempts,
        partition=config.partition,
        account=launcher.account or config.cluster.account,
        qos=launcher.qos,
        wckey=None,  # type: ignore[arg-type]  # its own default is a key that few sites have
        stderr_to_stdout=True,
        use_srun=False,
        setup=setup.rstrip("\n").split("\n"),
        additional_parameters={
            **options,
            "ntasks": num_ranks,
            "requeue": True,
            "signal": f"B:USR2@{launcher.signal_s}",
            # No line of options can hold every path, so the script itself opens its log.
            "output": "/dev/null",
        },
    )
    path = folder / file_names.JOB_SCRIPT
    write_atomically(path, text)
    return path


def submit_attempt(run: Path, attempt: int, options: Sequence[str] = (), *words: str) -> str:
    """Submits a run's script for an attempt, as :func:`submit`, and writes ``job.json``."""
    job = submit(run / file_names.JOB_SCRIPT, options, str(attempt), *words)
    note_job(file_names.attempt_dir(run, attempt), job)
    return job


def submit(script: Path, options: Sequence[str] = (), *words: str) -> str:
    """Submits a script with its ``words`` and returns the number of the job or array.

    A site may have put a command of its own in sbatch's place, that greets and advises; only the
    line that names the job counts. A ConfigError names the key that Slurm refuses; a RunError:
    it is not here, does not answer, or names no job.
    """
    answer = _sbatch("--parsable", *options, str(script), *words, script=script)
    matches = [_NUMBER.fullmatch(line.strip()) for line in answer.splitlines()]
    numbers = [match[1] for match in matches if match]
    if numbers:
        return str(numbers[-1])
    text = " ".join(answer.split()) or "nothing"
    raise RunError(
        f"sbatch took the job, but names no number; it said: {text}; `squeue --me` shows whether "
        f"the job is queued, and scancel removes it"
    )


def start_estimate(config: RunConfig) -> str:
    """Returns when Slurm would start a run, in its own words; a ConfigError: it would refuse it."""
    with tempfile.TemporaryDirectory(prefix="hires-plan-") as folder:
        ranks = config.parallel.num_ranks
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
    live = [state for state in points if state.state in (PENDING, RUNNING)]
    without = [state for state in live if state.job is None]
    if without:
        raise ConfigError(
            f"{option} {name}: {_named(without)} no Slurm job that could be waited for; submit "
            f"what is pending with launcher=slurm first, or wait until it has ended"
        )
    failed = [state for state in points if state not in live and state.state != DONE]
    if failed and kind == "afterok":
        raise ConfigError(
            f"{option} {name}: {_named(failed)} not done and will not be; mend it with "
            f"`hires retry {name}`, or use --after-any {name}"
        )
    jobs = dict.fromkeys(str(state.job) for state in live)
    return ":".join([kind, *jobs]) if jobs else ""


def _named(states_: Sequence[RunState]) -> str:
    names = ", ".join(state.name for state in states_[:_SHOWN])
    more = f" and {len(states_) - _SHOWN} more" if len(states_) > _SHOWN else ""
    return f"{names}{more} {'is' if len(states_) == 1 else 'are'}"


def after(config: RunConfig, *others: str | None) -> list[str]:
    """Returns sbatch's ``--dependency`` for all that a job has to wait for, as a list of words.

    An option on the command line hides that line of the script, so it repeats the site's.
    """
    wanted = [text for text in others if text]
    site = config.cluster.options.get("dependency")
    return [f"--dependency={_joined(site, *wanted)}"] if wanted else []


def _joined(site: object, *others: str) -> str:
    """Returns lists with commas as one, each entry once.

    >>> _joined("n[1-2,4],n5", "n5", "n6")
    'n[1-2,4],n5,n6'
    """
    texts = (str(site or ""), *others)
    parts = (part for text in texts for part in re.split(r",(?![^[]*\])", text) if part)
    return ",".join(dict.fromkeys(parts))


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
    if done.returncode != 0:
        raise _refusal(done.stderr or done.stdout, script)
    return done.stderr + done.stdout  # of two lines that name a job the last one counts


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


def _refusal(message: str, script: Path | None) -> ConfigError | RunError:
    why = "; ".join(line.removeprefix("sbatch: error: ") for line in message.splitlines() if line)
    text = f"sbatch refused the job: {why or 'it gave no reason'}; "
    keys = next((keys for words, keys in _CAUSES.items() if re.search(words, message, re.I)), None)
    where = "" if script is None else f"; its options are in {script}"
    if keys is None:
        return RunError(f"{text}see what its options ask for{where}")
    return ConfigError(f"{text}change {keys}{where}")
