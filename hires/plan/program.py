"""What does one rank say to the others in one step, in order?

The engine executes and ``hires.plan.verify`` proves the same list: an action's sends are posted
when it has been computed, and a rank waits for its sends at the end of the step. Receives are
posted in one of two orders:

* ``ahead``: one action ahead of the one that needs them. This is what the engine does.
* ``joined``: together with the sends of the action before, as one group call: the usual order where
  all messages of two ranks share a stream. ``hires.plan.machine`` tells what it is worth.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from hires.plan.plan import CommOp, Edge, Plan

AHEAD, JOINED = "ahead", "joined"
"""When the receives of an action are posted."""

BYTES = {"float32": 4, "bfloat16": 2, "float64": 8, "float16": 2, "int64": 8, "bool": 1}


class Event(NamedTuple):
    """One communication of one rank."""

    kind: str
    """``send`` and ``recv`` (posted, not waited for), ``wait_send``, ``wait_recv``, ``wait_sends``
    (for all of them), ``collective``, ``create`` (of a group, by all its members)."""
    peer: int
    """The other rank; for a collective the index of its group."""
    tag: int
    shape: tuple[int, ...] = ()
    dtype: str = ""
    what: str = ""
    """In words, for findings; equal on both sides of a message and on all members of a group."""
    call: int = 0
    """Sends and receives next to each other with the same number, not 0, are one group call; only a
    stream-ordered backend sees a difference."""


@dataclass(frozen=True)
class Message:
    """One tensor from one rank to another."""

    peer: int
    tag: int
    value: str
    rect: tuple[int, int, int, int] | None
    """Pixels of the whole map; None for the complete value."""
    shape: tuple[int, ...]


def edge_messages(plan: Plan, rank: int, action: str, outgoing: bool) -> list[Message]:
    """Returns what a rank receives before, or sends after, an action, in order of posting."""
    replica, stage, tile = plan.slot_of(rank)
    back = action[0] == "B"
    found = []
    # A gradient leaves the stage that read the value and comes to the stage that made it.
    made_here = outgoing != back
    for index, edge in plan.edges_at[stage, made_here]:
        other = edge.target if made_here else edge.source
        here = 0 if made_here else 1
        for message in edge.of_tile.get((back, here, tile), ()):
            peer = plan.rank_of(replica, other, message[1 - here])
            tag = (2 * index + back) * plan.num_microbatches + int(action[1:])
            found.append(_message(plan, edge, peer, tag, message[2:]))
    return found


def halo_messages(
    plan: Plan, rank: int, op: CommOp, back: bool
) -> tuple[list[Message], list[Message]]:
    """Returns the pixels that a rank sends and receives at a node, in order of posting."""
    replica, stage, tile = plan.slot_of(rank)
    n, channels, *_ = plan.graph.shape(op.value)
    tag = _halo_tag(plan, stage, op, back)
    sends: list[Message] = []
    receives: list[Message] = []
    for source, target, r0, r1, c0, c1 in op.of_tile.get(tile, ()):
        peer = plan.rank_of(replica, stage, target if tile == source else source)
        shape = (n, channels, r1 - r0, c1 - c0)
        message = Message(peer, tag, op.value, (r0, r1, c0, c1), shape)
        (sends if (tile == source) != back else receives).append(message)
    return sends, receives


def groups(plan: Plan) -> list[list[int]]:
    """Returns the ranks of every group, in the order in which all ranks create them.

    First the tiles of each (replica, stage), then the gradient groups: all ranks of a stage.
    """
    made = []
    for replica in range(plan.num_replicas):
        for stage in plan.stages:
            made.append(_members(plan, stage.index, [replica]))
    for stage in plan.stages:
        made.append(_members(plan, stage.index, range(plan.num_replicas)))
    return made


def tile_group(plan: Plan, rank: int) -> int:
    """Returns the index of the group of the tiles of a rank's stage and replica."""
    replica, stage, _ = plan.slot_of(rank)
    return replica * len(plan.stages) + stage


def gradient_group(plan: Plan, rank: int) -> int:
    """Returns the index of the group of all ranks that hold a rank's stage."""
    return plan.num_replicas * len(plan.stages) + plan.slot_of(rank)[1]


