"""Costs that are easy to add up by hand, and a step in which everything happens once."""

from __future__ import annotations

from hires.core.ranks.timeline import (
    BACKWARD,
    COLLECTIVE,
    DATA,
    FORWARD,
    GRADIENTS,
    HALO,
    OPTIMISER,
    WAIT,
    Span,
)
from hires.plan.plan import Plan
from hires.plan.simulation.costs import ActionCosts

STEP = [
    Span(DATA, "F0", 0.0, 1.0),
    Span(FORWARD, "F0", 1.0, 6.0),
    Span(HALO, "F0", 3.0, 4.0),
    Span(COLLECTIVE, "F0", 4.0, 5.0),
    Span(WAIT, "B0", 6.0, 8.0),
    Span(BACKWARD, "B0", 8.0, 13.0),
    Span(HALO, "B0", 11.0, 12.0),
    Span(GRADIENTS, "", 13.0, 14.0),
    Span(OPTIMISER, "", 14.0, 15.0),
]
"""What a rank did in one step of 15 seconds."""


def equal_costs(plan: Plan, forward_s: float, backward_s: float) -> ActionCosts:
    """Returns costs in which all forward passes are equally long, and all backward passes."""
    seconds = {"F": forward_s, "B": backward_s}
    ranks = range(plan.ranks_per_replica)
    return ActionCosts(plan, {(r, a): [seconds[a[0]]] for r in ranks for a in plan.actions_of(r)})


def unit_costs(plan: Plan) -> ActionCosts:
    """Returns costs in which every action takes one second and nothing else any."""
    return equal_costs(plan, 1.0, 1.0)
