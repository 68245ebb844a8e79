"""Lists the messages of a rank: values between stages, and halos between the tiles of one."""

from __future__ import annotations

import math

from hires.core.ranks.mailbox_limits import mail_bytes
from hires.plan.event import BYTES, Event, Part
from hires.plan.plan import CommOp, Plan

Peers = list[tuple[int, list[int], tuple[int, ...]]]
"""(tile at the other side, box, shape)."""
Links = dict[tuple[int, bool], dict[int, list[tuple[int, int, Peers]]]]
"""(stage, whether outgoing) -> tile -> (edge, other stage, peers)."""


def edge_messages(plan: Plan, rank: int, action: str, outgoing: bool, call: int = 0) -> list[Event]:
    """Returns what a rank receives before, or sends after, an action, in order of posting."""
    direction, back = plan.direction_of(action), action[0] == "B"
    replica, _, stage, tile = plan.slot_of(rank, direction)
    kind, made = "send" if outgoing else "recv", []
    # A gradient leaves the stage that read the value and comes to the stage that made it.
    for index, other, peers in _links(plan, back)[stage, outgoing].get(tile, ()):
        value = plan.edges[index].value
        part = Part(action, "", value, back, index)
        what = f"{'the gradient of ' if back else ''}{value} in {action}"
        tag = (2 * index + back) * plan.total_microbatches + int(action[1:])
        for there, box, shape in peers:
            peer = plan.rank_of(replica, direction, other, there)
            made.append(
                Event(kind, peer, tag, shape, plan.dtype, what, direction, False, call, part, box)
            )
    return made


def halo_messages(
    plan: Plan,
    rank: int,
    direction: int,
    op: CommOp,
    back: bool,
    *,
    action: str = "",
    node: str = "",
    call: int = 0,
) -> tuple[list[Event], list[Event]]:
    """Returns what a rank sends and receives in one exchange of pixels, in order of posting.

    Args:
        plan: the plan.
        rank: of the world.
        direction: of the slot.
        op: the exchange.
        back: whether the gradients take the way back.
        action: the pass.
        node: the node at which the messages are posted, if not the exchange's own.
        call: number of the group call.
    """
    replica, _, stage, tile = plan.slot_of(rank, direction)
    base, index = _first_tag(plan, stage), op_index(plan, stage, op)
    # Halos of all microbatches have one tag; messages of one tag between two ranks keep order.
    tag = base + 2 * (2 * index + direction) + back
    part = Part(action, node or op.node, op.value, back, index)
    what = f"the {'gradient of the ' if back else ''}halo of {op.node}"
    what, lane = f"{what} in {action}" if action else what, plan.num_directions + direction
    most = mail_bytes(plan.stages[stage].num_ranks) // BYTES[plan.dtype]
    sends: list[Event] = []
    receives: list[Event] = []
    for other, row, shape in _halo_rows(plan, op).get(tile, ()):
        sending = (row[0] == tile) != back
        kind, mail = "send" if sending else "recv", math.prod(shape) <= most
        peer = plan.rank_of(replica, direction, stage, other)
        event = Event(kind, peer, tag, shape, plan.dtype, what, lane, mail, call, part, row)
        (sends if sending else receives).append(event)
    return sends, receives


def op_index(plan: Plan, stage: int, op: CommOp) -> int:
    """Returns the position of an operation in the ``comm`` of its stage, by its identity."""

    def make() -> dict[int, int]:
        return {id(other): index for index, other in enumerate(plan.stages[stage].comm)}

    return plan.remember(("indices", stage), make)[id(op)]


def _halo_rows(plan: Plan, op: CommOp) -> dict[int, Peers]:
    """Returns by tile the rows of an exchange that concern it; all microbatches share them."""

    def make() -> dict[int, Peers]:
        n, channels, *_ = plan.graph.shape(op.value)
        found: dict[int, Peers] = {}
        for row in op.messages:
            source, target, r0, r1, c0, c1 = row
            shape = (n, channels, r1 - r0, c1 - c0)
            found.setdefault(source, []).append((target, row, shape))
            found.setdefault(target, []).append((source, row, shape))
        return found

    return plan.remember(("rows", id(op)), make)


def _first_tag(plan: Plan, stage: int) -> int:
    """Returns the first tag of a stage's exchanges; each has four: two directions, two ways."""

    def make() -> int:
        before = sum(len(other.comm) for other in plan.stages[:stage])
        return 2 * len(plan.edges) * plan.total_microbatches + 4 * before

    return plan.remember(("tags", stage), make)


def _links(plan: Plan, back: bool) -> Links:
    """Returns who is connected to whom, forward or backward; all microbatches share it."""

    def make() -> Links:
        found: Links = {(s.index, out): {} for s in plan.stages for out in (False, True)}
        for index, edge in enumerate(plan.edges):
            makes: dict[int, Peers] = {}
            reads: dict[int, Peers] = {}
            shape = plan.graph.shape(edge.value)
            for source, target, *row in edge.back if back else edge.messages:
                n0, n1, r0, r1, c0, c1 = row
                # A number, made from a parameter, has no samples.
                sizes = [n1 - n0, *shape[1:]] if shape else []
                if not edge.whole:
                    sizes = [n1 - n0, shape[1], r1 - r0, c1 - c0]
                box = row[:2] if edge.whole else row
                makes.setdefault(source, []).append((target, box, tuple(sizes)))
                reads.setdefault(target, []).append((source, box, tuple(sizes)))
            for tile, peers in makes.items():
                place = found[edge.source, not back].setdefault(tile, [])
                place.append((index, edge.target, peers))
            for tile, peers in reads.items():
                place = found[edge.target, back].setdefault(tile, [])
                place.append((index, edge.source, peers))
        return found

    return plan.remember(("links", back), make)
