"""Is a step divided so that all parts add up, and is waiting told from talking?"""

from __future__ import annotations

import pytest

from hires.core.ranks.timeline import BACKWARD, FORWARD, HALO, OPTIMISER, WAIT, Span, StepSpans
from hires.plan.simulation.simulate import simulate
from hires.report.plots.steps import BUBBLE, OTHER, PARTS, PIPELINE, split_rank, split_steps
from tests.helpers.simulated import STEP, unit_costs
from tests.helpers.small_plans import LAYOUTS, plan_of


def test_parts_of_a_step_add_up_to_it():
    plan = plan_of(stages=2)
    parts = split_rank(plan, StepSpans(0, 0, "", 0.0, STEP), {}, 16.0)
    assert set(parts) == set(PARTS)
    assert sum(parts.values()) == pytest.approx(16.0)
    assert (parts[FORWARD], parts[BACKWARD], parts[HALO], parts[OPTIMISER]) == (3.0, 4.0, 2.0, 1.0)
    assert parts[BUBBLE] == 1.0  # behind its last span, until the last rank ends


def test_wait_is_bubble_until_the_sender_has_computed():
    plan = plan_of(stages=2)  # rank 1 needs F0 of rank 0
    spans = [Span(WAIT, "F0", 0.0, 5.0), Span(FORWARD, "F0", 5.0, 9.0)]
    parts = split_rank(plan, StepSpans(1, 0, "", 0.0, spans), {(0, "F0"): 4.0}, 9.0)
    assert (parts[BUBBLE], parts[PIPELINE], parts[FORWARD]) == (4.0, 1.0, 4.0)


def test_wait_for_nobody_known_is_the_message():
    plan = plan_of(stages=2)
    spans = [Span(WAIT, "F0", 0.0, 5.0), Span(WAIT, "", 6.0, 7.0, "its sends")]
    parts = split_rank(plan, StepSpans(1, 0, "", 0.0, spans), {}, 7.0)
    assert (parts[BUBBLE], parts[PIPELINE], parts[OTHER]) == (0.0, 6.0, 1.0)


@pytest.mark.parametrize("name", ["single", "pp", "sp+pp", "gems", "sp+gems", "dp"])
def test_every_rank_of_a_simulated_step_is_divided(name):
    plan = plan_of(**LAYOUTS[name])
    ranks = split_steps(plan, {0: [*simulate(plan, unit_costs(plan)).ranks]})
    lengths = {round(sum(parts.values()), 6) for parts in ranks}
    assert len(ranks) == plan.world
    # Replicas are simulated as one.
    assert lengths - {0}
    assert len(lengths - {0.0}) == 1
