"""Writes and submits the script of a Slurm job, ``job.sbatch`` in the folder of its run.

The script can be submitted by hand, too. Its batch step runs one supervisor
(:mod:`hires.launcher.slurm.batch`) that starts the ranks. Many runs are the tasks of a job array
(:mod:`hires.launcher.slurm.job_arrays`), whose script differs in few lines.

submitit quotes and writes the lines of options. Its public executors only submit pickled functions,
whereas all that a job of hires needs is in the run folder; the text alone comes from a private
function, so the version is pinned and ``tests/launcher/test_slurm_script.py`` reads every line.
"""

from __future__ import annotations

import functools
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hires.core.config.launcher_config import spread
from hires.core.config.run_config import RunConfig
from hires.core.store import file_names, launch_file
from hires.core.store.files import write_atomically
from hires.launcher import interface
from hires.launcher.slurm import sbatch

BATCH = "hires.launcher.slurm.batch"
"""Python module that a job runs on its first node, with the script's folder and its arguments."""
note_job = functools.partial(interface.note_job, "slurm")


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

    def options(self, site: dict[str, Any]) -> dict[str, str]:
        """Returns the options of sbatch; nodes that the site excludes stay excluded."""
        options = {"array": f"0-{self.count - 1}" + (f"%{self.limit}" if self.limit else "")}
        if self.exclude:
            options["exclude"] = sbatch.joined(str(site.get("exclude", "")), ",".join(self.exclude))
        return options


def script(
    run: Path,
    config: RunConfig,
    num_ranks: int,
    argv: Sequence[str],
    array: ArrayShape | None = None,
    module: str = BATCH,
) -> str:
    """Returns the text of a ``job.sbatch``.

    Args:
        run: the run folder, or that of the array; absolute.
        config: the frozen config, of an array that of any of its points.
        num_ranks: ranks of the world.
        argv: the command line as typed.
        array: shape of a job array; None: it is one job.
        module: Python module that the job runs.
    """
    from submitit.slurm.slurm import _make_sbatch_string

    launcher = config.launcher
    name = run.name if array is None else f"{config.campaign}-{run.name}"
    site = config.cluster.options
    return _make_sbatch_string(
        command=f'exec {shlex.quote(sys.executable)} -u -m {module} "$run_dir" "$@"',
        folder="/dev",
        # A folder that was renamed may have a name that no line of options can hold.
        job_name=re.sub(r"[^A-Za-z0-9._+-]+", "_", name),
        nodes=launcher.nodes,
        ntasks_per_node=max(spread(num_ranks, launcher.nodes)),
        cpus_per_task=launcher.threads,
        time=launcher.minutes * (1 if array is None else array.attempts),
        partition=config.partition,
        account=launcher.account or config.cluster.account,
        qos=launcher.qos,
        wckey=None,  # type: ignore[arg-type]  # its own default is a key that few sites have
        stderr_to_stdout=True,
        use_srun=False,
        setup=launch_file.job_setup(config, argv, run),
        additional_parameters={
            **site,
            **({} if array is None else array.options(site)),
            "ntasks": num_ranks,
            "requeue": True,
            "signal": f"B:USR2@{launcher.signal_s}",
            # No line of options can hold every path, so the script itself opens its log.
            "output": "/dev/null",
        },
    )


def write_script(
    run: Path,
    config: RunConfig,
    num_ranks: int,
    argv: Sequence[str],
    array: ArrayShape | None = None,
    module: str = BATCH,
) -> Path:
    """Writes ``job.sbatch`` into a folder and returns its path; the arguments are :func:`script`'s.

    Raises:
        RunError: it cannot be written.
    """
    path = run / file_names.JOB_SCRIPT
    write_atomically(path, script(run, config, num_ranks, argv, array, module))
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
    job = sbatch.submit(run / file_names.JOB_SCRIPT, options, str(attempt))
    note_job(file_names.attempt_dir(run, attempt), job)
    return job
