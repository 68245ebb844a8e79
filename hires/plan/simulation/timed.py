"""What does a rank do in a step, communication and computation in one list?

The communication is what ``hires.plan.program.events`` yields, in its order. The computation of a
pass is put between its events by the node that each belongs to.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator
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
from hires.plan.graph import Rect
from hires.plan.halos import BORDER_SHARE, extents_of
from hires.plan.operators.operator_facts import facts_of
from hires.plan.plan import CommOp, Plan, Slot
from hires.plan.program import Event, Exchange, edge_messages, events, exchanges
from hires.plan.simulation.costs import Costs, Step, steps_of


class Item(NamedTuple):
    """One thing that a rank does."""

    kind: str
    """As in ``hires.core.ranks.timeline``."""
    action: str
    """That it belongs to; empty at the end of the step."""
    event: Event | None = None
    """Communication; None: it computes."""
    seconds: float = 0.0


def timed_program(plan: Plan, rank: int, costs: Costs) -> list[Item]:
    """Returns everything that a rank of the first replica does in one step, in order."""
    stream = events(plan, rank)
    actions = plan.actions_of(rank)
    items = [*_taken(stream, WAIT, actions[:1], plan, rank)]
    for index, action in enumerate(actions):
        items += _taken(stream, WAIT, actions[index + 1 : index + 2], plan, rank)
        items += _taken(stream, WAIT, [action], plan, rank)
        items += _pass(stream, plan, rank, action, costs.steps_s(rank, action))
        sends = len(edge_messages(plan, rank, action, outgoing=True))
        items += [Item(WAIT, action, event) for event in itertools.islice(stream, sends)]
    for event in stream:
        items.append(Item(GRADIENTS if event.kind == "collective" else WAIT, "", event))
    items.append(Item(OPTIMISER, "", None, costs.optimiser_s(rank)))
    return items


def _taken(
    stream: Iterator[Event], kind: str, actions: list[str], plan: Plan, rank: int
) -> Iterator[Item]:
    """Yields the next events: one for each message that some actions receive."""
    for action in actions:
        count = len(edge_messages(plan, rank, action, outgoing=False))
        yield from (Item(kind, action, event) for event in itertools.islice(stream, count))


def _pass(
    stream: Iterator[Event], plan: Plan, rank: int, action: str, seconds: list[float]
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
    left = deque(exchanges(plan, rank, action))
    items: list[Item] = []

    def compute(step_s: float) -> None:
        """Adds computation to the piece before, if there is one."""
        if items and items[-1].event is None:
            step_s += items.pop().seconds
        items.append(Item(kind, action, None, step_s))

    for step, step_s in zip(steps_of(plan, stage, back), seconds, strict=True):
        here = _exchanges_of(step, left)
        shares = [_hidden_share(plan, slot, exchange.op) for exchange in here]
        hidden_s = step_s * min(shares, default=0.0)
        ahead = [e.op for e in here if e.op.kind == "halo" and not step.back]
        if not ahead:
            compute(step_s - hidden_s)
        for op, _, posts, waits in here:
            items += [Item(HALO, action, event) for event in itertools.islice(stream, len(posts))]
            if hidden_s:
                compute(hidden_s)
                step_s, hidden_s = step_s - hidden_s, 0.0
            kind_of_wait = HALO if op.kind == "halo" else COLLECTIVE
            awaited = itertools.islice(stream, len(waits))
            items += [Item(kind_of_wait, action, event) for event in awaited]
            if ahead and op is ahead[-1]:
                compute(step_s)
    assert not left, f"{left[0].op.node} is not among the steps of {action}"
    return items


def _exchanges_of(step: Step, left: deque[Exchange]) -> list[Exchange]:
    """Takes the communication of a step from what is left of its pass."""
    found = []
    while left and left[0].op.node == step.node.name and left[0].back == step.back:
        found.append(left.popleft())
    return found


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
    """Returns how many pixels a rectangle holds."""
    return max(0, rect[1] - rect[0]) * max(0, rect[3] - rect[2])
