"""The launchers whose command starts the ranks and waits for them.

They differ in the words that start the ranks: data of :mod:`hires.core.ranks.mpi_dialects`.
"""

from __future__ import annotations

from collections.abc import Sequence

from hires.core.config.run_config import RunConfig
from hires.core.store.rundir import RunDir
from hires.launcher.interface import LAUNCHERS, Launcher, OnLine, Outcome
from hires.launcher.local.local_launcher import launch


@LAUNCHERS.register("local")
class LocalLauncher(Launcher):
    """Starts one process per rank on this machine."""

    has_jobs = False

    def submit(self, run: RunDir, config: RunConfig, after: str | None = None) -> None:
        """Submits nothing: :meth:`wait` starts the ranks."""

    def wait(
        self, run: RunDir, job: str | None, on_line: OnLine | None, args: Sequence[str] = ()
    ) -> Outcome:
        """Starts the ranks and returns how they ended, see :class:`Launcher`."""
        return launch(run.path, run.attempt, args=args, on_line=on_line)


@LAUNCHERS.register("mpirun")
class MpirunLauncher(LocalLauncher):
    """Starts all ranks with one command of an MPI, on this machine or on ``launcher.hosts``."""


@LAUNCHERS.register("torchrun")
class TorchrunLauncher(LocalLauncher):
    """Starts all ranks with torchrun on this machine."""
