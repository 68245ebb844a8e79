"""A simulated step takes as long as one calculated by hand, on links of known speed."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from torch import nn

from hires.core.config.run_config import from_dict
from hires.core.ranks.timeline import COLLECTIVE, GRADIENTS, HALO, OPTIMISER, WAIT
from hires.plan.event import Event
from hires.plan.plan import Plan
from hires.plan.planner import make_plan
from hires.plan.routes import parse_route
from hires.plan.simulation.costs import ADD_TOUCHES, Device, Roofline
from hires.plan.simulation.crowding import crowded_step_s
from hires.plan.simulation.measured_network import MeasuredNetwork
from hires.plan.simulation.simulate import Link, Network, Simulation, simulate
from hires.plan.table_gains import MeasuredSeconds
from hires.plan.tuning_table import TuningTable
from tests.helpers.graphs import chain
from tests.helpers.simulated import EqualCosts
from tests.helpers.small_plans import config_of, forked
from tests.helpers.tiny_nets import traced

FORWARD_S, BACKWARD_S = 1.0, 2.0
LATENCY_S = 0.25


def chained(task: str = "train", **parallel: Any) -> Plan:
    """Returns a plan of two layers of equal cost; between them travels one value of 4 numbers."""
    config = from_dict({"image": 8, "batch": 4, "task": {"name": task}, "parallel": parallel})
    plan = make_plan(config, chain([(10, 4), (10, 4)]))
    assert plan.ok, plan.findings
    return plan


def costs(plan: Plan) -> EqualCosts:
    """Returns equal seconds for all ranks."""
    return EqualCosts(plan, FORWARD_S, BACKWARD_S)


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


def test_collectives_wait_for_the_last_member_and_gradients_for_all_replicas():
    plan = without_overlap(conv("train", replicas=2))
    found = simulate(plan, costs(plan), everywhere(Link(LATENCY_S)))
    # halo, forward, sum of the losses of two tiles in 2 rounds (it was costed as a gather, in one),
    # backward, then four holders sum the gradient in 2 * 2 rounds
    assert found.step_s == LATENCY_S + 1 + 2 * LATENCY_S + 2 + 4 * LATENCY_S
    spent = {HALO: LATENCY_S, COLLECTIVE: 2 * LATENCY_S, GRADIENTS: 4 * LATENCY_S}
    assert found.waiting_s[0] == spent


NETWORK = Network(near=Link(1.0, 10.0), far=Link(5.0, 2.0), ranks_per_node=2)


def test_ranks_of_a_node_share_the_way_out_but_not_the_ways_inside():
    assert set(NETWORK.lanes(0, 2)) & set(NETWORK.lanes(1, 3)) == {("out", 0, 0), ("in", 1, 0)}
    assert not set(NETWORK.lanes(0, 1)) & set(NETWORK.lanes(1, 0))


def test_collectives_are_rounds_of_latency_and_bytes():
    seconds = [NETWORK.gather_s([*range(n)], 20) for n in (1, 2, 4)]
    # One round and one message of 20 bytes; two rounds and three messages between nodes.
    assert seconds == [0.0, 1.0 + 2.0, 2 * 5.0 + 3 * 10.0]
    # An all-reduce sends nearly twice its bytes.
    assert NETWORK.reduce_s([0, 1, 2, 3], 20) == 2 * 2 * 5.0 + 2 * 3 / 4 * 10.0
    crowded = dataclasses.replace(NETWORK, crowd=3.0)  # ranks that share cores take turns
    assert crowded.message_s(0, 1, 20, None) == (3 * 2.0, 3 * 1.0)
    assert crowded.gather_s([0, 1], 20) == 3 * NETWORK.gather_s([0, 1], 20)
    assert crowded.reduce_s([0, 1, 2], 20) == 3 * NETWORK.reduce_s([0, 1, 2], 20)


def simulation(*spans):
    ends = [end for rank in spans for _, end in rank]
    return Simulation(max(ends), [], [], [], [list(rank) for rank in spans])


DRAWN = simulation([(0, 4), (8, 12)], [(0, 8)], [(4, 12)])
"""  rank 0   ####....####
     rank 1   ########....
     rank 2   ....########     two at any moment"""


@pytest.mark.parametrize(("cores", "step_s"), [(3, 12), (2, 12), (1, 24), (0.5, 48)])
def test_each_moment_takes_as_much_longer_as_ranks_exceed_cores(cores, step_s):
    assert crowded_step_s(DRAWN, cores) == step_s


def test_measured_route_takes_its_own_seconds():
    points = ["send 2 2 cpu bytes 8 gloo:message 0.001"]
    table = TuningTable.from_dict({"format": 1, "rules": [], "default": "gloo", "points": points})
    network = MeasuredNetwork(measured=MeasuredSeconds(table))
    event = Event("send", 1, 0, (2,), "float32", route=parse_route("gloo:message"))
    assert network.message_s(0, 1, 8, event) == (0.0, 0.001)


BYTES_PER_S = 1e6


def add_s(plan: Plan, times: int) -> float:
    """Returns what adding all gradients of the network takes so many times."""
    numbers = sum(param.num_elements for param in plan.graph.params.values() if param.trainable)
    return times * ADD_TOUCHES * 4 * numbers / BYTES_PER_S


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
