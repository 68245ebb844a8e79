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

from hires.core.config.launcher_config import spread
from hires.core.config.run_config import RunConfig
from hires.core.store import file_names, launch_file
from hires.core.store.files import write_atomically
from hires.launcher import interface
from hires.launcher.slurm import sbatch

BATCH = "hires.launcher.slurm.batch"
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


@dataclass(frozen=True)
class JobScript:
    """The script of a job, or of a job array."""

    folder: Path
    """The run folder, or that of the array; absolute."""
    config: RunConfig
    """The frozen config, of an array that of any of its points."""
    num_ranks: int
    argv: Sequence[str]
    """The command line as typed."""
    array: ArrayShape | None = None
    module: str = BATCH
    """Python module that the job runs on its first node, with the folder and its own arguments."""

    def write(self) -> Path:
        """Writes ``job.sbatch`` into the folder and returns its path.

        Raises:
            RunError: it cannot be written.
        """
        path = self.folder / file_names.JOB_SCRIPT
        write_atomically(path, self.text())
        return path

    def text(self) -> str:
        """Returns the text of the script."""
        from submitit.slurm.slurm import _make_sbatch_string

        config, launcher, array = self.config, self.config.launcher, self.array
        name, attempts = self.folder.name, 1
        options = dict(config.cluster.options)
        if array is not None:
            name, attempts = f"{config.campaign}-{name}", array.attempts
            limit = "" if array.limit is None else f"%{array.limit}"
            options["array"] = f"0-{array.count - 1}{limit}"
            if array.exclude:  # nodes that the site excludes stay excluded
                site = str(options.get("exclude", ""))
                options["exclude"] = sbatch.joined(site, ",".join(array.exclude))
        return _make_sbatch_string(
            command=f'exec {shlex.quote(sys.executable)} -u -m {self.module} "$run_dir" "$@"',
            folder="/dev",
            # A folder that was renamed may have a name that no line of options can hold.
            job_name=re.sub(r"[^A-Za-z0-9._+-]+", "_", name),
            nodes=launcher.nodes,
            ntasks_per_node=max(spread(self.num_ranks, launcher.nodes)),
            cpus_per_task=launcher.threads,
            time=launcher.minutes * attempts,
            partition=config.partition,
            account=launcher.account or config.cluster.account,
            qos=launcher.qos,
            wckey=None,  # type: ignore[arg-type]  # its own default is a key that few sites have
            stderr_to_stdout=True,
            use_srun=False,
            setup=launch_file.job_setup(config, self.argv, self.folder),
            additional_parameters={
                **options,
                "ntasks": self.num_ranks,
                "requeue": True,
                "signal": f"B:USR2@{launcher.signal_s}",
                # No line of options can hold every path, so the script itself opens its log.
                "output": "/dev/null",
            },
        )


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
