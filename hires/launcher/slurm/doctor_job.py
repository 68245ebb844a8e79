"""Runs one rank of :mod:`hires.comm.node_report` on every node of a job, for ``hires doctor``.

``python -m hires.launcher.slurm.doctor_job FOLDER`` is the batch step of that job. It starts the
ranks exactly as those of a run, and writes ``exit.json``.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from hires.core import log
from hires.core.errors import HiresError, RunError
from hires.core.store import records
from hires.launcher.local.local_launcher import launch, leave
from hires.launcher.slurm import allocation

MODULE = "hires.launcher.slurm.doctor_job"
RANK = "hires.comm.node_report"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the ranks of a check; returns the exit code."""
    folder = Path((sys.argv[1:] if argv is None else argv)[0])
    log.setup()
    try:
        config = records.read_config(folder)
        world = int(records.read_plan(folder)["world"])
        try:
            allocation.refuse_without_module()
            places = allocation.current().places(world, config)
        except RunError as error:
            leave(folder, 0, "failed", str(error))
            raise
        # Any argument says that no steps are measured.
        outcome = launch(folder, 0, args=("--checkup",), module=RANK, places=places)
    except HiresError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    return outcome.exit_code


if __name__ == "__main__":
    sys.exit(main())
