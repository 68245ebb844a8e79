"""Writes the script of a Slurm job or job array, ``job.sbatch``.

It runs one supervisor (``slurm.job``), which starts the ranks, and may be submitted by hand, too.

submitit writes and quotes the options. Its jobs are pickled functions, whereas all that a job of
hires needs is in the run folder: so its executor writes the script of another command here, and
:mod:`hires.launcher.slurm.submission` submits it.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from submitit import SlurmExecutor

from hires.core.config.launcher_config import spread
from hires.core.config.run_config import RunConfig
from hires.core.programs import python
from hires.core.ranks import mpi_starter
from hires.core.store import file_names
from hires.core.store.files import write_atomically

JOB = "hires.launcher.slurm.job"
"""The module that a job starts."""


@dataclass(frozen=True)
class ArrayShape:
    """The tasks of a job array, and what they share."""

    tasks: Sequence[tuple[Path, int]]
    """The run and the attempt of each."""
    limit: int | None = None
    """Most tasks that run at once; None: as many as the cluster allows."""
    exclude: Sequence[str] = ()
    """Nodes that none may run on."""
    attempts: int = 1
    """Complete attempts that each makes, one after the other, each within the time limit."""


class _Script(SlurmExecutor):
    """Writes the script of a command, on machines without Slurm, too."""

    @classmethod
    def affinity(cls) -> int:
        return 1

    def text(self, command: str, **parameters: Any) -> str:
        self.update_parameters(use_srun=False, stderr_to_stdout=True, wckey=None, **parameters)
        lines = self._make_submission_file_text(command, "").split("\n")
        # What submitit's own jobs read, and its headings over one line each.
        left_out = ("# Parameters", "# setup", "# command", "export SUBMITIT_EXECUTOR=slurm")
        return "\n".join(line for line in lines if line not in left_out)


def write_script(
    folder: Path,
    config: RunConfig,
    num_ranks: int,
    argv: Sequence[str],
    array: ArrayShape | None = None,
) -> Path:
    """Writes ``job.sbatch`` into the folder of a run, or of an array of such; returns its path."""
    launcher, name, attempts = config.launcher, folder.name, 1
    tasks, options = shlex.quote(str(folder)), dict(config.cluster.options)
    if array is not None:
        name, attempts = f"{config.campaign}-{name}", array.attempts
        limit = "" if array.limit is None else f"%{array.limit}"
        tasks = "\n".join(f"{shlex.quote(str(run))} {attempt}" for run, attempt in array.tasks)
        options["array"] = f"0-{len(array.tasks) - 1}{limit}"
        if array.exclude:  # nodes that the site excludes stay excluded
            options["exclude"] = joined(options.get("exclude"), *array.exclude)
    lines = [shlex.join(["module", "load", name]) for name in config.cluster.modules]
    lines += config.cluster.setup
    setup = mpi_starter.render(argv, "job.sh", TASKS=tasks, SETUP=lines)
    if not lines:
        setup = re.sub(r"^# cluster\.modules.*?^done\n", "", setup, flags=re.DOTALL | re.MULTILINE)
    text = _Script(folder).text(
        f'exec {shlex.join(python())} -u -m {JOB} --attempts={attempts} "$@"',
        # A folder that was renamed may have a name that no line of options can hold.
        job_name=re.sub(r"[^A-Za-z0-9._+-]+", "_", name),
        nodes=launcher.nodes,
        ntasks_per_node=max(spread(num_ranks, launcher.nodes)),
        cpus_per_task=launcher.threads,
        time=launcher.minutes * attempts,
        partition=config.partition,
        account=launcher.account or config.cluster.account,
        qos=launcher.qos,
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


def joined(site: object, *others: str) -> str:
    """Returns lists with commas as one, each entry once.

    >>> joined("n[1-2,4],n5", "n5", "n6")
    'n[1-2,4],n5,n6'
    """
    texts = (str(site or ""), *others)
    parts = (part for text in texts for part in re.split(r",(?![^[]*\])", text) if part)
    return ",".join(dict.fromkeys(parts))
