"""How does a run become a Slurm job, and what is said if Slurm refuses it?

A run is one job: ``job.sbatch`` in its folder, which can be submitted by hand, too. Its batch step
runs one supervisor (:mod:`hires.launcher.batch`) that starts the ranks. Many runs are the elements
of a job array (:mod:`hires.launcher.arrays`), whose script differs in few lines. submitit writes
the script and reads what sbatch answers; its pickles are not used, because all that a job needs is
in the run folder.
"""

from __future__ import annotations

import getpass
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hires.core import launchfile, provenance
from hires.core.cluster import spread
from hires.core.config import RunConfig
from hires.core.errors import ConfigError, RunError
from hires.core.files import write_atomically
from hires.launcher import allocation

SCRIPT = "job.sbatch"
LOG = "job.log"
"""What the job's own step says, below the run folder."""
GOES_ON = ("timeout", "preempted", "node")
"""Reasons of an attempt that ended so that its job may start again."""

_TIMEOUT_S = 120


@dataclass(frozen=True)
class Elements:
    """What the script of a job array says that the one of a job does not."""

    count: int
    """How many elements it has."""
    limit: int | None = None
    """Most elements that run at once; None: as many as the cluster lets."""
    exclude: Sequence[str] = ()
    """Nodes that none may run on."""
    attempts: int = 1
    """Attempts of a run that each makes, one after the other, each of which may take as long."""


@dataclass(frozen=True)
class Step:
    """What runs on the first node of a job."""

    module: str = "hires.launcher.batch"
    """Python module; it gets the folder of the script, and what words the script was given."""
    elements: Elements | None = None
    """Of a job array; None: it is one job."""


SUPERVISE = Step()
"""One run is supervised."""


def script(
    run: Path, config: RunConfig, num_ranks: int, argv: Sequence[str], step: Step = SUPERVISE
) -> str:
    """Returns the text of a ``job.sbatch``.

    Args:
        run: the run folder, or that of the array; absolute.
        config: the frozen config, of an array that of any of its points.
        num_ranks: ranks of the world.
        argv: the command line as typed.
        step: what it runs.
    """
    from submitit.slurm.slurm import _make_sbatch_string

    launcher = config.launcher
    elements = step.elements
    sizes = spread(num_ranks, launcher.nodes)
    name = run.name if elements is None else f"{config.campaign}-{run.name}"
    parameters: dict[str, Any] = {
        # A folder that was renamed may have a name that no line of options can hold.
        "job_name": re.sub(r"[^A-Za-z0-9._+-]+", "_", name),
        "nodes": launcher.nodes,
        "ntasks_per_node": max(sizes),
        "cpus_per_task": launcher.threads,
        "time": launcher.minutes * (1 if elements is None else elements.attempts),
        "partition": launcher.partition or config.cluster.partition,
        "account": launcher.account or config.cluster.account,
        "qos": launcher.qos,
        "wckey": None,
        "stderr_to_stdout": True,
        "use_srun": False,
        "setup": launchfile.job_setup(config, argv, run),
        "additional_parameters": {
            **config.cluster.options,
            **_array(elements),
            "ntasks": num_ranks,
            "requeue": True,
            "signal": f"B:USR2@{launcher.signal_s}",
            # No line of options can hold every path, so the script itself opens its log.
            "output": "/dev/null",
        },
    }
    supervisor = f'exec {shlex.quote(sys.executable)} -u -m {step.module} "$run_dir" "$@"'
    return _make_sbatch_string(command=supervisor, folder="/dev", **parameters)


def _array(elements: Elements | None) -> dict[str, str]:
    """Returns the options that make a job an array."""
    if elements is None:
        return {}
    limit = "" if elements.limit is None else f"%{elements.limit}"
    exclude = {"exclude": ",".join(elements.exclude)} if elements.exclude else {}
    return {"array": f"0-{elements.count - 1}{limit}", **exclude}


def write_script(
    run: Path, config: RunConfig, num_ranks: int, argv: Sequence[str], step: Step = SUPERVISE
) -> Path:
    """Writes ``job.sbatch`` into a folder and returns its path; the arguments are :func:`script`'s.

    Raises:
        RunError: it cannot be written.
    """
    path = run / SCRIPT
    write_atomically(path, script(run, config, num_ranks, argv, step))
    return path


def submit(run: Path, attempt: int, options: Sequence[str] = ()) -> str:
    """Submits ``job.sbatch`` for an attempt, writes its ``job.json``, and returns the job's number.

    Args:
        run: the run folder.
        attempt: number of an attempt that was not launched yet.
        options: more options for sbatch.

    Raises:
        ConfigError: Slurm refuses an option, whose line is shown.
        RunError: Slurm is not here, or does not answer.
    """
    job = sbatch(run / SCRIPT, options, str(attempt))
    note_job(run / f"a{attempt}", job, None)
    return job


