"""Real ranks of an MPI for tests: one command starts them all, with a hard end."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from hires.core.config.launcher_config import LauncherConfig
from hires.core.config.mpi_dialects import DIALECTS
from hires.core.config.run_config import RunConfig
from hires.core.ranks import mpi_library, mpi_starter, ports
from hires.core.ranks.world import World, rank_numbers
from tests.helpers.patience import PATIENCE_S, until

ROOT = Path(__file__).parents[2]
LINGER_S = 3.0
"""How long a rank that is done waits for the answers of the others."""


def run_mpi(
    mpi: str,
    job: Callable[..., Any],
    num_ranks: int,
    *args: Any,
    folder: Path,
    timeout_s: float = PATIENCE_S,
) -> list:
    """Returns what ``job(world, *args)`` returns on each rank of a command of an MPI.

    Raises:
        AssertionError: a rank failed or the time ran out; nothing is left behind.
    """
    work = (mpi, job.__module__, job.__name__, args)
    for path in [*folder.glob("rank*.begun"), *folder.glob("rank*.pkl")]:
        path.unlink()  # of an earlier command
    (folder / "job.pkl").write_bytes(pickle.dumps(work))
    config = RunConfig(launcher=LauncherConfig("mpirun", mpi=mpi))
    starter = mpi_starter.starter(config, mpi_starter.hosts_of(config, num_ranks))
    own = {k: v for k, v in os.environ.items() if k != "PYTEST_CURRENT_TEST"}
    environ = {**own, **mpi_library.variables(mpi, starter.words[0], own), "OMP_NUM_THREADS": "1"}
    environ["PYTHONPATH"] = str(ROOT)
    with ports.reserve(0) as port:  # where other backends than the MPI meet
        environ["MASTER_PORT"] = str(port)
    rank = [sys.executable, "-m", "tests.helpers.mpi_ranks", str(folder)]
    log = folder / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            starter.command(environ, rank),
            env=starter.environment(environ),
            stdout=output,
            stderr=output,
            cwd=ROOT,
            start_new_session=True,
        )
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout_s)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    answers = []
    for rank in range(num_ranks):
        path = folder / f"rank{rank}.pkl"
        assert path.exists(), f"rank {rank} gave no answer in time:\n{log.read_text()}"
        good, answer = pickle.loads(path.read_bytes())
        assert good, f"rank {rank} failed:\n{answer}"
        answers.append(answer)
    return answers


def main() -> None:
    """One rank's life."""
    import torch

    from tests.helpers import simulated_device  # noqa: F401  it registers itself

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    folder = Path(sys.argv[1])
    mpi, module, name, args = pickle.loads((folder / "job.pkl").read_bytes())
    numbers = rank_numbers(mpi, os.environ)
    world = World(*numbers, "127.0.0.1", int(os.environ["MASTER_PORT"]), 0)
    (folder / f"rank{world.rank}.begun").touch()
    # Their meeting may have a shorter limit than the start of a process on a loaded machine.
    until(lambda: len([*folder.glob("rank*.begun")]) == world.size)
    try:
        answer = (True, getattr(import_module(module), name)(world, *args))
    except BaseException:
        answer = (False, traceback.format_exc())
    (folder / f"rank{world.rank}.tmp").write_bytes(pickle.dumps(answer))
    (folder / f"rank{world.rank}.tmp").rename(folder / f"rank{world.rank}.pkl")
    sys.stdout.flush()
    # MPICH ends the others with the first that leaves.
    answers = [folder / f"rank{rank}.pkl" for rank in range(world.size)]
    deadline = time.monotonic() + LINGER_S
    while time.monotonic() < deadline and not all(path.exists() for path in answers):
        time.sleep(0.01)
    os._exit(0 if answer[0] else 1)


if __name__ == "__main__":
    main()


MPIS = tuple(name for name, one in DIALECTS.items() if one.libraries and name != "mvapich")
