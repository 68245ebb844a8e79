"""A second Slurm with accounts, and ends that these alone know: one of the scenarios."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from tests.helpers.launches import alive
from tests.helpers.patience import until
from tests.helpers.slurm_runs import REPOSITORY, TWO, Runs, ask

FORGETFUL = "#!/bin/sh\necho 'slurm_load_jobs error: Invalid job id specified' >&2\nexit 1\n"


def second_cluster_whose_accounts_alone_know_an_end_leaves_nothing(runs: Runs) -> None:
    # Sockets need a short path, and munge folders that others cannot write to.
    folder = Path(tempfile.gettempdir()) / f"hires-slurm-accounts-{os.getpid()}"

    def cluster(*words: str) -> subprocess.CompletedProcess[str]:
        command = ["bash", str(REPOSITORY / "scripts" / "slurm_cluster.sh"), *words, str(folder)]
        return subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)

    runs.variables["SLURM_CONF"] = f"{folder}/slurm.conf"
    try:
        started = cluster("start", "--accounting")
        if "could not install" in started.stderr:
            pytest.skip(f"needs MariaDB and slurmdbd: {started.stderr.splitlines()[-1]}")
        assert started.stdout == f"export SLURM_CONF={folder}/slurm.conf\n", started.stderr
        pids = [int(path.read_text()) for path in folder.glob("*.pid")]
        _ends_that_only_the_accounts_know(runs)
    finally:
        stopped = cluster("stop")
        runs.jobs.clear()
        shutil.rmtree(runs.folder / "results", ignore_errors=True)
    assert (stopped.returncode, folder.exists()) == (0, False), stopped.stderr
    until(lambda: not alive(pids), "the end of all daemons")


def _ends_that_only_the_accounts_know(runs: Runs) -> None:
    def state(job: str) -> str:
        return ask("sacct", "-nXP", f"--jobs={job}", "--format=State", **runs.variables)

    run = runs.submit("launcher.account=hires")
    ask("scontrol", "create", "PartitionName=later", "Nodes=ALL", "State=DOWN", **runs.variables)
    other = runs.submit("seed=1", "launcher.account=hires", "launcher.partition=later")
    ask("scancel", other.job(), **runs.variables)
    _, err = runs.hires("run", *TWO, "seed=2", "launcher.account=nope", code=2)
    assert "change launcher.account" in err
    assert run.end() == ("done", None)
    until(lambda: state(run.job()) == "COMPLETED", "sacct", pause_s=0.5)
    until(lambda: "CANCELLED" in state(other.job()), "sacct", pause_s=0.5)
    forgetful = runs.folder / "forgetful"
    forgetful.mkdir()
    for command in ("squeue", "scontrol"):
        (forgetful / command).write_text(FORGETFUL)
        (forgetful / command).chmod(0o755)
    runs.variables["PATH"] = f"{forgetful}:{os.environ['PATH']}"
    found = {state["state"]: state["cause"] for state in runs.states("default")}
    assert found["cancelled"] == f"job {other.job()} ended with CANCELLED, and left no exit.json"
    assert "done" in found
