"""Costs that are easy to add up by hand, and a step in which everything happens once."""

from __future__ import annotations

from dataclasses import dataclass

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
from hires.plan.program import steps_of
from hires.plan.simulation.costs import BACK

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


@dataclass
class EqualCosts:
    """Seconds of each pass, divided among its nodes by their floating-point operations."""

    plan: Plan
    forward_s: float = 1.0
    backward_s: float = 1.0

    def steps_s(self, rank: int, action: str) -> list[float]:
        """Returns the seconds of each step of an action."""
        slot = self.plan.slot_of(rank, self.plan.direction_of(action))
        back = action[0] == "B"
        steps = steps_of(self.plan, self.plan.stages[slot.stage], back)
        flops = [step.node.flops * (BACK if step.back else 1) for step in steps]
        flops = flops if any(flops) else [1] * len(steps)
        return [
            (self.backward_s if back else self.forward_s) * one / max(1, sum(flops))
            for one in flops
        ]

    def optimiser_s(self, rank: int) -> float:
        """Returns no seconds for an update."""
        return 0.0
