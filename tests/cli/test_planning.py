"""What becomes of a config on its way to a plan: its memory is predicted once, kept, and refused
where it does not fit; what cannot be planned names every wrong number and what would work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hires.cli import planning
from hires.cli.planning import PackedPlan, Planner
from hires.core.config.model_config import ModelConfig
from hires.core.config.run_config import MemoryConfig, RunConfig, from_dict
from hires.core.errors import ConfigError, PlanError, RunError
from hires.core.units import MIB
from hires.plan.graph import Graph
from hires.plan.memory import LIBRARIES_BYTES, RankMemory
from hires.plan.partition import layer_starts
from hires.plan.plan import Plan
from hires.plan.planner import make_plan
from tests.helpers.fake_torch import fake_torch
from tests.helpers.small_plans import config_of, forked

MODEL = ModelConfig(depth=18, classes=10)
CONFIG = RunConfig(image=32, batch=4, model=MODEL)
GIB = 2**30


def planned(config: RunConfig) -> Plan:
    with planning.Planner() as planner:
        return planner.plan(config)


def refusing(config: RunConfig) -> Graph:
    raise ConfigError("the network takes no such image")


def test_network_that_cannot_be_traced_hides_no_wrong_number(monkeypatch):
    monkeypatch.setattr(planning, "TorchProcess", fake_torch(refusing))
    layout = {"replicas": 200, "tiles": [1, 40], "microbatches": 3}
    with pytest.raises(ConfigError) as caught:
        planned(from_dict({"image": 32, "batch": 600, "parallel": layout}))
    for words in ("takes no such image; ", "[parallel.tiles]", "[launcher.max_ranks]"):
        assert words in str(caught.value)


def test_layout_that_no_launcher_offers_is_not_proved(monkeypatch):
    # The proof of thousands of tiles took minutes, and what they are too many for came after it.
    def never(*args: object) -> None:
        raise AssertionError("a layout that cannot start is proved")

    monkeypatch.setattr(planning, "TorchProcess", fake_torch(lambda config: forked(4, True)))
    monkeypatch.setattr("hires.plan.planner.verify", never)
    plan = planned(config_of("train", 7, tiles=[13, 10], microbatches=2))
    errors = [f.key for f in plan.findings if f.severity == "error"]
    assert errors == ["batch", "launcher.max_ranks"]
    assert not planned(config_of("train", 4, tiles=[13, 10])).ok
    layers = len(layer_starts(forked(4, True)))  # no more stages are advised
    findings = planned(config_of("train", 4, stages=100)).findings
    assert [f.key for f in findings] == ["parallel.stages", "launcher.max_ranks"]
    assert f"; use parallel.stages={layers}" in findings[0].text


def memory(*sizes: int) -> RankMemory:
    """Memory of a rank, its parts in 2 MiB each."""
    return RankMemory(*(2 * MIB * number for number in sizes))


def of_microbatches(config: RunConfig, rank: int) -> RankMemory:
    """200 MiB for every microbatch of a step, a tenth with recomputation."""
    kept = 100 // config.parallel.microbatches
    return memory(1, 2, 3, kept // (1 if config.memory.checkpoint == "none" else 10), 4)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def forecast(config: RunConfig, graph: Graph, memory: Any = of_microbatches) -> Plan:
    plan = make_plan(config, graph)
    Planner(fake_torch(lambda config: graph, memory)()).add_memory(config, plan)
    return plan


def test_second_forecast_comes_from_the_cache(graph, cache):
    asked = []

    def counted(config: RunConfig, rank: int) -> RankMemory:
        asked.append(rank)
        return of_microbatches(config, rank)

    first, second = (forecast(CONFIG, graph, counted) for _ in range(2))
    assert first.memory == second.memory == [memory(1, 2, 3, 100, 4).to_dict()]
    assert len(asked) == 1
    [file] = (cache / "hires" / "memory").iterdir()
    for times, damaged in enumerate(('{"half', '[{"peak_bytes": 1}]'), start=2):
        file.write_text(damaged)
        assert forecast(CONFIG, graph, counted).memory == first.memory
        assert len(asked) == times


@pytest.mark.parametrize(
    ("error", "severity", "key"),
    [
        # It was a warning, and the run died in its first step.
        (PlanError("a rank cannot run its step: RuntimeError: view"), "error", None),
        (PlanError("loss.target='m:bad': m has no function 'bad'"), "error", "loss.target"),
        (RunError("no fake kernel"), "warning", None),
    ],
)
def test_forecast_that_fails_is_a_finding(graph, error, severity, key):
    def fails(config: RunConfig, rank: int) -> RankMemory:
        raise error

    plan = forecast(CONFIG, graph, fails)
    [found] = plan.findings
    assert (found.severity, str(error) in found.text, plan.memory) == (severity, True, [])
    assert key in (None, found.key)
    assert plan.ok == (severity == "warning")


def test_plan_that_does_not_fit_names_the_command_that_finds_one(graph):
    config = RunConfig(image=32, batch=4, model=MODEL, memory=MemoryConfig(limit="140MiB"))
    plan = forecast(config, graph)
    [finding] = plan.findings
    assert not plan.ok
    assert finding.key == "memory.limit"
    assert finding.text == (
        "rank 0 needs 220.0 MiB, predicted, which is more than memory.limit=140MiB; "
        "`hires plan --choose ranks=1 KEY=VALUE...` with the other keys of this run lists the "
        "layouts that fit, or how many ranks would do"
    )


@pytest.fixture
def gpus(monkeypatch):
    """Three GPUs that a job left this process."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7,1")


def large(config: RunConfig, rank: int) -> RankMemory:
    """1, 2, 3 ... GiB of a GPU for the ranks, and 16 of the host."""
    return RankMemory((rank + 1) * GIB, 0, 0, 0, 0, host_bytes=16 * GIB)


def on_gpus(count: int | None = 2, memory: str | None = None, **parallel: Any) -> RunConfig:
    config = config_of("train", 4, **parallel)
    config.device, config.cluster.gpus, config.cluster.gpu_memory = "cuda", count, memory
    return config


def packed(config: RunConfig, forecasts_s: float = 60.0) -> PackedPlan:
    process = fake_torch(lambda config: forked(4, True), large)()
    return Planner(process, forecasts_s).packed(config)


@pytest.mark.usefixtures("gpus")
def test_plan_of_a_point_says_what_each_gpu_and_the_host_need():
    assert packed(on_gpus(tiles=[2, 2]), 0).gpu_bytes == (0, 0)  # without a forecast
    plan = packed(on_gpus(tiles=[2, 2]))
    assert plan.gpu_bytes == (4 * GIB, 6 * GIB)  # ranks 0 and 2, ranks 1 and 3
    assert plan.needs_bytes == 4 * (16 * GIB + LIBRARIES_BYTES)
    assert packed(on_gpus(1, tiles=[2, 1])).gpu_bytes == (3 * GIB,)
    config = on_gpus(tiles=[2, 2])
    config.device = "cpu"
    assert packed(config).gpu_bytes == ()
