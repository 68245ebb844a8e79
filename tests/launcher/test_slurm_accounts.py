"""Where Slurm keeps accounts: do runs go the same way, and is what only the accounts know found?

The other tests of a real Slurm have no accounting. This one starts a cluster of its own that has.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers import slurm_daemons as daemons
from tests.helpers.slurm_runs import REPOSITORY, Runs, ask, until

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(300)]
SCRIPT = REPOSITORY / "scripts" / "slurm_cluster.sh"
ONE = ["launcher=slurm", "launcher.account=hires"]
FORGETFUL = "#!/bin/sh\necho 'slurm_load_jobs error: Invalid job id specified' >&2\nexit 1\n"


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Runs]:
    """Starts runs on a Slurm with accounting."""
    # Sockets need a short path, and munge folders that others cannot write to.
    folder = Path(tempfile.gettempdir()) / f"hires-slurm-accounts-{os.getpid()}"

    def cluster(verb: str, *options: str) -> subprocess.CompletedProcess[str]:
        command = ["bash", str(SCRIPT), verb, *options, str(folder)]
        return subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)

    try:
        started = cluster("start", "--accounting")
        if "could not install" in started.stderr:
            pytest.skip(f"needs MariaDB and slurmdbd: {started.stderr.splitlines()[-1]}")
        assert started.returncode == 0, started.stderr
        monkeypatch.setenv("SLURM_CONF", str(folder / "slurm.conf"))
        made = Runs(tmp_path)
        yield made
        made.end()
    finally:
        stopped = cluster("stop")
    assert stopped.returncode == 0, stopped.stderr


def test_end_that_only_the_accounts_know_is_found(runs, monkeypatch):
    job = runs.submit(layout=ONE)
    assert runs.exit()["state"] == "done"
    until(lambda: ask("sacct", "-nXP", f"--jobs={job}", "--format=State") == "COMPLETED", "sacct")
    with daemons.partition("later", "State=DOWN") as name:
        job = runs.submit("seed=1", f"launcher.partition={name}", layout=ONE)
        ask("scancel", job)
        until(lambda: "CANCELLED" in ask("sacct", "-nXP", f"--jobs={job}", "-oState"), "sacct")
    forgetful = runs.folder / "forgetful"
    forgetful.mkdir()
    for command in ("squeue", "scontrol"):
        (forgetful / command).write_text(FORGETFUL)
        (forgetful / command).chmod(0o755)
    with monkeypatch.context() as patch:
        patch.setenv("PATH", f"{forgetful}:{os.environ['PATH']}")
        told = json.loads(runs.hires("status", "--json")[0])["runs"]
    assert sorted(state["state"] for state in told) == ["cancelled", "done"]
    [cancelled] = [state for state in told if state["state"] == "cancelled"]
    assert cancelled["cause"] == f"job {job} ended with CANCELLED, and left no exit.json"
