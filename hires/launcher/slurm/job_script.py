"""Writes and submits the script of a Slurm job, ``job.sbatch`` in the folder of its run.

The script can be submitted by hand, too. Its batch step runs one supervisor
(:mod:`hires.launcher.slurm.batch`) that starts the ranks. Many runs are the tasks of a job array
(:mod:`hires.launcher.slurm.job_arrays`), whose script differs in few lines. submitit writes the
text; its executors are not used, because they pickle what a job needs, and here all of it is in the
run folder.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hires.core.config.launcher_config import spread
from hires.core.config.run_config import RunConfig
from hires.core.store import file_names, launch_file
from hires.core.store.file_names import attempt_dir
from hires.core.store.files import write_atomically
from hires.launcher.interface import note_job
from hires.launcher.slurm import sbatch

SCRIPT = file_names.JOB_SCRIPT
LOG = file_names.JOB_LOG
"""Output of the batch step, below the run folder."""


@dataclass(frozen=True)
class ArrayShape:
    """Options of a job array."""

    count: int
    """How many tasks it has."""
    limit: int | None = None
    """Most tasks that run at once; None: as many as the cluster allows."""
    exclude: Sequence[str] = ()
    """Nodes that none may run on."""
    attempts: int = 1
    """Attempts of a run that each task makes, one after the other, each within the time limit."""


@dataclass(frozen=True)
class BatchStep:
    """What runs on the first node of a job."""

    module: str = "hires.launcher.slurm.batch"
    """Python module; it gets the folder of the script, and the arguments of the script."""
    array: ArrayShape | None = None
    """Of a job array; None: it is one job."""


SUPERVISE = BatchStep()


def script(
    run: Path, config: RunConfig, num_ranks: int, argv: Sequence[str], step: BatchStep = SUPERVISE
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
    array = step.array
    sizes = spread(num_ranks, launcher.nodes)
    name = run.name if array is None else f"{config.campaign}-{run.name}"
    parameters: dict[str, Any] = {
        # A folder that was renamed may have a name that no line of options can hold.
        "job_name": re.sub(r"[^A-Za-z0-9._+-]+", "_", name),
        "nodes": launcher.nodes,
        "ntasks_per_node": max(sizes),
        "cpus_per_task": launcher.threads,
        "time": launcher.minutes * (1 if array is None else array.attempts),
        "partition": config.partition,
        "account": launcher.account or config.cluster.account,
        "qos": launcher.qos,
        "wckey": None,
        "stderr_to_stdout": True,
        "use_srun": False,
        "setup": launch_file.job_setup(config, argv, run),
        "additional_parameters": {
            **_merged(config.cluster.options, _array_options(array)),
            "ntasks": num_ranks,
            "requeue": True,
            "signal": f"B:USR2@{launcher.signal_s}",
            # No line of options can hold every path, so the script itself opens its log.
            "output": "/dev/null",
        },
    }
    supervisor = f'exec {shlex.quote(sys.executable)} -u -m {step.module} "$run_dir" "$@"'
    return _make_sbatch_string(command=supervisor, folder="/dev", **parameters)


def _array_options(array: ArrayShape | None) -> dict[str, str]:
    if array is None:
        return {}
    limit = "" if array.limit is None else f"%{array.limit}"
    exclude = {"exclude": ",".join(array.exclude)} if array.exclude else {}
    return {"array": f"0-{array.count - 1}{limit}", **exclude}


def _merged(site: Mapping[str, Any], ours: Mapping[str, str]) -> dict[str, Any]:
    """Returns the options of a site and ours; of a list that both have, all entries.

    >>> _merged({"exclude": "n1,n2", "mem": 0}, {"exclude": "n2,n3"})
    {'exclude': 'n1,n2,n3', 'mem': 0}
    """
    return {**site, **ours} | {
        key: _joined(str(site[key]), ours[key]) for key in site.keys() & ours.keys()
    }


def _joined(*lists: str) -> str:
    """Returns the entries of lists with commas, each once.

    >>> _joined("n[1-2,4],n5", "n5,n6")
    'n[1-2,4],n5,n6'
    """
    parts = (part for text in lists for part in re.split(r",(?![^[]*\])", text) if part)
    return ",".join(dict.fromkeys(parts))


def after(config: RunConfig, *others: str | None) -> list[str]:
    """Returns sbatch's ``--dependency`` for all that a job has to wait for, as a list of words.

    An option on the command line hides that line of the script, so it repeats the site's.

    Args:
        config: whose ``cluster.options`` may have a ``dependency``.
        others: what else it waits for, in sbatch's words; None: nothing.
    """
    wanted = [text for text in others if text]
    site = config.cluster.options.get("dependency")
    if not wanted:
        return []
    return [f"--dependency={_joined(*([str(site)] if site else []), *wanted)}"]


def write_script(
    run: Path, config: RunConfig, num_ranks: int, argv: Sequence[str], step: BatchStep = SUPERVISE
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
    job = sbatch.submit(run / SCRIPT, options, str(attempt))
    note_job(attempt_dir(run, attempt), job)
    return job
