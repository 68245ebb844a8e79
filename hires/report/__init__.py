"""Run folders become tables, and a program starts a run.

hires.load("results/fig2*")                  runs, campaigns and patterns as pandas DataFrames
hires.run("parallel=sp", image=[480, 640])   what `hires run` does, then the run's DataFrames
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hires.core import errors
from hires.core.programs import module_command
from hires.core.store.file_names import StrPath

if TYPE_CHECKING:
    from hires.report.tables import Frames


def load(runs: StrPath | Iterable[StrPath] | None = None, results: StrPath = "results") -> Frames:
    """Returns the data of runs as pandas DataFrames, with what their campaigns planned.

    Args:
        runs: a folder of a run, a campaign or all results, a pattern of folders as
            ``results/fig2*``, the name of a campaign, the name or the beginning of the hash of a
            run, or several of these; None: all campaigns.
        results: folder of the campaigns; names and patterns are looked for below it, too.

    Raises:
        ConfigError: one of ``runs`` means no run and no campaign, or several runs.
        TypeError: one of ``runs`` is neither text nor a path.
    """
    from hires.core.store import rundir
    from hires.report import tables  # pandas takes a second

    return tables.load(*rundir.matching(runs, results))


def run(*words: str, **keys: Any) -> Frames:
    """Runs an experiment as ``hires run`` does, and returns its data as :func:`load` does.

    A run that is complete already is not run again. What the command says while it runs goes to the
    standard error of the program, which waits for it, also for a job of Slurm.

    Args:
        words: overrides and options of the command, as ``"data.path=photos"`` or ``"--again"``.
        keys: overrides without dots, as ``image=[480, 640]``.

    Raises:
        ConfigError, PlanError, RunError: the command ends with one.
    """
    from hires.core.store.naming import overrides

    words = (*words, *overrides({}, keys))
    wait = ["--wait"] if "launcher=slurm" in words and "--dry-run" not in words else []
    command = module_command("hires", "run", *words, *wait, "--json")
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    answer = json.loads(ended.stdout or "{}")
    if error := answer.get("error"):
        kind = getattr(errors, error["type"], errors.RunError)
        raise kind(error["text"])
    if "run" not in answer:
        raise errors.RunError(f"hires run ended with {ended.returncode}; its reason stands above")
    results = [word.partition("=")[2] for word in words if word.startswith("results=")]
    path = Path(*results[-1:] or ["results"], answer.get("campaign", ""), answer["run"])
    return load(path)
