"""A simulated step takes what a table has measured for the routes of its messages."""

import pytest

from hires.plan.event import JOINT, POSTS, Event
from hires.plan.program import events
from hires.plan.routes import parse_route
from hires.plan.simulation.measured_network import MeasuredNetwork
from hires.plan.simulation.simulate import Link, Network, simulate
from hires.plan.table_gains import MeasuredSeconds
from hires.plan.table_rules import Case
from hires.plan.traffic import Operation
from hires.plan.tuning_table import TuningTable
from tests.helpers.simulated import equal_costs
from tests.helpers.small_plans import LAYOUTS, plan_of


def table_of(plan, seconds):
    rows = {}
    for rank in range(plan.world):
        for event in events(plan, rank):
            if event.kind in (*POSTS, *JOINT):
                of_pair = event.kind in POSTS
                joint = "all_gather" if event.kind == "collective" and event.part.node else ""
                operation = "send" if of_pair else joint or "all_reduce"
                kind = "float" if operation == "all_reduce" else "bytes"
                for size in (1, 2**20):
                    key = f"{operation} 2 2 cpu {kind} {size} {event.route}"
                    rows[key] = f"{key} {seconds}"
    values = {"format": 1, "rules": [], "default": "gloo", "points": [*rows.values()]}
    return MeasuredSeconds(TuningTable.from_dict(values))


@pytest.mark.parametrize("name", ["dp", "pp", "sp rows", "sp+gems"])
def test_measured_latency_is_that_of_a_link(name):
    plan = plan_of(**LAYOUTS[name])
    costs = equal_costs(plan, 1.0, 2.0)
    near = Link(latency_s=0.25)
    measured = simulate(plan, costs, MeasuredNetwork(near, near, measured=table_of(plan, 0.25)))
    if name == "pp":  # messages between two ranks alone
        assert measured.step_s == simulate(plan, costs, Network(near, near)).step_s
    slow = simulate(plan, costs, MeasuredNetwork(near, near, measured=table_of(plan, 0.5)))
    assert slow.step_s > measured.step_s > simulate(plan, costs).step_s


def test_route_that_was_not_measured_takes_the_link():
    plan = plan_of(**LAYOUTS["sp+gems"])
    costs, near = equal_costs(plan, 1.0, 2.0), Link(0.1, 1e6)
    empty = MeasuredSeconds(TuningTable.from_dict({"format": 1, "rules": [], "default": "gloo"}))
    bare = simulate(plan, costs, Network(near, near))
    assert simulate(plan, costs, MeasuredNetwork(near, near, measured=empty)) == bare


def test_form_of_a_plan_takes_what_its_backend_does():
    points = ["all_reduce 2 2 cpu float 1024 gloo 0.5", "send 2 2 cpu bytes 1024 shm:message 0.25"]
    values = {"format": 1, "rules": [], "default": "gloo", "points": points}
    measured = MeasuredSeconds(TuningTable.from_dict(values))
    summed, sent = (
        Case(operation, 2, 2, "cpu", kind, 1024)
        for operation, kind in (("all_reduce", "float"), ("send", "bytes"))
    )
    assert measured.seconds(summed, parse_route("gloo:flat")) == 0.5
    assert measured.seconds(sent, parse_route("shm:mailbox")) == 0.25
    assert measured.seconds(summed, parse_route("cma:shares")) is None


@pytest.mark.parametrize("kind", ["reduce_scatter", "all_gather"])
def test_divided_update_takes_its_own_seconds(kind):
    points = [f"{kind} 2 2 cpu {{}} 4096 gloo 0.125".format("float" if kind[0] == "r" else "bytes")]
    values = {"format": 1, "rules": [], "default": "gloo", "points": points}
    network = MeasuredNetwork(measured=MeasuredSeconds(TuningTable.from_dict(values)))
    event = Event(kind, 0, 0, (1024,), "float32", route=parse_route("gloo"))
    call = Operation(kind, "gradient", 4096, event.route)
    assert network.meeting_s([0, 1], call, event) == 0.125
