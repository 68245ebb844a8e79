"""Real ranks of an MPI for tests: one command starts them all, with a hard end."""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from hires.bench.start_ranks import stream_ranks
from hires.core.config.launcher_config import DIALECTS
from hires.core.errors import RunError
from hires.core.ranks.world import World
from tests.helpers.patience import PATIENCE_S, until

ROOT = Path(__file__).parents[2]
LINGER_S = 3.0
"""How long a rank that is done waits for the answers of the others."""
MPIS = tuple(name for name, one in DIALECTS.items() if one.libraries and name != "mvapich")


def run_mpi(
    mpi: str,
    job: Callable[..., Any],
    num_ranks: int,
    *args: Any,
    folder: Path,
    timeout_s: float = PATIENCE_S,
) -> list:
    """Returns what ``job(world, *args)`` returns on each rank of a command of an MPI.

    HiresError: a rank failed or the time ran out; nothing is left behind.
    """
    for path in [*folder.glob("rank*.begun"), *folder.glob("rank*.pkl")]:
        path.unlink()  # of an earlier command
    (folder / "job.pkl").write_bytes(pickle.dumps((job.__module__, job.__name__, args)))
    os.environ["PYTHONPATH"] = str(ROOT)
    answers = [folder / f"rank{rank}.pkl" for rank in range(num_ranks)]
    try:
        [*stream_ranks(f"{__name__}:run_job", num_ranks, timeout_s, str(folder), start=mpi)]
    except RunError:
        # Open MPI fails if a job has left MPI open.
        if not all(path.exists() for path in answers):
            raise
    return [pickle.loads(path.read_bytes()) for path in answers]


def run_job(world: World, path: str) -> Iterator[None]:
    """Writes the answer of one rank; what a job has left of its world ends with the process."""
    from tests.helpers import simulated_device  # noqa: F401  it registers itself

    folder = Path(path)
    module, name, args = pickle.loads((folder / "job.pkl").read_bytes())
    (folder / f"rank{world.rank}.begun").touch()
    # Their meeting may have a shorter limit than the start of a process on a loaded machine.
    until(lambda: len([*folder.glob("rank*.begun")]) == world.size)
    answer = getattr(import_module(module), name)(world, *args)
    (folder / f"rank{world.rank}.tmp").write_bytes(pickle.dumps(answer))
    (folder / f"rank{world.rank}.tmp").rename(folder / f"rank{world.rank}.pkl")
    # MPICH ends the others with the first that leaves.
    deadline = time.monotonic() + LINGER_S
    while time.monotonic() < deadline and len([*folder.glob("rank*.pkl")]) < world.size:
        time.sleep(0.01)
    yield
    os._exit(0)
