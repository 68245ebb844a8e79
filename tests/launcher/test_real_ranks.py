"""Real ranks that hang, differ, fill the disk or run over an MPI end with the reason."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from hires.core.config.run_config import RunConfig, from_dict
from hires.core.store import records, rundir
from hires.core.store.ends import End
from hires.core.store.reading import read_rank_lines
from hires.core.store.rundir import RunDir
from hires.launcher import launch_attempt
from hires.launcher.slurm.slurm_checks import node_checks
from hires.launcher.slurm.submission import CHECKUP
from tests.helpers.launches import ROOT, alive, events, exit_json, rank_pids
from tests.helpers.patience import until
from tests.helpers.traces import plan_of

pytestmark = pytest.mark.dist


def config_of(results: Path, **keys: Any) -> RunConfig:
    """Returns the config of two tiles which give up after three seconds without progress."""
    values: dict[str, Any] = {
        "image": [37, 33],
        "batch": 2,
        "steps": 100_000,
        "model": {"name": "preact_resnet", "depth": 11, "classes": 10},
        "parallel": {"name": "sp", "tiles": [2, 1]},
        "comm": {"timeout_s": 3.0},
        "measure": {"warmup": 1},
        "optimizer": {"lr": 0.0},
        "results": str(results),
    }
    return from_dict({**values, **keys})


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Returns a function that makes a run folder."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))

    def make(**keys: Any) -> RunDir:
        config = config_of(tmp_path / "results", **keys)
        return rundir.create(config, plan_of(config).to_dict(), ["hires", "run", "parallel=sp"])

    return make


def launch(run: RunDir, signalled: int | None = None, number: int = 0, **options: Any) -> End:
    """Runs it; after its third step a rank, or -1 the launcher, gets a signal."""

    def act() -> None:
        folder = run.attempt_dir
        lines = lambda: read_rank_lines(folder, "metrics.jsonl")  # noqa: E731
        until(lambda: any(line.get("step", 0) > 2 for line in lines()))
        pids = {line["rank"]: line["pid"] for line in events(run, "rank_started")}
        os.kill(pids.get(signalled, os.getpid()), number)

    thread = threading.Thread(target=act)
    if signalled is not None:
        thread.start()
    try:
        return launch_attempt.launch(run.path, run.attempt, **options)
    finally:
        if signalled is not None:
            thread.join()
        left = [*rank_pids(run), *(line["pid"] for line in events(run, "starter_started"))]
        until(lambda: not alive(left), "the end of all processes", patience_s=30.0)


def test_stopped_rank_is_named_with_the_message_that_is_missing(made):
    run = made()
    outcome = launch(run, 1, signal.SIGSTOP)
    assert (outcome.state, outcome.reason, outcome.failed_rank) == ("failed", "hang", 1)
    assert "rank 1 does not answer: its process is stopped (by SIGSTOP" in outcome.cause
    assert "comm.timeout_s=3 s" in outcome.cause
    assert exit_json(run)["cause"] == outcome.cause == records.read_record(run)["cause"]
    page = (run.attempt_dir / "hang.txt").read_text()
    assert page.startswith("no progress: rank 1 does not answer")
    assert "rank 0 waits for" in page
    assert "where every rank stands" in page
    assert "hires/comm/" in page.split("Python stacks")[1]


def test_slow_save_is_no_hang_and_a_sleeping_hook_is_found_with_its_line(made, monkeypatch):
    monkeypatch.setenv("ODD", "slow")
    run = made(checkpoint={"every": 2, "at_end": "never"})
    outcome = launch(run, module="tests.helpers.odd_rank")
    [saved] = events(run, "checkpoint_saved")
    assert saved["save_s"] > 3.0
    assert (outcome.state, outcome.reason, outcome.failed_rank) == ("failed", "hang", 0)
    page = (run.attempt_dir / "hang.txt").read_text()
    assert "rank 0 is in B0 of step 2 and waits for no rank" in page
    assert "odd_rank.py" in page.split("Python stacks")[1]
    assert "in doze" in page
    assert "rank 1 waits for" in page


def test_verification_that_differs_ends_with_its_reason(made, monkeypatch):
    monkeypatch.setenv("ODD", "wrong")
    run = made(steps=2, precision={"name": "fp64"}, optimizer={})
    outcome = launch(run, args=("--verify",), module="tests.helpers.odd_rank")
    assert (outcome.state, outcome.reason) == ("failed", "parity")
    assert "the layout differs from one process: " in outcome.cause
    assert "parameters/" in outcome.cause
    assert exit_json(run)["reason"] == "parity"
    assert json.loads((run.attempt_dir / "verify.json").read_text())["ok"] is False


@pytest.mark.mpi
def test_run_over_an_mpi_ends_as_all_others_do(made, mpi):
    """Done, stuck and preempted, with messages that the MPI carries."""
    keys: dict[str, Any] = {"launcher": {"name": "mpirun", "mpi": mpi}}
    keys["comm"] = {"backend": "mpi", "shared_memory": False, "timeout_s": 60.0}
    assert launch(made(steps=3, **keys)).exit_codes == {0: 0, 1: 0}
    stuck = made(**{**keys, "campaign": "stuck", "comm": {**keys["comm"], "timeout_s": 10.0}})
    assert launch(stuck, 1, signal.SIGSTOP).failed_rank == 1
    assert "rank 1" in (stuck.attempt_dir / "hang.txt").read_text()
    preempted = made(**{**keys, "campaign": "preempted"})
    outcome = launch(preempted, -1, signal.SIGUSR2)
    assert (outcome.reason, outcome.exit_codes) == ("preempted", {0: 75, 1: 75})
    assert [*(preempted.path / "checkpoints").iterdir()]


IN_NAMESPACE = 'mount -t tmpfs -o size=256k none "$1" && exec "$2" -c "$3" "$1" "$4"'
SCRIPT = """
import json, sys
from pathlib import Path
from hires.core.store import records, rundir
from hires.core.config.run_config import LauncherConfig, RunConfig
from hires.core.config.training_config import MeasureConfig
from hires.core.errors import RunError
from hires.launcher import launch_attempt as local
disk = Path(sys.argv[1])
keys = {"measure": MeasureConfig(warmup=1), "launcher": LauncherConfig(sys.argv[2])}
config = RunConfig(steps=3, results=str(disk / "results"), **keys)
run = rundir.create(config, {"world": 2}, ["hires", "run"])
outcome = local.launch(run, 0, module="tests.helpers.fake_rank")
facts = {"state": outcome.state, "cause": outcome.cause}
facts["files"] = [str(p.relative_to(disk)) for p in disk.rglob("*")]
facts["record"] = (run.path / "record.json").exists() and records.read_record(run)["state"]
try:
    rundir.create(RunConfig(seed=1, results=str(disk / "results")), {"world": 2}, [])
