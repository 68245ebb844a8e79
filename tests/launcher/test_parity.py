"""A layout that computes something else fails its run folder with the reason: real ranks."""

from __future__ import annotations

import json

import pytest

from hires.core.config.model_config import ModelConfig
from hires.core.config.parallel_config import ParallelConfig
from hires.core.config.precision_config import PrecisionConfig
from hires.core.config.run_config import RunConfig
from hires.core.store import rundir
from hires.launcher.local import local_launcher
from tests.helpers.traces import plan_of
from tests.launcher.conftest import ROOT

pytestmark = pytest.mark.dist


def test_verification_that_differs_ends_with_its_reason(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    config = RunConfig(
        image=[37, 33],
        batch=2,
        model=ModelConfig("preact_resnet", n=1, classes=10),
        parallel=ParallelConfig(name="sp", tiles=[2, 1]),
        precision=PrecisionConfig("fp64"),
        results=str(tmp_path),
    )
    plan = plan_of(config)
    run = rundir.create(config, plan.to_dict(), ["hires", "verify"])
    outcome = local_launcher.launch(run, 0, args=("--verify",), module="tests.helpers.wrong_rank")
    assert (outcome.state, outcome.reason) == ("failed", "parity")
    assert "the layout differs from one process: " in outcome.cause
    assert "parameters/" in outcome.cause
    left = json.loads((run.attempt_dir / "exit.json").read_text())
    assert (left["state"], left["reason"]) == ("failed", "parity")
    assert json.loads((run.attempt_dir / "verify.json").read_text())["ok"] is False
