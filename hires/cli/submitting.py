"""What does ``hires run`` do with a run that Slurm is to start, or that is only to be written?"""

from __future__ import annotations

import json
import shlex
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from hires.cli.progress import StepProgress
from hires.core.config import RunConfig
from hires.core.errors import ConfigError, RunError
from hires.core.rundir import RunDir
from hires.launcher import local, slurm, waiting
from hires.launcher.local import Outcome


def prepared(config: RunConfig, run: RunDir, world: int, argv: Sequence[str]) -> list[Path]:
    """Writes the scripts that the launcher needs; returns all that start the run by hand.

    Raises:
        RunError: the run folder cannot be written.
    """
    scripts = [run.path / "launch.sh"]
    if config.launcher.name == "slurm":
        scripts.append(slurm.write_script(run.path, config, world, argv))
    return scripts


def submitted(run: RunDir) -> str:
    """Submits a prepared run and returns the number of its job.

    Raises:
        ConfigError: Slurm refuses the job; the attempt says so, too.
        RunError: Slurm cannot be asked.
    """
    try:
        return slurm.submit(run.path, run.attempt)
    except (ConfigError, RunError) as error:
        local.leave(run.path, run.attempt, "failed", str(error))
        raise


def estimated(config: RunConfig, world: int) -> str:
    """Returns when Slurm would start the run, in its own words; nothing is submitted.

    Raises:
        ConfigError: Slurm would refuse the job.
    """
    with tempfile.TemporaryDirectory(prefix="hires-plan-") as folder:
        script = slurm.write_script(Path(folder), config, world, ["hires", "run"])
        try:
            return slurm.start_estimate(script)
        except ConfigError:
            raise
        except RunError as error:
            return str(error)


def tell(run: RunDir, job: str, as_json: bool) -> None:
    """Says which job a run is, and how it is watched and stopped."""
    if as_json:
        print(json.dumps({"run": str(run.path), "attempt": run.attempt, "job": job}, indent=2))
        return
    print(f"job {job} is attempt {run.attempt} of {run.path}")
    print(f"  in the queue:   squeue --jobs={job}")
    print(f"  what it says:   tail -F {shlex.quote(str(run.path / slurm.LOG))}")
    print(f"  its tables:     hires show {shlex.quote(str(run.path))}")
    print(f"  to stop it:     scancel {job}")


def waited(config: RunConfig, run: RunDir, job: str, world: int) -> Outcome:
    """Returns how a job ended; shows the steps meanwhile.

    Ctrl-C ends the waiting only: the job goes on.
    """
    try:
        with StepProgress(world, config.batch, config.steps) as progress:
            return waiting.Waiting(run, job, progress).wait()
    except KeyboardInterrupt:
        print(f"hires: job {job} goes on; `scancel {job}` stops it", file=sys.stderr)
        raise
