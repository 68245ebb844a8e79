"""What does one rank say to the others in one step, in order?

The engine executes and ``hires.plan.proof.prove`` proves the same list: an action's sends are
posted when it has been computed, and a rank waits for its sends at the end of the step. Receives
are posted in one of two orders:

* ``ahead``: one action ahead of the one that needs them. This is what the engine does.
* ``joined``: together with the sends of the action before, as one group call: the usual order where
  all messages of two ranks share a stream. ``hires.plan.proof.machine`` tells what it is worth.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from hires.core.ranks.mailbox_limits import mail_bytes
from hires.plan.groups import gradient_group, held_stages, num_holders, tile_group
from hires.plan.halos import companions, name_of
from hires.plan.plan import CommOp, Edge, Plan, Stage

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
    lane: int = 0
    """Which kind of message it is: of halos or between stages, in which direction. Messages of one
    kind from one rank to another are received in the order of sending."""
    mail: bool = False
    """Whether it goes through memory where its ranks share some: a halo that is not too large."""
    call: int = 0
    """Sends and receives next to each other with the same number, not 0, are one group call; only a
    stream-ordered backend sees a difference."""


class Exchange(NamedTuple):
    """What a rank says to the other tiles at one operation."""

    op: CommOp
    back: bool
    """Whether it is the operation's way back."""
    posts: list[Event]
    """Sends and receives; those of the next operation too if they set out with these, and then
    that one has none of its own."""
    waits: list[Event]
    """For this operation's messages alone; a collective is waited for where it is called."""


class Message(NamedTuple):
    """One tensor from one rank to another."""

    peer: int
    tag: int
    value: str
    rect: tuple[int, int, int, int] | None
    """Pixels of the whole map; None for all of them."""
    shape: tuple[int, ...]
    samples: tuple[int, int]
    """Of the microbatch."""


def edge_messages(plan: Plan, rank: int, action: str, outgoing: bool) -> list[Message]:
    """Returns what a rank receives before, or sends after, an action, in order of posting."""
    direction, back = plan.direction_of(action), action[0] == "B"
    replica, _, stage, tile = plan.slot_of(rank, direction)
    found = []
    # A gradient leaves the stage that read the value and comes to the stage that made it.
    for index, other, peers in links(plan, back)[stage, outgoing].get(tile, ()):
        edge = plan.edges[index]
        tag = (2 * index + back) * plan.total_microbatches + int(action[1:])
        for there, box in peers:
            peer = plan.rank_of(replica, direction, other, there)
            found.append(_message(plan, edge, peer, tag, box))
    return found


Links = dict[tuple[int, bool], dict[int, list[tuple[int, int, list[tuple[int, list[int]]]]]]]
"""(stage, whether outgoing) -> tile -> (edge, other stage, [(other tile, box)])."""


def links(plan: Plan, back: bool) -> Links:
    """Returns who is connected to whom, forward or backward."""
    return plan.remember(("links", back), lambda: _links(plan, back))


def halo_messages(
    plan: Plan, rank: int, direction: int, op: CommOp, back: bool
) -> tuple[list[Message], list[Message]]:
    """Returns the pixels that a rank sends and receives at a node, in order of posting."""
    replica, _, stage, tile = plan.slot_of(rank, direction)
    n, channels, *_ = plan.graph.shape(op.value)
    tag = _halo_tag(plan, stage, direction, op, back)
    sends: list[Message] = []
    receives: list[Message] = []
    for source, target, r0, r1, c0, c1 in op.of_tile.get(tile, ()):
        peer = plan.rank_of(replica, direction, stage, target if tile == source else source)
        shape = (n, channels, r1 - r0, c1 - c0)
        message = Message(peer, tag, op.value, (r0, r1, c0, c1), shape, (0, n))
        (sends if (tile == source) != back else receives).append(message)
    return sends, receives


