"""Does a simulated step take as long as one calculated by hand, on networks without a surprise?"""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from hires.core.config.run_config import from_dict
from hires.core.ranks.timeline import (
    COLLECTIVE,
    FORWARD,
    GRADIENTS,
    HALO,
    OPTIMISER,
    WAIT,
    StepSpans,
)
from hires.plan.event import ALONE
from hires.plan.plan import Plan
from hires.plan.planner import make_plan
from hires.plan.program import events, steps_of
from hires.plan.schedule import started
from hires.plan.simulation.costs import (
    ActionCosts,
    Device,
    Roofline,
    measured_costs,
    timed_program,
)
from hires.plan.simulation.simulate import Link, Network, simulate
from tests.helpers.graphs import chain
from tests.helpers.simulated import STEP, equal_costs, unit_costs
from tests.helpers.small_plans import LAYOUTS, plan_of
from tests.helpers.tiny_nets import traced

FORWARD_S, BACKWARD_S = 1.0, 2.0
LATENCY_S = 0.25


def chained(task: str = "train", **parallel: Any) -> Plan:
    """Returns a plan of two layers of equal cost; between them travels one value of 4 numbers."""
    config = from_dict({"image": 8, "batch": 4, "task": {"name": task}, "parallel": parallel})
    plan = make_plan(config, chain([(10, 4), (10, 4)]))
    assert plan.ok, plan.findings
    return plan


def costs(plan: Plan) -> ActionCosts:
    """Returns equal seconds for all ranks."""
    return equal_costs(plan, FORWARD_S, BACKWARD_S)


def everywhere(link: Link, **keys: Any) -> Network:
    return Network(link, link, **keys)


def test_two_stages_one_after_the_other():
    plan = chained(stages=2)
    network = everywhere(Link(LATENCY_S, bytes_per_s=32))  # 16 bytes take 0.5 s
    found = simulate(plan, costs(plan), network)
    #  rank 0: F0 1                                  B0 2
    #  way:       0.5 + 0.25                0.75
    #  rank 1:               F0 1   B0 2
    assert found.step_s == 1 + 0.75 + 1 + 2 + 0.75 + 2
    assert found.busy_s == [{"forward": 1, "backward": 2, OPTIMISER: 0}] * 2
    # Rank 0 waits for its gradient from the end of F0. Rank 1 waits for the value first, and at
    # the end until its gradient is sent: a rendezvous.
    assert found.waiting_s == [{WAIT: 0.75 + 3 + 0.75}, {WAIT: 1 + 0.75 + 0.75}]
    assert found.bubble == pytest.approx(1 - 6 / (2 * 7.5))


def test_pipeline_of_two_microbatches_hides_all_but_the_first_message():
    plan = chained("infer", stages=2, microbatches=2)
    found = simulate(plan, costs(plan), everywhere(Link(LATENCY_S, 32)))
    #  rank 0: F0 1   F1 1
    #  rank 1:   1.75      F0 to 2.75, then F1, whose message came at 2.75
    assert found.step_s == 1 + 0.75 + 1 + 1
    # Slower links than stages: the second message waits for the first one's bytes.
    found = simulate(plan, costs(plan), everywhere(Link(LATENCY_S, 8)))  # 2 s a message
    assert found.step_s == 1 + 2 + 2 + 0.25 + 1


def test_send_ends_when_the_receiver_is_ready():
    plan = chained("infer", stages=2, microbatches=4)
    seconds = {(rank, f"F{m}"): [10.0**rank] for rank in range(2) for m in range(4)}
    late = ActionCosts(plan, seconds)
    found = simulate(plan, late, everywhere(Link(LATENCY_S)))
    # F3 is sent at 4. Rank 1 posts its receive one action ahead: when F1 is done, at 21.25.
    assert found.step_s == 1.25 + 4 * 10
    assert found.waiting_s[0] == {WAIT: 21.25 + 0.25 - 4}


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


def without_overlap(plan: Plan) -> Plan:
    """Returns the plan, its halos waited for before anything is computed."""
    plan.halo_overlap = "off"
    return plan


def test_halo_comes_before_its_convolution():
    plan = without_overlap(conv("infer"))
    found = simulate(plan, costs(plan), everywhere(Link(LATENCY_S, 48)))
    # Both rows of 6 numbers (24 bytes, 0.5 s) travel at once, each in its direction.
    assert found.step_s == 0.5 + 0.25 + 1
    assert found.waiting_s == [{HALO: 0.75}] * 2
    [halo, forward] = sorted(found.ranks[0].spans, key=lambda span: span.kind, reverse=True)
    assert (halo.kind, halo.begin_s, halo.end_s) == (HALO, 0.0, 0.75)
    assert (forward.kind, forward.begin_s, forward.end_s) == (FORWARD, 0.0, 1.75)


def test_overlapping_halo_hides_behind_the_interior():
    plan = conv("infer")
    plan.halo_overlap = "on"
    # 6 borrowed pixels of 24: three quarters of the second are computed meanwhile.
    found = simulate(plan, costs(plan), everywhere(Link(LATENCY_S, 48)))
    assert found.step_s == 0.75 + 0.25
    assert found.waiting_s == [{}] * 2
    slow = simulate(plan, costs(plan), everywhere(Link(2 * LATENCY_S, 48)))
    assert slow.step_s == 1.0 + 0.25
    assert slow.waiting_s == [{HALO: 0.25}] * 2
    # By itself the executor would not divide so small a tile.
    plan.halo_overlap = "auto"
    assert simulate(plan, costs(plan), everywhere(Link(LATENCY_S, 48))).step_s == 0.75 + 1