def events(plan: Plan, rank: int, order: str = AHEAD) -> Iterator[Event]:
    """Yields everything that a rank communicates in one step, in order.

    Args:
        plan: the plan.
        rank: of the world.
        order: when receives are posted: ``AHEAD`` or ``JOINED``.
    """
    actions = plan.schedule[plan.slot_of(rank)[1]]
    calls = itertools.count(1)
    yield from _joined(_posts(plan, rank, actions[:1]), calls)
    for index, action in enumerate(actions):
        later = actions[index + 1 : index + 2]
        if order == AHEAD:
            yield from _joined(_posts(plan, rank, later), calls)
        for m in edge_messages(plan, rank, action, outgoing=False):
            yield Event("wait_recv", m.peer, m.tag, what=_said(m, action))
        yield from _inside(plan, rank, action, calls)
        posts = [
            Event("send", m.peer, m.tag, m.shape, plan.dtype, _said(m, action))
            for m in edge_messages(plan, rank, action, outgoing=True)
        ]
        if order == JOINED:
            posts += _posts(plan, rank, later)
        yield from _joined(posts, calls)
    yield Event("wait_sends", -1, 0, what="its sends")
    yield from _end_of_step(plan, rank)


def creation(members: list[list[int]], rank: int) -> Iterator[Event]:
    """Yields the groups that a rank creates before the first step, in order.

    Args:
        members: the ranks of each group, in the order in which this rank creates them.
        rank: of the world.
    """
    for index, ranks in enumerate(members):
        if rank in ranks and len(ranks) > 1:
            yield Event("create", index, 0, what=f"the creation of group {index}")


def _joined(posts: Iterable[Event], calls: Iterator[int]) -> Iterator[Event]:
    """Yields sends and receives as one group call."""
    number = next(calls)
    for event in posts:
        yield Event(*event[:-1], number)


def _posts(plan: Plan, rank: int, actions: list[str]) -> Iterator[Event]:
    """Yields the receives of an action."""
    for action in actions:
        for m in edge_messages(plan, rank, action, outgoing=False):
            yield Event("recv", m.peer, m.tag, m.shape, plan.dtype, _said(m, action))


def _inside(plan: Plan, rank: int, action: str, calls: Iterator[int]) -> Iterator[Event]:
    """Yields what a rank says to the other tiles while it computes an action."""
    stage = plan.stages[plan.slot_of(rank)[1]]
    back = action[0] == "B"
    for op in reversed(stage.comm) if back else stage.comm:
        if (back and not op.back) or (op.kind == "share" and not back):
            continue
        if op.kind == "halo":
            yield from _halo(plan, rank, op, action, calls)
        else:
            group = tile_group(plan, rank)
            what = f"{op.kind} of {op.node} in {action}"
            yield Event("collective", group, 0, (op.elements,), plan.dtype, what)


def _halo(plan: Plan, rank: int, op: CommOp, action: str, calls: Iterator[int]) -> Iterator[Event]:
    """Yields one exchange: all receives posted, all sends posted, then all waited for."""
    back = action[0] == "B"
    sends, receives = halo_messages(plan, rank, op, back)
    what = f"the {'gradient of the ' if back else ''}halo of {op.node} in {action}"
    posted = [("recv", m) for m in receives] + [("send", m) for m in sends]
    yield from _joined(
        [Event(kind, m.peer, m.tag, m.shape, plan.dtype, what) for kind, m in posted], calls
    )
    for m in receives:
        yield Event("wait_recv", m.peer, m.tag, what=what)
    for m in sends:
        yield Event("wait_send", m.peer, m.tag, what=what)


def _end_of_step(plan: Plan, rank: int) -> Iterator[Event]:
    """Yields the sum of gradients, with the replicas' running statistics, over all holders."""
    group = gradient_group(plan, rank)
    stage = plan.stages[plan.slot_of(rank)[1]]
    if plan.training and plan.num_replicas * stage.num_tiles > 1:
        wide = "float64" if plan.dtype == "float64" else "float32"
        yield Event("collective", group, 1, (stage.params,), wide, "gradients")


def _message(plan: Plan, edge: Edge, peer: int, tag: int, rect: list[int]) -> Message:
    """Returns a message of an edge."""
    shape = plan.graph.shape(edge.value)
    if edge.whole:
        return Message(peer, tag, edge.value, None, tuple(shape))
    r0, r1, c0, c1 = rect
    return Message(peer, tag, edge.value, (r0, r1, c0, c1), (*shape[:2], r1 - r0, c1 - c0))


def _halo_tag(plan: Plan, stage: int, op: CommOp, back: bool) -> int:
    """Returns the tag of an exchange; messages of one tag between two ranks stay in order."""
    base = 2 * len(plan.edges) * plan.num_microbatches
    return base + 2 * plan.stages[stage].comm_index[id(op)] + back


def _members(plan: Plan, stage: int, replicas: range | list[int]) -> list[int]:
    """Returns the ranks that hold a stage."""
    tiles = range(plan.stages[stage].num_tiles)
    return [plan.rank_of(replica, stage, tile) for replica in replicas for tile in tiles]


def _said(message: Message, action: str) -> str:
    """Returns what a message between stages is, in words."""
    return f"{'the gradient of ' if action[0] == 'B' else ''}{message.value} in {action}"
