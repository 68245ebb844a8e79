"""Run folders whose ranks need no torch and behave as a test says."""

from __future__ import annotations

import functools
import json

import pytest

from hires.core.config.comm_config import CommConfig
from hires.core.config.run_config import LauncherConfig, RunConfig
from hires.core.config.training_config import MeasureConfig
from hires.core.store import rundir
from hires.launcher.local import local_launcher
from tests.helpers.launches import ROOT, alive, rank_pids


@pytest.fixture
def fake_world(tmp_path, monkeypatch, lean_forks):
    """Returns a function that makes a run folder whose ranks have these behaviours."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))

    def make(*behaviours, steps=3, port=0, campaign="default", comm=None, **launcher):
        by_rank = {str(rank): behaviour for rank, behaviour in enumerate(behaviours)}
        monkeypatch.setenv("HIRES_FAKE_RANKS", json.dumps(by_rank))
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
def launch():
    """Returns the launcher, set to start fake ranks and to check that none is left."""
    start = functools.partial(local_launcher.launch, module="tests.helpers.fake_rank")

    def checked(run, **options):
        try:
            return start(run, run.attempt, **options)
        finally:
            assert not alive(rank_pids(run))

    return checked