def events(plan: Plan, rank: int, order: str = AHEAD) -> Iterator[Event]:
    """Yields everything that a rank communicates in one step, in order.

    Args:
        plan: the plan.
        rank: of the world.
        order: when receives are posted: ``AHEAD`` or ``JOINED``.
    """
    actions = plan.actions_of(rank)
    calls = itertools.count(1)
    yield from _joined(_posts(plan, rank, actions[:1]), calls)
    for index, action in enumerate(actions):
        later = actions[index + 1 : index + 2]
        if order == AHEAD:
            yield from _joined(_posts(plan, rank, later), calls)
        for m in edge_messages(plan, rank, action, outgoing=False):
            yield Event("wait_recv", m.peer, m.tag, what=_said(m, action), lane=_lane(plan, action))
        yield from _inside(plan, rank, action, calls)
        posts = [
            _post("send", m, plan, _said(m, action), _lane(plan, action))
            for m in edge_messages(plan, rank, action, outgoing=True)
        ]
        if order == JOINED:
            posts += _posts(plan, rank, later)
        yield from _joined(posts, calls)
    yield Event("wait_sends", -1, 0, what="its sends")
    yield from _end_of_step(plan, rank)


def _post(kind: str, message: Message, plan: Plan, what: str, lane: int) -> Event:
    """Returns the send or receive of a message."""
    return Event(kind, message.peer, message.tag, message.shape, plan.dtype, what, lane)


def _lane(plan: Plan, action: str) -> int:
    """Returns the lane of the messages between stages; those of halos come after them."""
    return plan.direction_of(action)


def _joined(posts: Iterable[Event], calls: Iterator[int]) -> Iterator[Event]:
    """Yields sends and receives as one group call."""
    number = next(calls)
    for event in posts:
        yield Event(*event[:-1], number)


def _posts(plan: Plan, rank: int, actions: list[str]) -> Iterator[Event]:
    """Yields the receives of an action."""
    for action in actions:
        for m in edge_messages(plan, rank, action, outgoing=False):
            yield _post("recv", m, plan, _said(m, action), _lane(plan, action))


def _inside(plan: Plan, rank: int, action: str, calls: Iterator[int]) -> Iterator[Event]:
    """Yields what a rank says to the other tiles while it computes an action."""
    for exchange in exchanges(plan, rank, action):
        if exchange.op.kind == "halo":
            yield from _joined(exchange.posts, calls)
        yield from exchange.waits


def exchanges(plan: Plan, rank: int, action: str) -> Iterator[Exchange]:
    """Yields what belongs to each operation of :func:`inside`, on one rank; ``call`` is 0."""
    direction = plan.direction_of(action)
    stage = plan.stages[plan.slot_of(rank, direction).stage]
    with_next = plan.remember(("with", stage.index), lambda: companions(plan.graph, stage))
    posted: set[str] = set()
    for op, back in inside(plan, stage, action[0] == "B"):
        if op.kind == "halo":
            posts, waits = _halo(plan, rank, op, back, action)
            if not back:
                posts = [] if name_of(op) in posted else posts
                posted.discard(name_of(op))
                later = with_next.get(name_of(op))
                if later is not None:
                    posts += _halo(plan, rank, later, back, action)[0]
                    posted.add(name_of(later))
            yield Exchange(op, back, posts, waits)
        else:
            group = tile_group(plan, rank, direction)
            again = " again" if action[0] == "B" and not back else ""
            what = f"{op.kind} of {op.node}{again} in {action}"
            event = Event("collective", group, 0, (op.elements,), plan.dtype, what)
            yield Exchange(op, back, [], [event])


def inside(plan: Plan, stage: Stage, back: bool) -> list[tuple[CommOp, bool]]:
    """Returns what the ranks of a stage say to each other in a pass, in order.

    Returns:
        (operation, whether it is its way back). A backward pass of a stage with segments begins
        each of them with its forward operations once more.
    """
    return plan.remember(("inside", stage.index, back), lambda: _inside_of(plan, stage, back))


def _inside_of(plan: Plan, stage: Stage, back: bool) -> list[tuple[CommOp, bool]]:
    """Returns the list of :func:`inside`."""
    ahead = [op for op in stage.comm if op.kind != "share"]
    if not back:
        return [(op, False) for op in ahead]
    bounds = stage.segments or [stage.first, stage.last]
    found: list[tuple[CommOp, bool]] = []
    for first, last in reversed([*itertools.pairwise(bounds)]):
        held = range(first, last)
        own = [op for op in stage.comm if plan.graph.position[op.node] in held]
        if stage.segments:
            found += [(op, False) for op in own if op.kind not in ("share", "loss")]
        found += [(op, True) for op in reversed(own) if op.back]
    return found


