"""Do microbatches after the first cost what adding up their gradients takes?"""

from __future__ import annotations

import pytest

from hires.plan.plan import Plan
from hires.plan.planner import make_plan
from hires.plan.search.candidates import Candidate, LayoutShape
from hires.plan.search.estimate import Estimator
from hires.plan.simulation.costs import ADD_TOUCHES, Device, Roofline
from hires.plan.simulation.simulate import Link, Network
from tests.helpers.small_plans import config_of, forked

BYTES_PER_S = 1e6
DEVICE = Device(1e12, BYTES_PER_S, 0.0)


def planned(microbatches: int = 1, directions: int = 1) -> Plan:
    """Returns a plan of microbatches of two samples, in two stages if there are two directions."""
    batch = 2 * microbatches * directions
    schedule = "gems" if directions == 2 else "gpipe"
    parallel = {"microbatches": microbatches, "directions": directions, "schedule": schedule}
    plan = make_plan(config_of(batch=batch, stages=directions, **parallel), forked(2, True))
    plan.require_ok()
    return plan


def backward_s(plan: Plan) -> float:
    """Returns the seconds of all backward passes of rank 0."""
    costs = Roofline(plan, DEVICE)
    actions = [action for action in plan.actions_of(0) if action[0] == "B"]
    return sum(sum(costs.steps_s(0, action)) for action in actions)


def add_s(plan: Plan, times: int) -> float:
    """Returns what adding all gradients of the network takes so many times."""
    numbers = sum(param.num_elements for param in plan.graph.params.values() if param.trainable)
    return times * ADD_TOUCHES * 4 * numbers / BYTES_PER_S


def test_gradients_of_later_microbatches_are_added():
    one, four = planned(), planned(4)
    assert add_s(one, 1) > 0
    assert backward_s(four) == pytest.approx(4 * backward_s(one) + add_s(one, 3))


def test_each_direction_has_gradients_of_its_own():
    """A direction of one microbatch adds nothing."""
    two, four = planned(directions=2), planned(2, directions=2)
    # Rank 0 has the first stage of one direction, and the second of the other: all of the network.
    assert backward_s(four) - 2 * backward_s(two) == pytest.approx(add_s(two, 1))


def test_estimates_add_them_too():
    config = config_of(batch=8)
    network = Network(Link(), Link())
    free = Estimator(config, forked(8, True), lambda node, share, back: 0.0, network, BYTES_PER_S)
    shape = LayoutShape(1, 1, 0, (1, 1), 1, 1)
    one, four = (free.estimate(Candidate(shape, count)).step_s for count in (1, 4))
    assert four - one == pytest.approx(add_s(planned(), 3))
