"""Puts the computation of a step between the events of a rank's program.

The events are those of ``hires.plan.program``, in its order. The computation of a pass stands
between them by the node that each belongs to.
"""

from __future__ import annotations

import itertools
from collections import deque
from typing import NamedTuple

from hires.core.ranks.timeline import (
    BACKWARD,
    COLLECTIVE,
    FORWARD,
    GRADIENTS,
    HALO,
    OPTIMISER,
    WAIT,
)
from hires.plan.event import ALONE, Event
from hires.plan.graph import Rect
from hires.plan.halos import BORDER_SHARE, extents_of
from hires.plan.operators.operator_facts import facts_of
from hires.plan.plan import CommOp, Plan, Slot
from hires.plan.program import events
from hires.plan.simulation.costs import Costs, Step, steps_of

SUMS = ("issue", "wait_issued")


class Item(NamedTuple):
    """One thing that takes a rank's time."""

    kind: str
    """As in ``hires.core.ranks.timeline``."""
    action: str
    """That it belongs to; empty at the end of the step."""
    event: Event | None = None
    """Communication; None: it computes."""
    seconds: float = 0.0


def timed_program(plan: Plan, rank: int, costs: Costs) -> list[Item]:
    """Returns everything that takes a rank's time in one step, in order.

    The barrier before the step is left out: all ranks begin together.
    """
    items: list[Item] = []
    stream = events(plan, rank)
    for event in stream:
        action = event.part.action
        if event.kind in ("forward", "backward"):
            body = [*itertools.takewhile(lambda e: e.kind != "end", stream)]
            seconds = costs.steps_s(rank, action)
            items += _pass(plan, rank, action, [e for e in body if e.part.node], seconds)
            items += [Item(WAIT, action, e) for e in body if not e.part.node]
        elif event.kind == "optimise":
            items.append(Item(OPTIMISER, "", None, costs.optimiser_s(rank)))
        elif event.kind not in ALONE and event.kind != "barrier":
            summed = event.kind in ("collective", *SUMS)
            items.append(Item(GRADIENTS if summed else WAIT, action, event))
    return items


def _pass(
    plan: Plan, rank: int, action: str, inner: list[Event], seconds: list[float]
) -> list[Item]:
    """Returns what a rank does in one pass.

    A halo is exchanged before its node, and its gradient after; everything else after the node that
    made it necessary. Where halos overlap with computation, the node computes while they travel, as
    much of it as needs no borrowed pixels. The next halo may set out with one; it is waited for at
    its own node.
    """
    slot = plan.slot_of(rank, plan.direction_of(action))
    stage, back = plan.stages[slot.stage], action[0] == "B"
    kind = BACKWARD if back else FORWARD
    left = deque(inner)
    items: list[Item] = []

    def compute(step_s: float) -> None:
        """Adds computation to the piece before, if there is one."""
        if items and items[-1].event is None:
            step_s += items.pop().seconds
        items.append(Item(kind, action, None, step_s))

    for step, step_s in zip(steps_of(plan, stage, back), seconds, strict=True):
        here = _events_of(step, left)
        waited = {e.part.number for e in here if e.kind in ("wait_recv", "wait_send")}
        shares = [_hidden_share(plan, slot, stage.comm[index]) for index in sorted(waited)]
        hidden_s = step_s * min(shares, default=0.0)
        left_s = step_s
        if step.back or not waited:  # only the halo of a forward pass precedes its node
            compute(step_s - hidden_s)
            left_s = hidden_s
        for event in here:
            kind_of_event = _kind(event)
            if event.kind.startswith("wait") and hidden_s:
                compute(hidden_s)
                left_s, hidden_s = left_s - hidden_s, 0.0
            if kind_of_event != HALO and left_s:
                compute(left_s)
                left_s = 0.0
            items.append(Item(kind_of_event, action, event))
        if left_s:
            compute(left_s)
    assert not left, f"{left[0].what} is not among the steps of {action}"
    return items


def _events_of(step: Step, left: deque[Event]) -> list[Event]:
    """Takes the events of a step from what is left of its pass."""
    found = []
    while left and left[0].part.node == step.node.name and left[0].part.back == step.back:
        found.append(left.popleft())
    return found


def _kind(event: Event) -> str:
    """Returns in which part of the time line an event of a pass is counted."""
    if event.kind in SUMS:
        return GRADIENTS
    return COLLECTIVE if event.kind == "collective" else HALO


def _hidden_share(plan: Plan, slot: Slot, op: CommOp) -> float:
    """Returns the share of a node that is computed while its halo travels.

    Only convolutions are divided so. Outputs near the border need borrowed pixels: as many of them
    as pixels are borrowed.
    """
    if (
        op.kind != "halo"
        or plan.halo_overlap == "off"
        or not facts_of(plan.graph.by_name[op.node].kind).overlaps_halo
    ):
        return 0.0
    held = extents_of(plan.graph, plan.stages[slot.stage], op.value)
    own = _area(held[slot.tile])
    borrowed = sum(_area((m[2], m[3], m[4], m[5])) for m in op.messages if m[1] == slot.tile)
    border = borrowed / own if own else 1.0
    if plan.halo_overlap == "auto" and border > BORDER_SHARE:
        return 0.0
    return max(0.0, 1 - border)


def _area(rect: Rect) -> int:
    return max(0, rect[1] - rect[0]) * max(0, rect[3] - rect[2])
