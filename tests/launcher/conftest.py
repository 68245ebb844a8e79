import functools
import json
from pathlib import Path

import pytest

from hires.core.config.comm_config import CommConfig
from hires.core.config.run_config import LauncherConfig, MeasureConfig, RunConfig
from hires.core.store import rundir
from hires.core.store.reading import read_lines
from hires.launcher.local import local_launcher

ROOT = Path(__file__).parents[2]


@pytest.fixture
def fake_world(tmp_path, monkeypatch, lean_forks):
    """Returns a function that makes a run folder whose ranks behave as told."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))

    def make(*behaviours, steps=3, port=0, campaign="default", comm=None, **launcher):
        told = {str(rank): behaviour for rank, behaviour in enumerate(behaviours)}
        monkeypatch.setenv("HIRES_FAKE_RANKS", json.dumps(told))
        config = RunConfig(
            steps=steps,
            batch=6,
            campaign=campaign,
            results=str(tmp_path / "results"),
            measure=MeasureConfig(warmup=1),
            comm=comm or CommConfig(),
            launcher=LauncherConfig(port=port, **launcher),
        )
        plan = {"world": len(behaviours), "totals": {"messages": 7}}
        return rundir.create(config, plan, ["hires", "run", "seed=0"])

    return make


@pytest.fixture
def launch(monkeypatch):
    """Returns the launcher, set to start fake ranks and to check that none is left."""

    def checked(run, **options):
        try:
            return functools.partial(local_launcher.launch, module="tests.helpers.fake_rank")(
                run, run.attempt, **options
            )
        finally:
            assert not alive(rank_pids(run))

    return checked


def rank_pids(run):
    """Returns the process numbers of all ranks that were started."""
    return [line["pid"] for line in events(run, "rank_started")]


def events(run, name):
    """Returns the events of one kind."""
    lines = read_lines(run.attempt_dir / "events.jsonl")
    return [line for line in lines if line["event"] == name]


def alive(pids):
    """Returns those of the processes that still run."""
    found = []
    for pid in pids:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if state != "Z":
            found.append(pid)
    return found
