"""Writes the program of a rank: everything that it does in one step, in order.

``hires.parallel.executor`` executes this list and ``hires.plan.proof`` proves it, so the order of a
step stands here and nowhere else. One step of two microbatches on the first of two stages:

    barrier  begin                        all ranks agree to go on; gradients are forgotten
    read F0  forward F0 [send] end F0     in the brackets halos and statistics, then the sends
    recv B0  read F1  forward F1 [send] end F1
    recv B1  wait_recv B0  backward B0 [] end B0
    wait_recv B1  backward B1 [issue large gradients] end B1
    wait_sends  collective (other gradients)  wait_issued  statistics  optimise

Receives are posted in one of two orders:

* ``ahead``: one action ahead of the one that needs them. The executor runs this one.
* ``joined``: together with the sends of the action before, as one group call: the usual order where
  all messages of two ranks share a stream. ``hires.plan.proof.machine`` weighs it.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections import deque
from collections.abc import Iterator

from hires.core.ranks.mailbox_limits import mail_bytes
from hires.plan.event import BYTES, Event, Part
from hires.plan.graph import INPUT
from hires.plan.groups import gradient_group, held_stages, sums_of, tile_group, wide_dtype
from hires.plan.halos import companions, name_of
from hires.plan.plan import CommOp, Plan, Stage

AHEAD, JOINED = "ahead", "joined"
"""When the receives of an action are posted."""


def events(plan: Plan, rank: int, order: str = AHEAD) -> Iterator[Event]:
    """Yields everything that a rank does in one step, in order.

    Args:
        plan: the plan.
        rank: of the world.
        order: when receives are posted: ``AHEAD`` or ``JOINED``.
    """
    actions = plan.actions_of(rank)
    calls = itertools.count(1)
    yield Event("barrier", -1, 0, what="the agreement to begin the step")
    if plan.training:
        yield Event("begin", -1, 0, what="the step")
    for action in actions[:1]:
        yield from edge_messages(plan, rank, action, outgoing=False, call=next(calls))
    for index, action in enumerate(actions):
        later = actions[index + 1] if index + 1 < len(actions) else ""
        if later and order == AHEAD:
            yield from edge_messages(plan, rank, later, outgoing=False, call=next(calls))
        for post in edge_messages(plan, rank, action, outgoing=False):
            yield _wait_for(post)
        yield from _begin_of_pass(plan, rank, action)
        yield from _inside(plan, rank, action, calls, is_last=not later)
        call = next(calls)
        yield from edge_messages(plan, rank, action, outgoing=True, call=call)
        if later and order == JOINED:
            yield from edge_messages(plan, rank, later, outgoing=False, call=call)
        yield Event("end", -1, 0, what=f"the end of {action}", part=Part(action))
    yield Event("wait_sends", -1, 0, what="its sends")
    if plan.training:
        yield from _end_of_step(plan, rank)


def pass_comm(plan: Plan, stage: Stage, back: bool) -> list[tuple[CommOp, bool]]:
    """Returns the communication between the ranks of a stage in a pass, in order.

    Returns:
        (operation, whether it is its way back). A backward pass of a stage with segments begins
        each of them with its forward operations once more.
    """

    def make() -> list[tuple[CommOp, bool]]:
        if not back:
            return [(op, False) for op in stage.comm if op.kind != "share"]
        bounds = stage.segments or [stage.first, stage.last]
        found: list[tuple[CommOp, bool]] = []
        for first, last in reversed([*itertools.pairwise(bounds)]):
            own = [op for op in stage.comm if first <= plan.graph.position[op.node] < last]
            if stage.segments:
                found += [(op, False) for op in own if op.kind not in ("share", "loss")]
            found += [(op, True) for op in reversed(own) if op.back]
        return found

    return plan.remember(("pass comm", stage.index, back), make)


def _wait_for(post: Event) -> Event:
    """Returns the wait for a send or receive."""
    kind, peer, tag, _, _, what, lane, mail, _, part, _ = post
    return Event(f"wait_{kind}", peer, tag, (), "", what, lane, mail, 0, part)


def _begin_of_pass(plan: Plan, rank: int, action: str) -> Iterator[Event]:
    """Yields the reading of a microbatch, where images or targets are needed, and the pass."""
    stage = plan.slot_of(rank, plan.direction_of(action)).stage
    part = Part(action)
    if action[0] == "F" and _reads(plan, stage):
        yield Event("read", -1, 0, what=f"the microbatch of {action}", part=part)
    kind = "backward" if action[0] == "B" else "forward"
    yield Event(kind, -1, 0, what=f"pass {action}", part=part)


def _reads(plan: Plan, stage: int) -> bool:
    """Whether the ranks of a stage need images or targets."""

    def make() -> bool:
        compares = plan.training and stage == len(plan.stages) - 1
        return compares or any(INPUT in node.inputs for node in plan.nodes(stage))

    return plan.remember(("reads", stage), make)


def _inside(
    plan: Plan, rank: int, action: str, calls: Iterator[int], is_last: bool
) -> Iterator[Event]:
    """Yields what a rank exchanges while it computes an action.

    The last backward pass completes the gradients, so the sums that are early are issued in it.
    """
    direction = plan.direction_of(action)
    stage = plan.stages[plan.slot_of(rank, direction).stage]
    with_next = plan.remember(("with", stage.index), lambda: companions(plan.graph, stage))
    posted: set[str] = set()
    early = _gradient_events(plan, stage.index, "issue", action) if is_last else ()
    sums = deque(event for event in early if event.part.node and action[0] == "B")
    for op, back in pass_comm(plan, stage, action[0] == "B"):
        if sums:
            done = _first_done(plan, stage, op, back)
            while sums and plan.graph.position[sums[0].part.node] >= done:
                yield sums.popleft()
        if op.kind == "halo":
            yield from _halo(plan, rank, op, back, action, with_next, posted, next(calls))
            continue
        again = " again" if action[0] == "B" and not back else ""
        what = f"{op.kind} of {op.node}{again} in {action}"
        part = Part(action, op.node, op.value, back, op_index(plan, stage.index, op))
        group = tile_group(plan, rank, direction)
        yield Event("collective", group, 0, (op.elements,), plan.dtype, what, part=part)
    yield from sums


def _halo(
    plan: Plan,
    rank: int,
    op: CommOp,
    back: bool,
    action: str,
    with_next: dict[str, CommOp],
    posted: set[str],
    call: int,
) -> Iterator[Event]:
    """Yields one exchange: receives and sends, which are posted together, then their waits.

    The pixels of the next exchange may set out with these (:func:`companions`); it is waited
    for at its own node. ``posted`` holds the exchanges that have set out so.
    """
    direction, name = plan.direction_of(action), name_of(op)
    sends, receives = halo_messages(plan, rank, direction, op, back, action=action, call=call)
    if name not in posted:
        yield from receives
        yield from sends
    later = None if back else with_next.get(name)
    if not back:
        posted.discard(name)
    if later is not None:
        others = halo_messages(
            plan, rank, direction, later, back, action=action, node=op.node, call=call
        )
        yield from others[1]
        yield from others[0]
        posted.add(name_of(later))
    for post in (*receives, *sends):
        yield _wait_for(post)


def _first_done(plan: Plan, stage: Stage, op: CommOp, back: bool) -> int:
    """Returns from which node on all gradients are complete when a pass comes to an operation.

    The backward pass has done the nodes behind it; if the operation belongs to a segment that is
    computed again, all nodes of the segments behind.
    """
    position = plan.graph.position[op.node]
    if back:
        return position + 1
    return stage.segments[bisect.bisect_right(stage.segments, position)]


def _gradient_events(plan: Plan, stage: int, kind: str, action: str = "") -> Iterator[Event]:
    """Yields the events of one kind for the sums of a stage's gradients, the last layer's first."""
    sums = sums_of(plan, stage)
    for index, one in enumerate(sums):
        if one.alone == (kind == "collective"):
            continue
        count = f", part {index + 1} of {len(sums)}" if len(sums) > 1 else ""
        what = f"gradients of stage {stage}{count}"
        early = bool(one.node) and kind == "issue"
        part = Part(action, one.node if early else "", "", early, index)
        group = gradient_group(plan, stage)
        yield Event(kind, group, index, (one.elements,), wide_dtype(plan), what, part=part)


def _end_of_step(plan: Plan, rank: int) -> Iterator[Event]:
    """Yields the sums of gradients that are not under way yet, and what follows them."""
    for stage in held_stages(plan, rank):
        yield from (e for e in _gradient_events(plan, stage, "issue") if not e.part.node)
        yield from _gradient_events(plan, stage, "collective")
        yield from _gradient_events(plan, stage, "wait_issued")
    yield Event("statistics", -1, 0, what="the running statistics")
    yield Event("optimise", -1, 0, what="the parameters")


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