def test_fused_halos_are_computed_too():
    plan = plan_of("infer", tiles=[2, 1], halo={"fuse": 2})
    alone = plan_of("infer", tiles=[2, 1])
    device = Device(1.0, math.inf, 0.0)
    more, less = (sum(Roofline(p, device).steps_s(0, "F0")) for p in (plan, alone))
    assert more > less


def test_collectives_wait_for_the_last_member_and_gradients_for_all_replicas():
    plan = without_overlap(conv("train", replicas=2))
    found = simulate(plan, costs(plan), everywhere(Link(LATENCY_S)))
    # halo, forward, sum of the losses of two tiles in 2 rounds (it was costed as a gather, in one),
    # backward, then four holders sum the gradient in 2 * 2 rounds
    assert found.step_s == LATENCY_S + 1 + 2 * LATENCY_S + 2 + 4 * LATENCY_S
    spent = {HALO: LATENCY_S, COLLECTIVE: 2 * LATENCY_S, GRADIENTS: 4 * LATENCY_S}
    assert found.waiting_s[0] == spent


def test_messages_between_nodes_share_the_way_out():
    plan = without_overlap(plan_of("infer", tiles=[2, 2]))
    near = simulate(plan, unit_costs(plan), everywhere(Link(0, 1e3)))
    apart = simulate(plan, unit_costs(plan), everywhere(Link(0, 1e3), ranks_per_node=2))
    # Tiles 0 and 1 share a node and send to tiles 2 and 3 below them at the same time.
    assert near.step_s < apart.step_s


@pytest.mark.parametrize("task", ["train", "infer"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_unit_actions_without_communication_take_the_length_of_the_schedule(name: str, task: str):
    plan = plan_of(task, **LAYOUTS[name])
    length = 1 + max(started(plan.pipeline, plan.schedule).values())
    found = simulate(plan, unit_costs(plan))
    assert found.step_s == pytest.approx(length, rel=1e-9)
    for rank, line in enumerate(found.ranks):
        passes = [span.action for span in line.spans if span.kind in ("forward", "backward")]
        assert passes == plan.actions_of(rank)


@pytest.mark.parametrize("name", LAYOUTS)
def test_program_holds_exactly_the_events_of_the_plan(name: str):
    plan = plan_of(**LAYOUTS[name])
    for rank in range(plan.ranks_per_replica):
        items = timed_program(plan, rank, unit_costs(plan))
        told = [e for e in events(plan, rank) if e.kind not in (*ALONE, "barrier")]
        assert [item.event for item in items if item.event] == told


@given(
    name=st.sampled_from(sorted(LAYOUTS)),
    bandwidth=st.floats(1e2, 1e7),
    faster=st.floats(1, 1e3),
    latency=st.floats(0, 1),
    per_node=st.integers(1, 4),
)
@settings(max_examples=60, deadline=None)
def test_more_bandwidth_never_makes_a_step_slower(name, bandwidth, faster, latency, per_node):
    plan = plan_of(**LAYOUTS[name])
    slow = everywhere(Link(latency, bandwidth), ranks_per_node=per_node)
    fast = everywhere(Link(latency, bandwidth * faster), ranks_per_node=per_node)
    at_once = simulate(plan, unit_costs(plan)).step_s
    took = simulate(plan, unit_costs(plan), fast).step_s
    assert took <= simulate(plan, unit_costs(plan), slow).step_s * (1 + 1e-9)
    assert took >= at_once * (1 - 1e-9)


@pytest.mark.parametrize("name", ["pp 1f1b", "sp+pp", "sp+gems", "gems_1f1b"])
def test_own_action_times_reproduce_a_simulated_step(name: str):
    plan = plan_of(**LAYOUTS[name])
    network = everywhere(Link(0.01, 1e6))
    first = simulate(plan, costs(plan), network)
    again = simulate(plan, measured_costs(plan, first.ranks), network)
    assert again.step_s == pytest.approx(first.step_s, rel=1e-9)


def test_action_is_measured_between_its_collectives():
    plan = conv("train")
    found = measured_costs(plan, [StepSpans(rank, 0, "", 0.0, STEP) for rank in range(2)])
    assert found.seconds[1, "F0"] == [1 + 3 - 1, 1]  # data, forward, halo; behind the loss
    assert found.seconds[1, "B0"] == [5 - 1]
    assert found.steps_s(1, "F0") == [4]  # all of it is the convolution's
    assert found.optimiser_s(0) == 1


def test_recomputed_segments_run_forward_again_before_their_way_back():
    plan = Plan.from_dict(chained().to_dict())  # without derived facts
    stage = plan.stages[0]
    stage.segments = [0, 1, 2]
    names = [(step.node.name, step.back) for step in steps_of(plan, stage, back=True)]
    assert names == [("c1", False), ("c1", True), ("c0", False), ("c0", True)]


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


def test_tiles_share_the_arithmetic():
    plan = conv("infer")
    whole = conv("infer", tiles=[1, 1])
    device = Device(1.0, math.inf, 0.0)
    [tile], [all_of_it] = (Roofline(p, device).steps_s(0, "F0") for p in (plan, whole))
    assert tile == all_of_it / 2
