"""The launcher that submits runs to Slurm."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hires.core.config.run_config import RunConfig
from hires.core.errors import HiresError
from hires.core.store import file_names
from hires.core.store.ends import End, State
from hires.core.store.rundir import RunDir
from hires.launcher.interface import LAUNCHERS, Launcher, OnLine
from hires.launcher.launch_attempt import end_without_ranks
from hires.launcher.slurm import scheduler, slurm_checks, submission


@LAUNCHERS.register("slurm")
class SlurmLauncher(Launcher):
    """Submits each run as a Slurm job, and many as the tasks of job arrays."""

    dependency = staticmethod(submission.dependency)
    start_estimate = staticmethod(submission.start_estimate)
    submit_many = staticmethod(submission.submit_all)
    job_states = staticmethod(scheduler.job_states)
    cancel = staticmethod(scheduler.cancel)
    avoided_nodes = staticmethod(scheduler.avoided_nodes)
    checks = staticmethod(slurm_checks.slurm_checks)
    node_checks = staticmethod(slurm_checks.cluster_checks)

    def write_scripts(self, run: Path, config: RunConfig, argv: Sequence[str]) -> list[Path]:
        """Writes ``job.sbatch``."""
        from hires.launcher.slurm.job_script import write_script

        script = write_script(run, config, config.parallel.num_processes, argv)
        return [run / file_names.LAUNCH_SCRIPT, script]

    def submit(self, run: RunDir, config: RunConfig, after: str | None = None) -> str:
        """Submits ``job.sbatch`` for an attempt and returns the job's number."""
        try:
            return submission.submit_run(run.path, run.attempt, config, after)
        except HiresError as error:
            end_without_ranks(run.path, run.attempt, End(State.FAILED, str(error), "launch"))
            raise

    def wait(
        self, run: RunDir, job: str | None, on_line: OnLine | None, args: Sequence[str] = ()
    ) -> End:
        """Waits until the job has ended."""
        assert job is not None
        return submission.JobWait(run, job, on_line).wait()
