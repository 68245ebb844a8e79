"""Is the published machine as fast as it is said to be, and are integers counted by their width?"""

from __future__ import annotations

import copy

import pytest

from hires.core.config.run_config import from_dict
from hires.core.errors import PlanError
from hires.plan.operators.operator_facts import facts_of
from hires.plan.program import steps_of
from hires.plan.simulation.costs import Device, Roofline
from hires.plan.simulation.published_machine import (
    GPU_BYTES,
    LAUNCH_S,
    MEMORY_BYTES_PER_S,
    calibrated,
    on_published_machine,
)
from hires.plan.simulation.simulate import simulate
from tests.helpers.small_plans import LAYOUTS, plan_of


def test_calibrated_device_takes_the_seconds_that_were_measured():
    plan = plan_of(**LAYOUTS["single"])
    known = Device(3e9, MEMORY_BYTES_PER_S, LAUNCH_S)
    known_s = simulate(plan, Roofline(plan, known)).step_s
    device = calibrated(plan, 8, 8 / known_s)
    assert simulate(plan, Roofline(plan, device)).step_s == pytest.approx(known_s, rel=1e-9)


def test_speed_that_memory_forbids_is_refused():
    with pytest.raises(PlanError, match=r"1e\+12 images/s .* use a plan of fewer"):
        calibrated(plan_of(**LAYOUTS["single"]), 8, 1e12)


def test_every_rank_has_a_gpu_of_40_gib():
    values = {"parallel": {"tiles": [2, 2], "stages": 2, "spatial_stages": 1}}
    made = on_published_machine(from_dict(values))
    assert (made.device, made.comm.backend) == ("cuda", "gloo")
    assert (made.cluster.gpus, made.cluster.gpu_memory) == (5, "40GiB")
    assert GPU_BYTES == 40 * 2**30


def test_integers_of_8_bits_take_a_quarter_of_the_memory_time():
    plan = plan_of(**LAYOUTS["single"])
    narrow = copy.deepcopy(plan)
    for node in narrow.graph.nodes:
        node.dtype = "uint8"
    made = {node.name for node in plan.graph.nodes}
    device = Device(flops_per_s=1e30, bytes_per_s=1e9, launch_s=0.0)
    wide_s, narrow_s = (Roofline(one, device).steps_s(0, "F0") for one in (plan, narrow))
    seen = 0
    steps = steps_of(plan, plan.stages[0], False)
    for step, before_s, after_s in zip(steps, wide_s, narrow_s, strict=True):
        node = step.node
        if facts_of(node.kind).view or node.params or not {*node.inputs} <= made:
            continue
        assert after_s == pytest.approx(before_s * 1 / BYTES_OF_PLAN[plan.dtype])
        seen += before_s > 0
    assert seen > 2


BYTES_OF_PLAN = {"float64": 8, "float32": 4}
