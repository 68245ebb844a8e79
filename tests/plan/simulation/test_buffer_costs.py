"""Do the buffers that a network writes cost time and memory for every microbatch of a step?"""

from __future__ import annotations

import pytest

from hires.core.config.run_config import from_dict
from hires.engine.footprint import footprint
from hires.plan.plan import Plan
from hires.plan.simulation.costs import UPDATE_TOUCHES, Device, Roofline
from tests.helpers import traces

NET = {"name": "custom", "target": "tests.helpers.custom_nets:Spectral", "classes": 4}
DEVICE = Device(1e12, 1e12, launch_s=1e-3)


def planned(microbatches: int) -> tuple[Plan, int]:
    """Returns a plan of microbatches of two images, and the peak of its rank."""
    values = {"image": 16, "batch": 2 * microbatches, "model": NET, "data": {"prefetch": 0}}
    config = from_dict({**values, "parallel": {"microbatches": microbatches}})
    plan = traces.plan_of(config)
    assert plan.ok, plan.findings
    [rank] = footprint(config, plan)
    return plan, rank.peak_bytes


def test_buffers_follow_all_microbatches():
    (one, few), (eight, many) = planned(1), planned(8)
    state = sum(4 * one.graph.params[name].num_elements for name in one.graph.updates)
    assert many - few >= 7 * state  # a state for every microbatch
    seconds = {plan.pieces: Roofline(plan, DEVICE).optimiser_s(0) for plan in (one, eight)}
    update_s = (UPDATE_TOUCHES + 2) * 4 * sum(s.params for s in one.stages) / DEVICE.bytes_per_s
    assert seconds[1] - update_s > 10e-3  # some ten operators for the power iterations
    assert seconds[8] - update_s == pytest.approx(8 * (seconds[1] - update_s))
