"""Which line and which script start a run again?

``launch.sh`` of a run folder is ``launch/<launcher>.sh`` with this machine's values filled in, each
quoted for the shell; ``launch/job.sh`` is what hires writes into the script of a Slurm job. The
templates ship in the wheel as the data package ``hires.launch``.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

import hires


def reproduce_line(argv: Sequence[str]) -> str:
    """Returns the command line that was typed as one shell-quoted line that begins with hires."""
    words = list(argv)
    if words and Path(words[0]).name in ("hires", "__main__.py"):
        del words[0]
    return shlex.join(["hires", *words])


def render(argv: Sequence[str], template: str = "local.sh", run: Path | None = None) -> str:
    """Returns the text of a script for a run that ``argv`` started from the current folder.

    Args:
        argv: the command line as typed.
        template: name of a file in ``launch/``.
        run: the run folder, for scripts that are executed from a copy elsewhere.
    """
    values = {
        # A line break inside an argument would end the comment and run as a command.
        "COMMAND": " ".join(reproduce_line(argv).splitlines()),
        "FOLDER": shlex.quote(str(Path.cwd())),
        "PYTHON": shlex.quote(sys.executable),
        "PYTHONPATH": shlex.quote(os.environ.get("PYTHONPATH", "")),
        "RUN": shlex.quote(str(run or ".")),
    }
    return re.sub(r"@([A-Z]+)@", lambda match: values[match[1]], _template(template))


def _template(name: str) -> str:
    """Returns the text of a file in ``launch/``, installed or beside the package in a checkout."""
    try:
        return (resources.files("hires.launch") / name).read_text(encoding="utf-8")
    except (ModuleNotFoundError, FileNotFoundError):
        beside = Path(hires.__file__).resolve().parent.parent / "launch" / name
        return beside.read_text(encoding="utf-8")
