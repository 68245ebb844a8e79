"""Which GPUs of this machine does each run of a sweep take, and what does it need there?"""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest

from hires.cli.planning import PackedPlan, Planner
from hires.cli.sweep import execution
from hires.cli.sweep.execution import Sweep
from hires.core.config.run_config import RunConfig
from hires.launcher.interface import FrozenRun
from hires.plan.memory import LIBRARIES_BYTES, RankMemory
from tests.helpers.small_plans import config_of, forked

GIB = 2**30


@pytest.fixture(autouse=True)
def machine(tmp_path, monkeypatch):
    """Three GPUs that a job left this process, and a cache of its own."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7,1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


class Process:
    """Predicts 1, 2, 3 ... GiB of a GPU for the ranks, and 16 of the host."""

    def trace(self, config: RunConfig) -> Any:
        return forked(4, True)

    def footprint(self, config: RunConfig, plan: Any) -> list[dict[str, int]]:
        ranks = range(plan.ranks_per_replica)
        return [RankMemory((r + 1) * GIB, 0, 0, 0, 0, host_bytes=16 * GIB).to_dict() for r in ranks]


def on_gpus(count: int | None = 2, memory: str | None = None, **parallel: Any) -> RunConfig:
    config = config_of("train", 4, **parallel)
    config.device, config.cluster.gpus, config.cluster.gpu_memory = "cuda", count, memory
    return config


def packed(config: RunConfig, forecasts_s: float = 60.0) -> PackedPlan:
    return Planner(Process(), forecasts_s).packed(config)  # type: ignore[arg-type]


def test_plan_of_a_point_says_what_each_gpu_and_the_host_need():
    plan = packed(on_gpus(tiles=[2, 2]))
    assert plan.gpu_bytes == (4 * GIB, 6 * GIB)  # ranks 0 and 2, ranks 1 and 3
    assert plan.needs_bytes == 4 * (16 * GIB + LIBRARIES_BYTES)
    assert packed(on_gpus(1, tiles=[2, 1])).gpu_bytes == (3 * GIB,)
    assert packed(on_gpus(tiles=[1, 1])).gpu_bytes == (1 * GIB,)


def test_plan_without_a_forecast_says_how_many_gpus_it_takes():
    assert packed(on_gpus(tiles=[2, 2]), 0).gpu_bytes == (0, 0)
    assert packed(on_gpus(tiles=[1, 1]), 0).gpu_bytes == (0,)


def test_run_on_cores_takes_no_gpu():
    config = on_gpus(tiles=[2, 2])
    config.device = "cpu"
    assert packed(config).gpu_bytes == ()


def test_run_that_does_not_fit_beside_its_gpus_is_refused_with_a_remedy():
    config = on_gpus(tiles=[2, 2])
    config.cluster.memory = "1GiB"
    refusal = packed(config).refusal
    assert "of the host's memory beside its GPUs" in refusal
    assert "; use a smaller image, a smaller batch or fewer ranks" in refusal


def runs_of(tmp_path, *configs: RunConfig) -> list[FrozenRun]:
    """Returns points as the sweep starts them."""
    sweep: Any = SimpleNamespace(options=SimpleNamespace(config_dir=None))
    made = []
    for number, config in enumerate(configs):
        planned = PackedPlan(gpu_bytes=() if config.device == "cpu" else (5, 6))
        point: Any = SimpleNamespace(
            choice=None,
            path=tmp_path / f"r{number}",
            words=["seed=0"],
            planned=planned,
            done=[],
            ready=config,
        )
        made.append(Sweep.run_of(sweep, point))
    return made


def test_queue_has_the_gpus_that_every_point_may_take(tmp_path, monkeypatch):
    queues: list[dict[str, Any]] = []

    class Queue:
        def __init__(self, tasks: Any, *args: Any, gpus: Any, **more: Any) -> None:
            queues.append({"needs": [task.gpu_bytes for task in tasks], "gpus": gpus})

        def work(self) -> None:
            pass

    monkeypatch.setattr(execution, "LocalQueue", Queue)
    monkeypatch.setattr(execution.running_elsewhere, "holders", lambda points: {})
    monkeypatch.setattr(execution.campaign, "starting", lambda folders: contextlib.nullcontext())
    cores = config_of("train", 4)
    cores.device = "cpu"
    tasks = runs_of(tmp_path, on_gpus(2, "40GiB"), on_gpus(None, "30GiB"), cores)
    options = SimpleNamespace(max_parallel=2, budget_gpu_hours=None)
    by_path = {task.path: task for task in tasks}
    sweep: Any = SimpleNamespace(
        folder=tmp_path,
        options=options,
        freeze=lambda point: None,
        run_of=lambda point: by_path[point.path],
    )
    execution._run_here(sweep, [SimpleNamespace(path=path) for path in by_path])  # type: ignore[misc]
    [queue] = queues
    assert queue["needs"] == [(5, 6), (5, 6), ()]
    assert queue["gpus"].names == ["4", "7"]
    assert queue["gpus"].each_bytes == 30 * GIB


def test_gpus_of_which_one_point_does_not_say_the_memory_are_not_shared(tmp_path):
    tasks = runs_of(tmp_path, on_gpus(None, "40GiB"), on_gpus(None))
    known = execution._gpus_of(tasks)
    assert (known.names, known.each_bytes) == (["4", "7", "1"], None)
    cores = config_of("train", 4)
    cores.device = "cpu"
    assert execution._gpus_of(runs_of(tmp_path, cores)).names == []