def _halo(
    plan: Plan, rank: int, op: CommOp, back: bool, action: str
) -> tuple[list[Event], list[Event]]:
    """Returns one exchange: its receives and sends, which are posted together, and its waits."""
    sends, receives = halo_messages(plan, rank, plan.direction_of(action), op, back)
    what = f"the {'gradient of the ' if back else ''}halo of {op.node} in {action}"
    lane = plan.num_directions + _lane(plan, action)
    stage = plan.stages[plan.slot_of(rank, plan.direction_of(action)).stage]
    most = mail_bytes(stage.num_ranks) // BYTES[plan.dtype]
    posts, waits = [], []
    for kind, messages in (("recv", receives), ("send", sends)):
        for m in messages:
            mail = math.prod(m.shape) <= most
            posts.append(Event(kind, m.peer, m.tag, m.shape, plan.dtype, what, lane, mail))
            waits.append(Event(f"wait_{kind}", m.peer, m.tag, (), "", what, lane, mail))
    return posts, waits


def _end_of_step(plan: Plan, rank: int) -> Iterator[Event]:
    """Yields the sums of gradients, with the running statistics, over all holders of a stage."""
    if not plan.training:
        return
    wide = "float64" if plan.dtype == "float64" else "float32"
    for stage in held_stages(plan, rank):
        group = gradient_group(plan, stage)
        if num_holders(plan, stage) > 1:
            shape = (plan.stages[stage].params,)
            yield Event("collective", group, 1, shape, wide, f"gradients of stage {stage}")


def _links(plan: Plan, back: bool) -> Links:
    """Returns the tables of :func:`links`."""
    found: Links = {(s.index, out): {} for s in plan.stages for out in (False, True)}
    for index, edge in enumerate(plan.edges):
        makes: dict[int, list[tuple[int, list[int]]]] = {}
        reads: dict[int, list[tuple[int, list[int]]]] = {}
        for source, target, *box in edge.back if back else edge.messages:
            makes.setdefault(source, []).append((target, box))
            reads.setdefault(target, []).append((source, box))
        for tile, peers in makes.items():
            found[edge.source, not back].setdefault(tile, []).append((index, edge.target, peers))
        for tile, peers in reads.items():
            found[edge.target, back].setdefault(tile, []).append((index, edge.source, peers))
    return found


def _message(plan: Plan, edge: Edge, peer: int, tag: int, box: list[int]) -> Message:
    """Returns a message of an edge."""
    shape = plan.graph.shape(edge.value)
    n0, n1, r0, r1, c0, c1 = box
    if edge.whole:
        sizes = (n1 - n0, *shape[1:]) if shape else ()
        return Message(peer, tag, edge.value, None, sizes, (n0, n1))
    sizes = (n1 - n0, shape[1], r1 - r0, c1 - c0)
    return Message(peer, tag, edge.value, (r0, r1, c0, c1), sizes, (n0, n1))


def _halo_tag(plan: Plan, stage: int, direction: int, op: CommOp, back: bool) -> int:
    """Returns the tag of an exchange; messages of one tag between two ranks stay in order."""
    base = 2 * len(plan.edges) * plan.total_microbatches
    return base + 2 * (2 * _halo_index(plan, stage)[id(op)] + direction) + back


def _halo_index(plan: Plan, stage: int) -> dict[int, int]:
    """Returns the position of each exchange of a stage, by its identity, in the whole plan."""

    def make() -> dict[int, int]:
        before = sum(len(other.comm) for other in plan.stages[:stage])
        return {id(op): before + index for index, op in enumerate(plan.stages[stage].comm)}

    return plan.remember(("halos", stage), make)


def _said(message: Message, action: str) -> str:
    """Returns what a message between stages is, in words."""
    return f"{'the gradient of ' if action[0] == 'B' else ''}{message.value} in {action}"
