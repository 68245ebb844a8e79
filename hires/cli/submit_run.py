"""What does ``hires run`` do with a run that Slurm is to start, or that is only to be written?"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from hires.cli.screens.progress_bar import StepProgress
from hires.core.config.run_config import RunConfig
from hires.core.errors import ConfigError, RunError
from hires.core.store import file_names, records
from hires.core.store.rundir import RunDir
from hires.launcher.local import local_launcher
from hires.launcher.local.local_launcher import Outcome
from hires.launcher.slurm import sbatch, slurm_launcher, waiting
from hires.launcher.slurm.dependency import dependency


def waits_for(config: RunConfig, args: argparse.Namespace) -> str | None:
    """Returns what jobs wait for, as sbatch's ``--dependency`` has it; None: for nothing.

    Args:
        config: of a run.
        args: of the command line, with ``--after`` and ``--after-any``.

    Raises:
        ConfigError: the launcher has no jobs, or a name is unknown.
    """
    if not (args.after or args.after_any):
        return None
    if config.launcher.name != "slurm":
        option = "--after" if args.after else "--after-any"
        raise ConfigError(
            f"{option} is about Slurm jobs; add launcher=slurm, or start one command after the "
            f"other"
        )
    return dependency(args.after, args.after_any, config.results)


def prepared(config: RunConfig, run: Path, world: int, argv: Sequence[str]) -> list[Path]:
    """Writes the scripts that the launcher needs; returns all that start the run by hand.

    Raises:
        RunError: the run folder cannot be written.
    """
    scripts = [run / file_names.LAUNCH_SCRIPT]
    if config.launcher.name == "slurm":
        scripts.append(slurm_launcher.write_script(run, config, world, argv))
    return scripts


def submitted(run: RunDir, after: str | None = None) -> str:
    """Submits a prepared run and returns the number of its job.

    Args:
        run: the run and its attempt.
        after: what the job waits for, as :func:`waits_for` returns it.

    Raises:
        ConfigError: Slurm refuses the job; the attempt says so, too.
        RunError: Slurm cannot be asked.
    """
    try:
        config = records.read_config(run.path)
        return slurm_launcher.submit(run.path, run.attempt, slurm_launcher.after(config, after))
    except (ConfigError, RunError) as error:
        local_launcher.leave(run.path, run.attempt, "failed", str(error))
        raise


def estimated(config: RunConfig, world: int) -> str:
    """Returns when Slurm would start the run, in its own words; nothing is submitted.

    Raises:
        ConfigError: Slurm would refuse the job.
    """
    with tempfile.TemporaryDirectory(prefix="hires-plan-") as folder:
        script = slurm_launcher.write_script(Path(folder), config, world, ["hires", "run"])
        try:
            return sbatch.start_estimate(script)
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
    print(f"  what it says:   tail -F {shlex.quote(str(run.path / slurm_launcher.LOG))}")
    print(f"  its tables:     hires show {shlex.quote(str(run.path))}")
    print(f"  to stop it:     hires cancel {shlex.quote(str(run.path))}")


def waited(config: RunConfig, run: RunDir, job: str, world: int) -> Outcome:
    """Returns how a job ended; shows the steps meanwhile.

    Ctrl-C ends the waiting only: the job goes on.
    """
    try:
        with StepProgress(world, config.batch, config.steps) as progress:
            return waiting.Waiting(run, job, progress).wait()
    except KeyboardInterrupt:
        stop = f"hires cancel {shlex.quote(str(run.path))}"
        print(f"hires: job {job} goes on; `{stop}` stops it", file=sys.stderr)
        raise
