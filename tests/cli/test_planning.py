"""What becomes of a config on its way to a plan: its memory is predicted once, kept, and refused
where it does not fit; what cannot be planned names every wrong number and what would work."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from hires.cli import planning
from hires.cli.planning import Planner
from hires.core.config.model_config import ModelConfig
from hires.core.config.run_config import RunConfig, from_dict
from hires.core.config.training_config import MemoryConfig
from hires.core.errors import PlanError, RunError
from hires.core.units import MIB
from hires.plan.graph import Graph
from hires.plan.memory import RankMemory
from hires.plan.plan import Plan
from hires.plan.planner import make_plan
from tests.helpers.fake_torch import MIB_RANK, fake_torch
from tests.helpers.small_plans import config_of, forked

MODEL = ModelConfig(depth=18, classes=10)
CONFIG = RunConfig(image=32, batch=4, model=MODEL)


def planned(config: RunConfig) -> Plan:
    with planning.Planner() as planner:
        return planner.plan(config)


def test_layout_that_no_launcher_offers_is_not_proved(monkeypatch):
    # The proof of thousands of tiles took minutes, and what they are too many for came after it.
    monkeypatch.setattr(planning, "TorchProcess", fake_torch(lambda config: forked(4, True)))
    monkeypatch.setattr("hires.plan.planner.judged", None)
    plan = planned(config_of("train", 7, tiles=[13, 10], microbatches=2))
    errors = [f.key for f in plan.findings if f.severity == "error"]
    assert errors == ["batch", "launcher.max_ranks"]
    assert not planned(config_of("train", 4, tiles=[13, 10])).ok
    findings = planned(config_of("train", 4, stages=100)).findings
    assert [f.key for f in findings] == ["parallel.stages", "launcher.max_ranks"]


def of_microbatches(config: RunConfig, rank: int) -> RankMemory:
    """220 MiB for every microbatch of a step, less with recomputation."""
    kept = 100 // config.parallel.microbatches
    kept //= 1 if config.memory.checkpoint == "none" else 10
    return RankMemory(*(2 * MIB * number for number in (1, 2, 3, kept, 4)))


def forecast(config: RunConfig, graph: Graph, memory: Any = of_microbatches) -> Plan:
    plan = make_plan(config, graph)
    return Planner(fake_torch(lambda config: graph, memory)()).with_memory(config, plan)


def test_second_forecast_comes_from_the_cache(graph, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    asked = []

    def counted(config: RunConfig, rank: int) -> RankMemory:
        asked.append(rank)
        return of_microbatches(config, rank)

    first, second = (forecast(CONFIG, graph, counted) for _ in range(2))
    assert first.memory == second.memory == [of_microbatches(CONFIG, 0).to_dict()]
    assert len(asked) == 1
    limited = dataclasses.replace(CONFIG, memory=MemoryConfig(limit="8GiB"), steps=99)
    assert forecast(limited, graph, counted).memory == first.memory
    assert len(asked) == 1  # neither changes what a rank needs
    [file] = (tmp_path / "hires" / "memory").iterdir()
    for times, damaged in enumerate(('{"half', '[{"peak_bytes": 1}]'), start=2):
        file.write_text(damaged)
        assert forecast(CONFIG, graph, counted).memory == first.memory
        assert len(asked) == times


def test_forecast_of_a_run_that_may_need_other_memory_is_another(graph, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    asked = []
    changes = [
        {},
        {"seed": 1, "model": {"name": "custom", "target": "net:f"}},
        {"model": {"name": "custom", "target": "net:f"}},
        {"task": {"name": "infer"}},
        {"task": {"name": "calibrate"}},
        {"task": {"name": "calibrate"}, "quant": {"observer": "min_max"}},
        {"optimizer": {"name": "adam"}},
        {"loss": {"label_smoothing": 0.1}},
        {"precision": {"name": "bf16"}},
        {"memory": {"checkpoint": "block"}},
        {"data": {"prefetch": 5}},
        {"image": 64},
        {"comm": {"shared_memory": False}},
    ]
    for source in ("one", "another"):
        (tmp_path / "net.py").write_text(source)
        for number, change in enumerate(changes):
            config = from_dict({"image": 32, "batch": 4, "model": {"depth": 18}, **change})
            forecast(config, graph, lambda config, rank, n=number: asked.append(n) or MIB_RANK)
    assert asked == [*range(len(changes)), 1, 2]  # and again of a network that was edited


def test_runs_of_one_command_have_the_inputs_of_their_own_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        (tmp_path / f"{name}.json").write_text(name)
        (tmp_path / f"{name}.py").write_text(name)
        save_file({"w": np.full(2, ord(name), np.float32)}, f"{name}.safetensors")
        (tmp_path / name).mkdir()
        for label in ("cat", "dog"):
            (tmp_path / name / label).mkdir()
            (tmp_path / name / label / f"{name}.png").write_bytes(b"")
    network = {"name": "custom", "target": "a:f"}
    changes = [
        *({"model": {**network, "files": [f"{name}.json"]}} for name in "ab"),
        *({"loss": {"name": "custom", "target": f"{name}:f"}} for name in "ab"),
        *({"weights": f"{name}.safetensors"} for name in "ab"),
        *({"data": {"name": "folder", "path": name}} for name in "ab"),
    ]
    with Planner(fake_torch(lambda config: None)()) as planner:  # type: ignore[arg-type]
        digests = [planner.inputs(from_dict(change)).digests for change in changes]
    assert len({json.dumps(one) for one in digests}) == len(changes)


def test_forecast_that_fails_or_does_not_fit_is_a_finding(graph, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for error, severity, key in (
        # It was a warning, and the run died in its first step.
        (PlanError("a rank cannot run its step: RuntimeError: view"), "error", None),
        (PlanError("loss.target='m:bad': m has no function 'bad'"), "error", "loss.target"),
        (RunError("no fake kernel"), "warning", None),
    ):

        def fails(config: RunConfig, rank: int, error: Exception = error) -> RankMemory:
            raise error

        plan = forecast(CONFIG, graph, fails)
        [found] = plan.findings
        assert (found.severity, str(error) in found.text, plan.memory) == (severity, True, [])
        assert key in (None, found.key)
        assert plan.ok == (severity == "warning")
    config = RunConfig(image=32, batch=4, model=MODEL, memory=MemoryConfig(limit="140MiB"))
    plan = forecast(config, graph)
    [finding] = plan.findings
    assert (plan.ok, finding.key) == (False, "memory.limit")
    assert finding.text == (
        "rank 0 needs 220.0 MiB, predicted, which is more than memory.limit=140MiB; "
        "`hires plan --choose ranks=1` lists the layouts that fit, or how many ranks would do; "
        "memory.spill=FOLDER keeps activations on a disk, and parallel.resident trains more "
        "parallel.tiles in one process, in turn"
    )
