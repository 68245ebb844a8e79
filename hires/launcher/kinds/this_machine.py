"""The launchers whose command starts the ranks (``core.ranks.mpi_starter``) and waits for them."""

from __future__ import annotations

import socket
from collections.abc import Sequence

from hires.core.config.run_config import RunConfig
from hires.core.errors import RunError
from hires.core.ranks.mpi_starter import dialect_of
from hires.core.store.ends import End
from hires.core.store.rundir import RunDir
from hires.launcher.interface import LAUNCHERS, Launcher, OnLine
from hires.launcher.launch_attempt import launch
from hires.launcher.ranks.places import RankPlaces, on_hosts
from hires.launcher.slurm import scheduler
from hires.plan.hardware import require_compilers, require_gpus


@LAUNCHERS.register("local")
class LocalLauncher(Launcher):
    """Starts one process per rank on this machine."""

    def submit(self, run: RunDir, config: RunConfig, after: str | None = None) -> None:
        """Submits nothing: :meth:`wait` starts the ranks."""

    def rank_places(
        self, config: RunConfig, num_ranks: int, words: Sequence[str] = ()
    ) -> RankPlaces:
        """Returns the places of the ranks; a RunError: there are no GPUs or compilers for them."""
        require_gpus(config)
        require_compilers(config)
        return super().rank_places(config, num_ranks, words)

    def wait(
        self, run: RunDir, job: str | None, on_line: OnLine | None, args: Sequence[str] = ()
    ) -> End:
        """Starts the ranks and returns how they ended, see :class:`Launcher`."""
        return launch(run.path, run.attempt, args=args, on_line=on_line)


@LAUNCHERS.register("torchrun")
@LAUNCHERS.register("mpirun")
class OneCommandLauncher(LocalLauncher):
    """Starts all ranks with torchrun or one command of an MPI, here or on ``launcher.hosts``.

    With ``launcher.mpi=srun`` that needs the Slurm job around this process, as ``salloc`` gives.
    """

    def rank_places(
        self, config: RunConfig, num_ranks: int, words: Sequence[str] = ()
    ) -> RankPlaces:
        """Returns the places and the command, or the nodes of the Slurm job that begins here."""
        if dialect_of(config) != "srun":
            if config.is_here and not config.launcher.mpi_options:
                require_gpus(config)  # ranks on other hosts look for themselves
                require_compilers(config)
            return on_hosts(num_ranks, config, words)
        try:
            job = scheduler.current_job()
        except RunError as error:
            raise RunError(
                f"launcher.mpi=srun starts ranks inside a Slurm job ({error}); start it in one, as "
                f"`salloc` gives, or use launcher=slurm"
            ) from None
        first, here = job.nodes[0], socket.gethostname()
        if here.split(".")[0] != first.host.split(".")[0]:
            raise RunError(
                f"rank 0 would run on node {first.name}, which is not this machine ({here}): start "
                f"the run there, or use launcher=slurm"
            )
        if len(job.nodes) != config.num_nodes:
            raise RunError(
                f"job {job.name} has {len(job.nodes)} nodes, and the run was planned for launcher."
                f"nodes={config.num_nodes}: start it with launcher.nodes={len(job.nodes)}"
            )
        return job.places(num_ranks, config)