except RunError as error:
    facts["create"] = str(error)
facts["runs"] = len(list((disk / "results/default").iterdir()))
print(json.dumps(facts))
"""


@pytest.mark.parametrize("launcher", ["local", "torchrun"])
def test_run_on_a_full_disk_fails_with_the_reason_and_leaves_no_half_file(tmp_path, launcher):
    command = ["unshare", "--map-root-user", "--mount", "sh", "-c", IN_NAMESPACE, "sh"]
    if shutil.which("unshare") is None:
        pytest.skip("needs unshare")
    done = subprocess.run(
        [*command, tmp_path, sys.executable, SCRIPT, launcher],
        env={**os.environ, "HIRES_FAKE_RANKS": '{"0": "full", "1": "hang"}', "PYTHONPATH": ROOT},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    if not done.stdout and ("unshare" in done.stderr or "mount" in done.stderr):
        pytest.skip(f"needs a mount namespace: {done.stderr}")
    assert done.stderr == ""
    facts = json.loads(done.stdout)
    assert facts["state"] == "failed"
    assert "full" in facts["cause"] or "No space left" in facts["cause"]
    assert facts["record"] in (False, "failed")
    assert not [name for name in facts["files"] if name.endswith(".tmp")]
    assert "No space left on device; free some space" in facts["create"]  # another run
    assert facts["runs"] == 1


def test_ranks_of_the_doctor_report_what_their_nodes_have(made):
    run = made()
    end = launch(run, module="hires.comm.node_report", args=(CHECKUP,))
    assert (end.state, end.cause) == ("done", None)
    reports = json.loads((run.path / "nodes.json").read_text())["nodes"]
    checks = {check.name: check for check in node_checks(RunConfig(), reports)}
    assert (len(reports), {check.state for check in checks.values()}) == (2, {"ok"})