def sbatch(path: Path, options: Sequence[str] = (), *words: str) -> str:
    """Submits a script and returns the number of the job or array.

    Args:
        path: the script.
        options: more options for sbatch.
        words: arguments of the script.

    Raises:
        ConfigError: Slurm refuses an option, whose line is shown.
        RunError: Slurm is not here, or does not answer.
    """
    from submitit.slurm.slurm import SlurmExecutor

    answer = _sbatch("--parsable", *options, str(path), *words, script=path)
    number = answer.strip().split(";")[0]
    return SlurmExecutor._get_job_id_from_submission_command(f"job {number}")


def start_estimate(script: Path) -> str:
    """Returns when Slurm would start a job, in its own words, without submitting it.

    Raises:
        ConfigError: Slurm would refuse it.
        RunError: Slurm is not here, or does not answer.
    """
    return _sbatch("--test-only", str(script), script=script).removeprefix("sbatch: ").strip()


def note_job(attempt: Path, job: str, index: int | None, pack: int = 1) -> None:
    """Writes ``job.json``: what the scheduler knows an attempt by.

    Args:
        attempt: folder of the attempt.
        job: number of the job, or of the array.
        index: of the array's element, if it is one.
        pack: how many runs share the element.
    """
    values: dict[str, Any] = {"launcher": "slurm", "job": job, "index": index}
    values |= {"submitted": provenance.now()} | ({"pack": pack} if pack > 1 else {})
    write_atomically(attempt / "job.json", json.dumps(values) + "\n")


def read_job(attempt: Path) -> str | None:
    """Returns the job of an attempt as Slurm names it; None if it has none."""
    try:
        values = json.loads((attempt / "job.json").read_text(encoding="utf-8"))
        return job_name(str(values["job"]), values["index"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def job_name(job: str, index: int | None) -> str:
    """Returns how Slurm names a job, or an element of an array: ``123`` or ``123_4``."""
    return job if index is None else f"{job}_{index}"


def _sbatch(*words: str, script: Path) -> str:
    """Returns what sbatch prints; of a refusal, the reason and the line that caused it."""
    try:
        done = subprocess.run(
            ["sbatch", *words], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except FileNotFoundError:
        raise RunError(
            "there is no sbatch here: start it on a machine of a Slurm cluster, or use "
            "launcher=local; --dry-run writes the script all the same"
        ) from None
    except subprocess.TimeoutExpired:
        raise RunError(f"sbatch did not answer within {_TIMEOUT_S} s; try again later") from None
    if done.returncode != 0:
        raise _refusal(done.stderr or done.stdout, script)
    return done.stdout + done.stderr


def _refusal(message: str, script: Path) -> ConfigError | RunError:
    """Returns what to tell a user of whose script sbatch thinks ``message``."""
    said = "; ".join(line.removeprefix("sbatch: error: ") for line in message.splitlines() if line)
    option = next((o for pattern, o in _CAUSES if re.search(pattern, message, re.IGNORECASE)), None)
    if option is None:
        return RunError(f"sbatch refused the job: {said or 'it gave no reason'}; see {script}")
    text = f"sbatch refused the job: {said}"
    for number, line in enumerate(script.read_text(encoding="utf-8").splitlines(), start=1):
        if re.match(rf"#SBATCH --({option})(=|$)", line):
            text += f"; line {number} of {script} is: {line}"
    return ConfigError(f"{text}{_offer(option)}")


# What sbatch says, and the options that it may mean; the first that matches counts.
_CAUSES = (
    ("dependency", "after"),
    ("node name", "exclude"),
    ("account", "account"),
    ("qos", "qos"),
    ("array", "array"),
    ("partition", "partition"),
    ("time limit|--time|deadline", "time"),
    ("signal", "signal"),
    ("cpu count|processors|cpus-per-task|--ntasks", "cpus-per-task|ntasks|ntasks-per-node"),
    ("node count|node configuration|--nodes", "nodes|ntasks-per-node|cpus-per-task"),
)
_KEYS = {
    "after": "--after: give the number of a job that Slurm knows, or a campaign",
    "exclude": "the nodes; these do not exist any more, so run the points with `hires sweep`",
    "array": "--max-parallel, or sweep fewer points at once",
    "time": "launcher.minutes",
    "signal": "launcher.signal_s",
    "qos": "launcher.qos",
    "cpus-per-task|ntasks|ntasks-per-node": "launcher.threads or the layout's ranks",
    "nodes|ntasks-per-node|cpus-per-task": "launcher.nodes, launcher.threads or the layout's ranks",
}


def _offer(option: str) -> str:
    """Returns what could be chosen instead, as far as Slurm tells."""
    if option == "partition":
        return _choices("partition", "sinfo", "--noheader", "--format=%R (%a)")
    if option == "account":
        users = f"users={getpass.getuser()}"
        command = ("sacctmgr", "-nP", "show", "associations", users, "format=Account")
        return _choices("account", *command)
    return f"; change {_KEYS[option]}"


def _choices(key: str, *command: str) -> str:
    """Returns the names that a command lists, as a remedy."""
    try:
        names = dict.fromkeys(line.strip() for line in allocation.ask(*command).splitlines())
    except RunError:
        return f"; choose another launcher.{key}"
    there = ", ".join(name.removesuffix(" (up)") for name in names if name)
    return f"; launcher.{key} may be one of {there}" if there else f"; leave launcher.{key} out"
