"""The launcher that submits runs to Slurm."""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from hires.core.config.run_config import RunConfig
from hires.core.errors import ConfigError, RunError
from hires.core.store import file_names, launch_file
from hires.core.store.file_names import StrPath
from hires.core.store.rundir import RunDir
from hires.launcher.doctor_check import Check
from hires.launcher.interface import (
    LAUNCHERS,
    FrozenRun,
    Job,
    JobStatus,
    Launcher,
    OnLine,
    Outcome,
    SubmitOptions,
    Submitted,
)
from hires.launcher.job_wait import JobWait
from hires.launcher.local.local_launcher import leave
from hires.launcher.slurm import job_arrays, job_script, orphan_jobs, sbatch, scheduler
from hires.launcher.slurm.dependency import dependency
from hires.launcher.slurm.failed_nodes import to_exclude
from hires.launcher.slurm.slurm_checks import cluster_checks, slurm_checks
from hires.launcher.status.run_state import RunState


@LAUNCHERS.register("slurm")
class SlurmLauncher(Launcher):
    """Submits each run as a Slurm job, and many as the tasks of job arrays."""

    has_jobs = True

    def dependency(
        self, after: Sequence[str], after_any: Sequence[str], results: StrPath
    ) -> str | None:
        """Returns the value of sbatch's ``--dependency``, see :class:`Launcher`."""
        return dependency(after, after_any, results)

    def write_scripts(
        self, run: Path, config: RunConfig, num_ranks: int, argv: Sequence[str]
    ) -> list[Path]:
        """Writes ``job.sbatch``."""
        script = job_script.write_script(run, config, num_ranks, argv)
        return [run / file_names.LAUNCH_SCRIPT, script]

    def start_estimate(self, config: RunConfig, num_ranks: int) -> str:
        """Returns when Slurm would start a run, in its own words."""
        with tempfile.TemporaryDirectory(prefix="hires-plan-") as folder:
            path = job_script.write_script(Path(folder), config, num_ranks, ["hires", "run"])
            try:
                return sbatch.start_estimate(path)
            except ConfigError:
                raise
            except RunError as error:
                return str(error)

    def submit(self, run: RunDir, config: RunConfig, after: str | None = None) -> str:
        """Submits ``job.sbatch`` for an attempt and returns the job's number."""
        try:
            return job_script.submit(run.path, run.attempt, job_script.after(config, after))
        except (ConfigError, RunError) as error:
            leave(run.path, run.attempt, "failed", str(error))
            raise

    def submit_many(
        self,
        runs: Sequence[FrozenRun],
        options: SubmitOptions,
        stopped: Callable[[], bool] = lambda: False,
    ) -> Iterator[Submitted]:
        """Submits runs as few job arrays."""
        return job_arrays.submit_all(runs, options, stopped)

    def wait(
        self, run: RunDir, job: str | None, on_line: OnLine | None, args: Sequence[str] = ()
    ) -> Outcome:
        """Waits until the job has ended."""
        assert job is not None
        return JobWait(self, run, job, on_line).wait()

    def hints(self, run: RunDir, job: str) -> list[tuple[str, str]]:
        """Returns how to watch a job."""
        log = shlex.quote(str(run.path / job_script.LOG))
        return [("in the queue:", f"squeue --jobs={job}"), ("its output:", f"tail -F {log}")]

    def job_states(self, jobs: Iterable[Job]) -> dict[str, JobStatus]:
        """Returns the state of each job, by its name."""
        return scheduler.job_states(jobs)

    def cancel(self, jobs: Iterable[Job]) -> None:
        """Cancels jobs with ``scancel``."""
        scheduler.cancel(jobs)

    def silent_end(self, run: RunDir, job: str) -> str | None:
        """Returns that the node of a job does not see the run folder, if its exit code says so."""
        code = scheduler.exit_code(job)
        if code != launch_file.NO_FOLDER:
            return None
        return (
            f"job {job} ended with exit code {code}: its node does not see {run.path}, or cannot "
            f"write {job_script.LOG} there; keep results= on a file system that all nodes mount at "
            f"the same place"
        )

    def orphan_jobs(self, runs: Sequence[Path]) -> dict[Path, str]:
        """Returns the jobs of runs that sbatch submitted without an answer in time."""
        return orphan_jobs.orphan_jobs(runs)

    def repair(self, campaign: Path) -> Iterator[str]:
        """Writes each missing ``job.json`` of a campaign's job arrays."""
        return orphan_jobs.repair(campaign)

    def avoided_nodes(self, states: Sequence[RunState], configs: Sequence[RunConfig]) -> list[str]:
        """Returns the nodes that failed under runs."""
        partitions = {config.partition for config in configs}
        partition = partitions.pop() if len(partitions) == 1 else None
        return to_exclude(states, max(config.launcher.nodes for config in configs), partition)

    def checks(self, config: RunConfig) -> list[Check]:
        """Returns whether Slurm answers, keeps accounts, and has as many nodes as wanted."""
        return slurm_checks(config)

    def node_checks(self, config: RunConfig, argv: Sequence[str], patience_s: float) -> list[Check]:
        """Returns what one rank on each node of a job finds."""
        return cluster_checks(config, argv, patience_s)
