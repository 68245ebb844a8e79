"""What does a rank do in a step, communication and computation in one list?

The communication is what ``hires.plan.program.events`` yields, in its order. The computation of a
pass is put between its events by the node that each belongs to.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

from hires.core.timeline import BACKWARD, COLLECTIVE, FORWARD, GRADIENTS, HALO, OPTIMISER, WAIT
from hires.plan.costs import Costs, Step, steps_of
from hires.plan.graph import Rect
from hires.plan.halos import extents_of
from hires.plan.plan import CommOp, Plan, Slot
from hires.plan.program import Event, edge_messages, events, halo_messages, inside

AUTO_BORDER = 1 / 32
"""``parallel.halo.overlap=auto`` computes the border apart up to this part of a tile."""


class Item(NamedTuple):
    """One thing that a rank does."""

    kind: str
    """As in ``hires.core.timeline``."""
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
    much of it as needs no borrowed pixels.
    """
    slot = plan.slot_of(rank, plan.direction_of(action))
    stage, back = plan.stages[slot.stage], action[0] == "B"
    kind = BACKWARD if back else FORWARD
    left = list(inside(plan, stage, back))
    items: list[Item] = []

    def compute(step_s: float) -> None:
        """Adds computation to the piece before, if there is one."""
        if items and items[-1].event is None:
            step_s += items.pop().seconds
        items.append(Item(kind, action, None, step_s))

    for step, step_s in zip(steps_of(plan, stage, back), seconds, strict=True):
        ops = _ops_of(step, left)
        shares = [_hidden_share(plan, slot, op) if op.kind == "halo" else 0.0 for op in ops]
        hidden_s = step_s * min(shares, default=0.0)
        ahead = [op for op in ops if op.kind == "halo" and not step.back]
        if not ahead:
            compute(step_s - hidden_s)
        for op in ops:
            posts, waits = _events_of(stream, plan, rank, slot, op, step.back)
            items += [Item(HALO, action, event) for event in posts]
            if hidden_s:
                compute(hidden_s)
                step_s, hidden_s = step_s - hidden_s, 0.0
            kind_of_wait = HALO if op.kind == "halo" else COLLECTIVE
            items += [Item(kind_of_wait, action, event) for event in waits]
            if op in ahead and op is ahead[-1]:
                compute(step_s)
    assert not left, f"{left[0][0].node} is not among the steps of {action}"
    return items


def _ops_of(step: Step, left: list[tuple[CommOp, bool]]) -> list[CommOp]:
    """Takes the communication of a step from what is left of its pass."""
    found = []
    while left and left[0][0].node == step.node.name and left[0][1] == step.back:
        found.append(left.pop(0)[0])
    return found


def _events_of(
    stream: Iterator[Event], plan: Plan, rank: int, slot: Slot, op: CommOp, back: bool
) -> tuple[list[Event], list[Event]]:
    """Takes the events of one operation; returns what is posted and what is waited for."""
    if op.kind != "halo":
        return [], [*itertools.islice(stream, 1)]
    sends, receives = halo_messages(plan, rank, slot.direction, op, back)
    count = len(sends) + len(receives)
    return [*itertools.islice(stream, count)], [*itertools.islice(stream, count)]


def _hidden_share(plan: Plan, slot: Slot, op: CommOp) -> float:
    """Returns the share of a node that is computed while its halo travels.

    Only convolutions are divided so. Outputs near the border need borrowed pixels: as many of them
    as pixels are borrowed.
    """
    if plan.halo_overlap == "off" or plan.graph.by_name[op.node].kind != "conv2d":
        return 0.0
    held = extents_of(plan.graph, plan.stages[slot.stage], op.value)
    own = _area(held[slot.tile])
    borrowed = sum(_area((m[2], m[3], m[4], m[5])) for m in op.messages if m[1] == slot.tile)
    border = borrowed / own if own else 1.0
    if plan.halo_overlap == "auto" and border > AUTO_BORDER:
        return 0.0
    return max(0.0, 1 - border)


def _area(rect: Rect) -> int:
    """Returns how many pixels a rectangle holds."""
    return max(0, rect[1] - rect[0]) * max(0, rect[3] - rect[2])
