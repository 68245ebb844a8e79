"""Are the most telling rows of speed run first, and is no row left out in silence?"""

from __future__ import annotations

import gc
import math
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from hires.bench import gpu_speed, gpu_steps
from hires.bench.gpu_speed import (
    CONTESTANTS,
    LATE,
    NETWORKS,
    Speed,
    SpeedRow,
    rows_in_order,
    speed_table,
    speeds,
)
from hires.bench.gpu_steps import TimedStep
from hires.bench.ranks import run_ranks
from hires.comm import rehearsal
from hires.core.errors import LateError
from hires.core.precisions import INT8
from hires.core.ranks import compilers
from hires.engine.build import RankEngine
from hires.engine.device import RankDevice
from hires.engine.region_compiler import Compilation
from hires.nets.trace import trace_config
from hires.plan.planner import make_plan

TINY = {"name": "resnet", "depth": 18, "classes": 10}
TASKS = ("infer", "train")


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setattr(gpu_speed, "NETWORKS", {"tiny": TINY})
    monkeypatch.setattr(gpu_speed, "SIDE", 512)
    with rehearsal(0, False):  # a world of one rank
        yield


def row(
    contestant: str, task: str, precision: str = "fp32", scales: Path = Path()
) -> dict[str, str]:
    one = SpeedRow(32, task, precision, "tiny", contestant)
    return gpu_speed._row(RankDevice(), "cpu", one, scales)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("task", "precision"), [("infer", "fp32"), ("train", "bf16")])
def test_rows_of_both_tasks_are_timed_beside_plain_torch(tiny, task, precision):
    plain, ours = row("eager", task, precision), row("hires", task, precision)
    for one in (plain, ours):
        assert one["state"] == "ok"
        assert float(one["images/s"]) > 0
        assert one["share"].endswith("%")
    assert plain["time line"] == "-"
    kinds = [part.rsplit(" ", 2)[0] for part in ours["time line"].split(", ")]
    passes = ["data", "forward", "backward"] if task == "train" else ["data", "forward"]
    assert kinds[: len(passes)] == passes
    assert ("optimiser" in kinds) == (task == "train")


def test_row_of_8_bits_runs_quantised_kernels(tiny, tmp_path, monkeypatch):
    configs, make = [], CONTESTANTS["hires"]
    monkeypatch.setitem(
        CONTESTANTS, "hires", lambda config, *rest: configs.append(config) or make(config, *rest)
    )
    made = row("hires", "infer", INT8, tmp_path)
    assert made["state"] == "ok"
    assert float(made["images/s"]) > 0
    assert made["share"].endswith("%")
    kinds = {node.kind for node in make_plan(configs[0], trace_config(configs[0])).graph.nodes}
    assert "q_conv2d" in kinds
    assert not kinds & {"conv2d", "fused_conv2d"}


def test_8_bits_are_rows_of_inference_in_hires_alone():
    rows = rows_in_order(Speed("cuda", (256,), TASKS, 0.0))
    quantised = [one for one in rows if one.precision == INT8]
    assert {(one.task, one.contestant) for one in quantised} == {("infer", "hires")}
    assert {one.network for one in quantised} == {*NETWORKS}


def test_hires_computes_on_the_device_that_is_timed(tiny, monkeypatch):
    class Elsewhere(RankDevice):
        pass

    device, config = (
        Elsewhere(),
        gpu_speed.config_of("cpu", SpeedRow(32, "infer", "fp32", "tiny", "")),
    )
    engines = []
    build = gpu_steps.build_rank
    monkeypatch.setattr(gpu_steps, "build_rank", lambda *a: engines.append(build(*a)) or engines[0])
    CONTESTANTS["hires"](config, make_plan(config, trace_config(config)), device)
    assert engines[0].device is device


@pytest.mark.parametrize(
    ("contestant", "state"), [("hires", "FAILED: "), ("compiled", "not run: ")]
)
def test_row_that_fails_says_why_and_stops_no_other(tiny, monkeypatch, contestant, state):
    def broken(*args: object) -> TimedStep:
        raise RuntimeError("no C++ compiler")

    monkeypatch.setattr(gpu_speed.compilers, "missing", lambda kind, mode="stage": None)
    monkeypatch.setitem(CONTESTANTS, contestant, broken)
    assert row(contestant, "infer")["state"] == f"{state}RuntimeError: no C++ compiler"


def test_compiler_has_its_own_options_after_a_row_of_hires(tiny, monkeypatch):
    from torch._inductor import config as inductor

    def changed(*args: object) -> TimedStep:
        inductor.compile_threads, inductor.freezing = 77, True
        raise RuntimeError("no region is compiled")

    before = inductor.get_config_copy()
    monkeypatch.setattr(gpu_speed.compilers, "missing", lambda kind, mode="stage": None)
    monkeypatch.setattr(gpu_steps, "compile_regions", changed)
    assert row("hires compiled", "infer")["state"] == "FAILED: RuntimeError: no region is compiled"
    assert inductor.get_config_copy() == before


