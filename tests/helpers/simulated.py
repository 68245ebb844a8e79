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
    StepSpans,
)
from hires.plan.event import MEETING, Event
from hires.plan.plan import Plan
from hires.plan.program import steps_of
from hires.plan.simulation.costs import BACK, COMPUTES, SUMS
from hires.plan.simulation.simulate import Network, simulate

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


def planned_spans(plan: Plan, network: Network | None = None) -> list[StepSpans]:
    """Returns what every rank of a replica does in a step of equal costs, as a run records it."""
    steps = []
    for rank, own in enumerate(simulate(plan, EqualCosts(plan), network).ranks):
        spans: list[Span] = []
        passes: dict[str, list[float]] = {}  # when an action began and ended
        now_s = 0.0
        for (action, event, _), end_s in own:
            begin_s, now_s, kind = now_s, end_s, kind_of(action, event)
            if kind in (FORWARD, BACKWARD, HALO, COLLECTIVE):
                passes.setdefault(action, [begin_s, begin_s])[1] = now_s
            if kind not in (FORWARD, BACKWARD) and now_s > begin_s:
                spans.append(Span(kind, action, begin_s, now_s, event.what))
        for action, (first_s, last_s) in passes.items():
            spans.append(Span(FORWARD if action[0] == "F" else BACKWARD, action, first_s, last_s))
        spans.sort(key=lambda span: (span.begin_s, -span.end_s))
        steps.append(StepSpans(rank, 0, "", 0.0, spans))
    return steps


def kind_of(action: str, event: Event) -> str:
    """Returns the kind of span of something that takes time."""
    if event is COMPUTES:
        return {"F": FORWARD, "B": BACKWARD}.get(action[:1], OPTIMISER)
    if event.role in SUMS or (event.role == MEETING and not event.part.node):
        return GRADIENTS
    return COLLECTIVE if event.role == MEETING else HALO if event.part.node else WAIT
