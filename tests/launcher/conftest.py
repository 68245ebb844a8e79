"""Run folders whose ranks need no torch and behave as a test says."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from pathlib import Path

import pytest

from hires.core.config.comm_config import CommConfig
from hires.core.config.run_config import LauncherConfig, RunConfig
from hires.core.config.training_config import MeasureConfig
from hires.core.programs import module_command
from hires.core.store import records, rundir
from hires.core.store.rundir import RunDir
from hires.launcher.interface import launcher_of
from hires.launcher.launch_attempt import launch as local_launch
from tests.helpers.launches import ROOT, alive, rank_pids
from tests.helpers.patience import until


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
def launch(torchrun_forks):
    """Returns the launcher, set to start fake ranks and to check that none is left.

    ``changes`` are of the places of the ranks. As torchrun starts, it imports torch: here it is a
    fork of a process that has.
    """

    def checked(run, attempt=None, places=None, changes=None, **options):
        number = run.attempt if attempt is None else attempt
        config, forks = records.read_config(run), contextlib.nullcontext
        places = places or launcher_of(config).rank_places(config, records.read_world(run))
        if config.launcher.name == "torchrun":
            words = (*module_command("torch.distributed.run"), *places.starter.words[1:])
            places = replace(places, starter=replace(places.starter, words=words))
            forks = torchrun_forks
        places, module = replace(places, **(changes or {})), "tests.helpers.fake_rank"
        try:
            with forks():
                return local_launch(run, number, module=module, places=places, **options)
        finally:
            world = RunDir(Path(run), number)
            if places.starter is not None:  # a rank that had just begun sees that its command ended
                until(lambda: not alive(rank_pids(world)), "the end of all ranks", patience_s=60.0)
            assert not alive(rank_pids(world))

    return checked
