"""A simulated step takes as long as one calculated by hand, on links of known speed."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
from torch import nn

from hires.core.config.launcher_config import node_starts
from hires.core.config.run_config import from_dict
from hires.plan.event import Event
from hires.plan.message_routes import is_on_one_node
from hires.plan.plan import Plan
from hires.plan.planner import make_plan
from hires.plan.routes import parse_route
from hires.plan.simulation.costs import ADD_TOUCHES, COMPUTES, Device, Item, Roofline
from hires.plan.simulation.machine_model import MeasuredNetwork, crowded_step_s
from hires.plan.simulation.simulate import Link, Network, Simulation, simulate
from hires.plan.tuning_table import MeasuredSeconds, TuningTable
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


def test_pipeline_of_two_microbatches_hides_all_but_the_first_message():
    plan = chained("infer", stages=2, microbatches=2)
    found = simulate(plan, costs(plan), everywhere(Link(LATENCY_S, 32)))
    #  rank 0: F0 1   F1 1
    #  rank 1:   1.75      F0 to 2.75, then F1, whose message came at 2.75
    assert found.step_s == 1 + 0.75 + 1 + 1
    # Slower links than stages: the second message waits for the first one's bytes.
    found = simulate(plan, costs(plan), everywhere(Link(LATENCY_S, 8)))  # 2 s a message
    assert found.step_s == 1 + 2 + 2 + 0.25 + 1


def conv(task: str, overlap: str, **parallel: Any) -> Plan:
    """Returns a plan of one 3x3 convolution on an 8x6 map in two tiles, top and bottom."""
    part = nn.Conv2d(1, 1, 3, padding=1, bias=False)
    graph = traced(lambda net, x: net.conv(x), (1, 1, 8, 6), training=task == "train", conv=part)
    keys = {"image": [8, 6], "batch": parallel.get("replicas", 1), "task": {"name": task}}
    plan = make_plan(from_dict({**keys, "parallel": {"tiles": [2, 1], **parallel}}), graph)
    assert plan.ok, plan.findings
    return dataclasses.replace(plan, halo_overlap=overlap)


def test_halo_comes_before_its_convolution_or_hides_behind_its_interior():
    # Both rows of 6 numbers (24 bytes, 0.5 s) travel at once, each in its direction; three quarters
    # of a second of computing need no borrowed pixel.
    for overlap, latency_s, step_s in (
        ("off", LATENCY_S, 0.5 + 0.25 + 1),
        ("on", LATENCY_S, 0.75 + 0.25),
        ("on", 2 * LATENCY_S, 1.0 + 0.25),
        ("auto", LATENCY_S, 0.75 + 1),  # it would not divide so small a tile
    ):
        plan = conv("infer", overlap)
        assert simulate(plan, costs(plan), everywhere(Link(latency_s, 48))).step_s == step_s
    plan = conv("train", "off", replicas=2)
    found = simulate(plan, costs(plan), everywhere(Link(LATENCY_S)))
    # Halo, forward, sum of the losses of two tiles in 2 rounds (it was costed as a gather, in one),
    # backward, then four holders sum the gradient in 2 * 2 rounds.
    assert found.step_s == LATENCY_S + 1 + 2 * LATENCY_S + 2 + 4 * LATENCY_S


NETWORK = Network(near=Link(1.0, 10.0), far=Link(5.0, 2.0), node_starts=(2,))


def test_ranks_are_on_the_nodes_of_their_routes():
    """Ten ranks on three nodes were 4, 4 and 2 for step times, and 4, 3 and 3 for routes."""
    plan = make_plan(config_of(batch=20, replicas=10), forked(2, True))
    plan = dataclasses.replace(plan, num_nodes=3)
    network = Network(node_starts=node_starts(plan.world, 3))
    for one, other in itertools.combinations(range(plan.world), 2):
        is_near = network.node_of(one) == network.node_of(other)
        assert is_near == is_on_one_node(plan, [one, other])


def test_collectives_are_rounds_of_latency_and_bytes():
    # Ranks of a node share the way out, but not the ways inside.
    assert {*NETWORK.lanes(0, 2)} & {*NETWORK.lanes(1, 3)} == {("out", 0, 0), ("in", 1, 0)}
    assert not {*NETWORK.lanes(0, 1)} & {*NETWORK.lanes(1, 0)}
    # One round and one message of 20 bytes; two rounds and three messages between nodes.
    seconds = [NETWORK.gather_s([*range(n)], 20) for n in (1, 2, 4)]
    assert seconds == [0.0, 1.0 + 2.0, 2 * 5.0 + 3 * 10.0]
    # An all-reduce sends nearly twice its bytes.
    assert NETWORK.reduce_s([0, 1, 2, 3], 20) == 2 * 2 * 5.0 + 2 * 3 / 4 * 10.0
    # What is slow inside a node is slow between nodes, too, unless each sends one rank.
    slow = dataclasses.replace(NETWORK, near=Link(1.0, 1.0))
    assert slow.reduce_s([0, 1, 2, 3], 20) == 2 * 2 * 5.0 + 2 * 3 / 4 * 20.0
    assert slow.reduce_s([1, 2], 20) == NETWORK.reduce_s([1, 2], 20)
    crowded = dataclasses.replace(NETWORK, crowd=3.0)  # ranks that share cores take turns
    assert crowded.message_s(0, 1, 20, None) == (3 * 2.0, 3 * 1.0)
    assert crowded.gather_s([0, 1], 20) == 3 * NETWORK.gather_s([0, 1], 20)
    assert crowded.reduce_s([0, 1, 2], 20) == 3 * NETWORK.reduce_s([0, 1, 2], 20)
    points = [[["send", 2, True, "cpu", "bytes", 8], "gloo:message", 0.001]]
    table = TuningTable.from_dict({"format": 2, "rules": [], "default": "gloo", "points": points})
    network = MeasuredNetwork(measured=MeasuredSeconds(table))
    event = Event("send", 1, 0, (2,), "float32", route=parse_route("gloo:message"))
    assert network.message_s(0, 1, 8, event) == (0.0, 0.001)


def test_each_moment_takes_as_much_longer_as_ranks_exceed_cores():
    # rank 0   ####....####
    # rank 1   ########....
    # rank 2   ....########     two at any moment
    spans = [[(0, 4), (8, 12)], [(0, 8)], [(4, 12)]]
    ranks = [[(Item("F0", COMPUTES, end - begin), end) for begin, end in own] for own in spans]
    busy = Simulation(ranks, 0.0)
    assert [crowded_step_s(busy, cores) for cores in (3, 2, 1, 0.5)] == [12, 12, 24, 48]


BYTES_PER_S = 1e6


def test_gradients_of_later_microbatches_are_added():
    def backward_s(**parallel: Any) -> float:
        pieces = parallel.get("microbatches", 1) * parallel.get("directions", 1)
        plan = make_plan(config_of(batch=2 * pieces, **parallel), forked(2, True))
        plan.require_ok()
        costs = Roofline(plan, Device(1e12, BYTES_PER_S, 0.0))
        actions = [action for action in plan.actions_of(0) if action[0] == "B"]
        return sum(sum(costs.steps_s(0, action)) for action in actions)

    params = [param for param in forked(2, True).params.values() if param.trainable]
    add_s = ADD_TOUCHES * 4 * sum(param.num_elements for param in params) / BYTES_PER_S
    assert backward_s(microbatches=4) == pytest.approx(4 * backward_s() + 3 * add_s)
    # Each direction has gradients of its own; one microbatch adds nothing.
    gems = {"stages": 2, "directions": 2, "schedule": "gems"}
    added = backward_s(microbatches=2, **gems) - 2 * backward_s(**gems)
    assert added == pytest.approx(add_s)
