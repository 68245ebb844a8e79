"""The daemons of the Slurm that SLURM_CONF names: how tests kill them and start them again."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.slurm_runs import ask, until

_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"


def folder() -> Path:
    """Returns the folder of the cluster, which ``scripts/slurm_cluster.sh`` made."""
    found = Path(os.environ["SLURM_CONF"]).parent
    if not (found / ".slurm_cluster").exists():
        pytest.skip("only daemons that scripts/slurm_cluster.sh started are killed here")
    return found


def kill(name: str) -> None:
    """Kills a daemon, as ``slurmctld`` or ``slurmd-node2``.

    Only slurmctld may save its state: else it would give numbers of jobs again, and Slurm drains a
    node that hears of one twice.
    """
    pid = int((folder() / f"{name}.pid").read_text())
    assert Path(f"/proc/{pid}/comm").read_text().strip() == name.partition("-")[0]
    os.kill(pid, signal.SIGTERM if name == "slurmctld" else signal.SIGKILL)
    until(lambda: not Path(f"/proc/{pid}").exists(), f"the end of {name}")


def step_of(pid: int) -> int:
    """Returns the slurmstepd that runs a process of a job."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def kill_step(pid: int) -> None:
    """Kills a slurmstepd, unless it has ended."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        if Path(f"/proc/{pid}/comm").read_text().strip() == "slurmstepd":
            os.kill(pid, signal.SIGKILL)


def start(name: str) -> None:
    """Starts a daemon again, and returns when Slurm answers and takes jobs."""
    program, _, node = name.partition("-")
    where = shutil.which(program, path=_PATH)
    assert where is not None
    words = ["-N", node] if node else []
    command = [where, *words, "-f", os.environ["SLURM_CONF"]]
    # Its output may go nowhere: a daemon that holds a pipe would keep whoever reads it.
    subprocess.run(command, check=True, timeout=60)
    until(lambda: all_up(), "two nodes that take jobs")


def all_up() -> bool:
    """Whether slurmctld answers and both nodes may be given to jobs."""
    command = ["sinfo", "--noheader", "--Node", "--partition=debug", "--format=%t"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    states = done.stdout.split()
    return len(states) == 2 and all(state in ("idle", "mix", "alloc", "comp") for state in states)


@contextlib.contextmanager
def killed(name: str) -> Iterator[None]:
    """Lets a daemon be dead while the block runs."""
    kill(name)
    try:
        yield
    finally:
        start(name)


@contextlib.contextmanager
def blind(name: str, hidden: Path) -> Iterator[None]:
    """Lets a slurmd, and all that it starts, see an empty folder while the block runs."""
    script = 'mount -t tmpfs none "$1" || exit 99; shift; exec "$@"'
    where = shutil.which("slurmd", path=_PATH)
    assert where is not None
    node = ["-N", name.partition("-")[2], "-f", os.environ["SLURM_CONF"]]
    kill(name)
    try:
        command = ["unshare", "--mount", "sh", "-c", script, "sh", str(hidden), where, *node]
        done = subprocess.run(command, timeout=60, check=False)
        if done.returncode:
            pytest.skip("needs a mount namespace")
        until(lambda: all_up(), "two nodes that take jobs")
        yield
        kill(name)
    finally:
        start(name)


@contextlib.contextmanager
def partition(name: str, *options: str) -> Iterator[str]:
    """Lets the cluster have one more partition of both nodes while the block runs."""
    ask("scontrol", "create", f"PartitionName={name}", "Nodes=ALL", "MaxTime=INFINITE", *options)
    try:
        yield name
    finally:
        until(lambda: not ask("squeue", "--noheader", f"--partition={name}"), "its last job")
        ask("scontrol", "delete", f"PartitionName={name}")
