"""Renders the command line and the script that start a run again.

``launch.sh`` of a run folder is a file of ``launch/`` with this machine's values filled in, each
quoted for the shell; ``launch/job.sh`` is what hires writes into the script of a Slurm job. The
templates ship in the wheel as the data package ``hires.launch``.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from hires.core.config.run_config import RunConfig
from hires.core.programs import python
from hires.core.python_path import without_empty_entries
from hires.core.ranks import mpi_starter
from hires.core.shipped import shipped

FAILED_SETUP = "HIRES_FAILED_SETUP"
"""Variable in which ``launch/job.sh`` holds the first line of its set-up that failed."""


def reproduce_line(argv: Sequence[str]) -> str:
    """Returns the command line that was typed as one shell-quoted line that begins with hires.

    Without ``--json``, which changes what is printed alone.
    """
    words = [word for word in argv if word != "--json"]
    if words and Path(words[0]).name in ("hires", "__main__.py"):
        del words[0]
    return shlex.join(["hires", *words])


def launch_script(config: RunConfig, argv: Sequence[str]) -> str:
    """Returns the text of a run's ``launch.sh``; ``argv`` is the command line as typed."""
    if config.launcher.has_jobs:
        return render(argv, f"{config.launcher.name}.sh")
    name, starter = config.launcher.name, ""
    if name == "torchrun" or (name == "mpirun" and config.mpi != "srun"):
        # One command starts the ranks, on machines that are known beforehand.
        hosts = mpi_starter.hosts_of(config, config.parallel.num_ranks)
        starter = f" -- \\\n    {shlex.join(mpi_starter.starter(config, hosts).words)}"
    return render(argv, STARTER=starter)


def render(argv: Sequence[str], template: str = "local.sh", **values: Sequence[str]) -> str:
    """Returns the text of a script for a run that ``argv`` started from the current folder.

    ``values`` replace names of the template: words, which are quoted, or text as it is.
    """
    values = {
        # A line break inside an argument would end the comment and run as a command.
        "COMMAND": " ".join(reproduce_line(argv).splitlines()),
        "FOLDER": [str(Path.cwd())],
        "MODULE": [*python(), "-m"],
        "PYTHONPATH": [without_empty_entries(os.environ.get("PYTHONPATH", ""))],
        "RUN": ".",
        "STARTER": "",
        **values,
    }
    texts = {k: v if isinstance(v, str) else shlex.join(v) for k, v in values.items()}
    return re.sub(r"@([A-Z]+)@", lambda match: texts[match[1]], _template(template))


def _template(name: str) -> str:
    """Returns the text of a file in ``launch/``, which every launcher with jobs has."""
    return shipped(f"launch/{name}").read_text(encoding="utf-8")