def test_contestant_without_its_compiler_is_not_run(tiny, monkeypatch):
    monkeypatch.setattr(
        gpu_speed.compilers, "missing", lambda kind, mode="stage": "there is no C compiler"
    )
    for contestant in ("compiled", "hires compiled"):
        assert row(contestant, "infer")["state"] == "not run: there is no C compiler"


def test_regions_that_torch_cannot_compile_are_no_compiled_row(tiny, monkeypatch):
    made = Compilation(1.0, 3, 2)
    monkeypatch.setattr(gpu_speed.compilers, "missing", lambda kind, mode="stage": None)
    monkeypatch.setattr(gpu_steps, "compile_regions", lambda engine, config: made)
    state = "FAILED: RunError: torch cannot compile 2 of 3 regions"
    assert row("hires compiled", "infer")["state"] == state


def rows_compiled(rank: int) -> list[dict[str, str]]:
    gpu_speed.NETWORKS = {"tiny": TINY}
    return [row("hires compiled", task) for task in TASKS]


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.timeout(300)
@pytest.mark.skipif(compilers.missing("cpu") is not None, reason="needs a C++ compiler")
def test_compiled_hires_is_timed():
    assert [made["state"] for made in run_ranks(rows_compiled, 1, 280.0)] == ["ok", "ok"]


def test_row_that_does_not_fit_into_the_memory_says_so(tiny, monkeypatch):
    def full(*args: object) -> TimedStep:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setitem(CONTESTANTS, "eager", full)
    assert row("eager", "train")["state"] == "no memory"


def test_table_of_the_thesis_comes_first_and_compilation_last():
    rows = rows_in_order(Speed("cuda", (256, 1024), TASKS, 0.0))
    rows = [one for one in rows if one.precision != INT8]  # hires alone has them
    assert len(rows) == len({*rows}) == 2 * 2 * 4 * len(NETWORKS) * len(CONTESTANTS)
    first = rows[: 2 * 4 * len(NETWORKS) * 2]
    assert {one.image for one in first} == {256}
    assert {one.contestant for one in first} == {"eager", "hires"}
    assert {(one.task, one.precision) for one in first[:6]} == {("infer", "fp32")}
    after = rows[len(first) : len(first) + 2 * 2 * len(NETWORKS) * 2]
    assert {one.contestant for one in after} == {"compiled", "hires compiled"}
    assert {one.image for one in after} == {256}
    assert {one.precision for one in after} == {"fp32", "bf16"}


def test_rows_for_which_no_time_is_left_are_listed(monkeypatch):
    now_s = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])

    def timed(device: object, kind: str, one: SpeedRow, scales: Path) -> dict[str, str]:
        now_s[0] += 30.0
        return gpu_speed._left_out(one, "ok")

    monkeypatch.setattr(gpu_speed, "_row", timed)
    speed = Speed("cpu", (256, 512), ("infer",), 100.0)
    *_, rows = gpu_speed._rows(0, speed, rows_in_order(speed))
    states = [one["state"] for one in rows]
    # The fourth row would begin before the end; one of another network was too long for that.
    assert states.index(LATE) == 3
    assert len(states) == 2 * len(NETWORKS) * (2 * 2 + 1)
    assert {*states[3:]} == {LATE}
    table = speed_table(rows)
    assert len(table.rows) == 3
    assert "time was over: 12 of infer at 256 pixels, 15 of infer at 512 pixels." in table.fact


def test_row_that_is_under_way_at_the_end_is_not_run(monkeypatch):
    def stopped(job: object, ranks: int, timeout_s: float, speed: Speed, wanted: list[SpeedRow]):
        yield [gpu_speed._left_out(wanted[0], "ok")]
        raise LateError("the benchmark was not done")

    monkeypatch.setattr(gpu_speed, "stream_ranks", stopped)
    speed = Speed("cpu", (256,), TASKS, math.inf)
    states = [one["state"] for one in speeds(speed)]
    assert states[:3] == ["ok", "not run: not done after 0 s", LATE]
    assert len(states) == len(rows_in_order(speed))


def test_without_any_time_all_rows_are_listed():
    rows = [*speeds(Speed("cuda", (256,), TASKS, -math.inf))]
    assert {one["state"] for one in rows} == {LATE}
    assert len(rows) == len(rows_in_order(Speed("cuda", (256,), TASKS, 0.0)))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("error", [None, torch.OutOfMemoryError, RuntimeError])
def test_row_frees_its_engine_and_ends_its_threads(tiny, monkeypatch, error):
    held, closed = [], []
    build = gpu_steps.build_rank

    def built(*args: Any) -> Any:
        engine = build(*args)
        held.extend(weakref.ref(one) for one in [engine.executor, *engine.parameters.values()])
        return engine

    def fail(*args: object) -> None:
        raise error

    monkeypatch.setattr(gpu_steps, "build_rank", built)
    monkeypatch.setattr(RankEngine, "close", lambda engine: closed.append(1))
    if error is not None:
        monkeypatch.setattr(gpu_speed, "_median_s", fail)
    gc.disable()  # what it would free later is not free when the next row begins
    try:
        made = row("hires", "train")
        alive = [one for one in held if one() is not None]
    finally:
        gc.enable()
    assert (made["state"] == "ok") == (error is None)
    assert closed
    assert held
    assert not alive
