"""Runs whose messages a real MPI carries end as all others: done, preempted, killed, stuck."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
from pathlib import Path

import pytest

from hires.core.config.comm_config import CommConfig
from hires.core.config.launcher_config import LauncherConfig
from hires.core.config.model_config import ModelConfig
from hires.core.config.mpi_dialects import DIALECTS
from hires.core.config.optimizer_config import OptimizerConfig
from hires.core.config.parallel_config import ParallelConfig
from hires.core.config.run_config import MeasureConfig, RunConfig
from hires.core.store import records, rundir
from hires.core.store.reading import read_lines
from hires.core.store.rundir import RunDir
from hires.launcher.interface import Outcome
from hires.launcher.local import local_launcher
from tests.helpers.mpi_ranks import MPIS
from tests.helpers.patience import until
from tests.helpers.traces import plan_of
from tests.launcher.conftest import ROOT, alive, events, rank_pids

pytestmark = pytest.mark.mpi


@pytest.fixture(params=MPIS)
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest):
    """Returns a function that makes a run of two tiles and as many steps."""
    program = DIALECTS[request.param].programs.split()[0]
    if shutil.which(program) is None:
        pytest.skip(f"there is no {program} here; make test-mpi installs it")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))

    def make(steps: int, timeout_s: float = 60.0) -> RunDir:
        config = RunConfig(
            image=[37, 33],
            batch=2,
            steps=steps,
            model=ModelConfig("preact_resnet", n=1, classes=10),
            parallel=ParallelConfig(name="sp", tiles=[2, 1]),
            comm=CommConfig(backend="mpi", shared_memory=False, timeout_s=timeout_s),
            measure=MeasureConfig(warmup=1),
            optimizer=OptimizerConfig(lr=0.0),
            launcher=LauncherConfig(name="mpirun", mpi=request.param),
            results=str(tmp_path / "results"),
        )
        return rundir.create(config, plan_of(config).to_dict(), ["hires", "run", "parallel=sp"])

    return make


def launch(run: RunDir, signalled: int | None = None, number: int = 0) -> Outcome:
    """Runs it; after its third step a rank, or -1 the launcher, gets a signal."""

    def act() -> None:
        metrics = run.attempt_dir / "metrics.jsonl"
        until(lambda: any(line.get("step", 0) > 2 for line in read_lines(metrics)))
        pids = {line["rank"]: line["pid"] for line in events(run, "rank_started")}
        os.kill(pids.get(signalled, os.getpid()), number)

    thread = threading.Thread(target=act)
    if signalled is not None:
        thread.start()
    try:
        return local_launcher.launch(run.path, run.attempt)
    finally:
        if signalled is not None:
            thread.join()
        left = [*rank_pids(run), *(line["pid"] for line in events(run, "starter_started"))]
        until(lambda: not alive(left), "the end of all processes")


def test_run_ends_and_is_recorded(run):
    made = run(3)
    assert launch(made) == Outcome("done", None, {0: 0, 1: 0}, [])
    assert records.read_record(made)["state"] == "done"


def test_killed_rank_is_named_and_the_others_do_not_wait_for_it(run):
    outcome = launch(run(100_000), 1, signal.SIGKILL)
    assert outcome.failed_rank == 1
    assert "rank 1 was killed by SIGKILL" in outcome.cause


def test_stopped_rank_is_named_within_the_timeout(run):
    made = run(100_000, timeout_s=3.0)
    outcome = launch(made, 1, signal.SIGSTOP)
    assert outcome.failed_rank == 1
    page = (made.attempt_dir / "hang.txt").read_text()
    assert "rank 1" in page
    assert json.loads((made.attempt_dir / "exit.json").read_text())["state"] == "failed"


def test_interrupt_stops_all_ranks(run):
    outcome = launch(run(100_000), -1, signal.SIGINT)
    assert (outcome.state, outcome.cause) == ("cancelled", "stopped by Ctrl-C")


def test_run_that_makes_way_saves_and_leaves_the_world_in_order(run):
    made = run(100_000)
    outcome = launch(made, -1, signal.SIGUSR2)
    assert outcome.reason == "preempted"
    assert outcome.exit_codes == {0: 75, 1: 75}
    assert [*(made.path / "checkpoints").iterdir()]
