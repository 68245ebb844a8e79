"""What nodes, gradients and buffers of a plan cost, by the speed of a device or as measured."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
from torch import nn

from hires.core.config.run_config import from_dict
from hires.core.ranks.timeline import (
    StepSpans,
)
from hires.engine.footprint import footprint
from hires.plan.operators.operator_facts import facts_of
from hires.plan.plan import Plan
from hires.plan.planner import make_plan
from hires.plan.program import steps_of
from hires.plan.simulation.costs import (
    ADD_TOUCHES,
    UPDATE_TOUCHES,
    Device,
    Roofline,
    measured_costs,
)
from hires.plan.simulation.published_machine import (
    LAUNCH_S,
    MEMORY_BYTES_PER_S,
    calibrated,
)
from hires.plan.simulation.simulate import simulate
from tests.helpers import traces
from tests.helpers.graphs import chain
from tests.helpers.simulated import STEP
from tests.helpers.small_plans import LAYOUTS, config_of, forked, plan_of
from tests.helpers.tiny_nets import traced


def chained(task: str = "train", **parallel: Any) -> Plan:
    """Returns a plan of two layers of equal cost; between them travels one value of 4 numbers."""
    config = from_dict({"image": 8, "batch": 4, "task": {"name": task}, "parallel": parallel})
    plan = make_plan(config, chain([(10, 4), (10, 4)]))
    assert plan.ok, plan.findings
    return plan


def conv(task: str, **keys: Any) -> Plan:
    """Returns a plan of one 3x3 convolution on an 8x6 map in two tiles, top and bottom."""
    graph = traced(
        lambda net, x: net.conv(x),
        (1, 1, 8, 6),
        training=task == "train",
        conv=nn.Conv2d(1, 1, 3, padding=1, bias=False),
    )
    parallel = {"tiles": [2, 1], **keys}
    config: dict[str, Any] = {
        "image": [8, 6],
        "batch": keys.get("replicas", 1),
        "task": {"name": task},
    }
    config["parallel"] = parallel
    plan = make_plan(from_dict(config), graph)
    assert plan.ok, plan.findings
    return plan


def test_action_is_measured_between_its_collectives():
    plan = conv("train")
    found = measured_costs(plan, [StepSpans(rank, 0, "", 0.0, STEP) for rank in range(2)])
    assert found.seconds[1, "F0"] == [1 + 3 - 1, 1]  # data, forward, halo; behind the loss
    assert found.seconds[1, "B0"] == [5 - 1]
    assert found.steps_s(1, "F0") == [4]  # all of it is the convolution's
    assert found.optimiser_s(0) == 1


def test_roofline_is_the_slowest_of_arithmetic_memory_and_launch():
    plan = chained("infer", stages=2)  # of 10 operations and 4 + 4 numbers and 1 weight each
    stage = plan.stages[1]
    assert len(steps_of(plan, stage, back=False)) == 1
    bound_by = {
        "arithmetic": Device(flops_per_s=2.0, bytes_per_s=math.inf, launch_s=0.0),
        "memory": Device(flops_per_s=math.inf, bytes_per_s=7.2, launch_s=0.0),
        "launch": Device(flops_per_s=math.inf, bytes_per_s=math.inf, launch_s=5.0),
    }
    for device in bound_by.values():
        assert Roofline(plan, device).steps_s(1, "F0") == [5.0]


BYTES_PER_S = 1e6


def add_s(plan: Plan, times: int) -> float:
    """Returns what adding all gradients of the network takes so many times."""
    numbers = sum(param.num_elements for param in plan.graph.params.values() if param.trainable)
    return times * ADD_TOUCHES * 4 * numbers / BYTES_PER_S


def test_calibrated_device_takes_the_seconds_that_were_measured():
    plan = plan_of(**LAYOUTS["single"])
    known = Device(3e9, MEMORY_BYTES_PER_S, LAUNCH_S)
    known_s = simulate(plan, Roofline(plan, known)).step_s
    device = calibrated(plan, 8, 8 / known_s)
    assert simulate(plan, Roofline(plan, device)).step_s == pytest.approx(known_s, rel=1e-9)


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
        assert after_s == pytest.approx(before_s * 1 / 4)
        seen += before_s > 0
    assert seen > 2


def test_buffers_follow_all_microbatches():
    net = {"name": "custom", "target": "tests.helpers.custom_nets:Spectral", "classes": 4}
    device, peaks, seconds = Device(1e12, 1e12, launch_s=1e-3), {}, {}
    for count in (1, 8):
        values = {"image": 16, "batch": 2 * count, "model": net, "data": {"prefetch": 0}}
        config = from_dict({**values, "parallel": {"microbatches": count}})
        plan = traces.plan_of(config)
        [rank] = footprint(config, plan)
        update_s = (UPDATE_TOUCHES + 2) * 4 * sum(s.params for s in plan.stages) / 1e12
        peaks[count], seconds[count] = (
            rank.peak_bytes,
            Roofline(plan, device).optimiser_s(0) - update_s,
        )
    state = sum(4 * plan.graph.params[name].num_elements for name in plan.graph.updates)
    assert peaks[8] - peaks[1] >= 7 * state  # a state for every microbatch
    assert seconds[1] > 10e-3  # some ten operators for the power iterations
    assert seconds[8] == pytest.approx(8 * seconds[1])


def test_gradients_of_later_microbatches_are_added():
    def planned(**parallel: Any) -> Plan:
        pieces = parallel.get("microbatches", 1) * parallel.get("directions", 1)
        plan = make_plan(config_of(batch=2 * pieces, **parallel), forked(2, True))
        plan.require_ok()
        return plan

    def backward_s(plan: Plan) -> float:
        costs = Roofline(plan, Device(1e12, BYTES_PER_S, 0.0))
        actions = [action for action in plan.actions_of(0) if action[0] == "B"]
        return sum(sum(costs.steps_s(0, action)) for action in actions)

    one, four = planned(), planned(microbatches=4)
    assert add_s(one, 1) > 0
    assert backward_s(four) == pytest.approx(4 * backward_s(one) + add_s(one, 3))
    # Each direction has gradients of its own; one microbatch adds nothing.
    gems = {"stages": 2, "directions": 2, "schedule": "gems"}
    two, four = planned(**gems), planned(microbatches=2, **gems)
    assert backward_s(four) - 2 * backward_s(two) == pytest.approx(add_s(two, 1))
