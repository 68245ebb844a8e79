"""Writes the program of a rank: everything that it does in one step, in order.

``hires.parallel.executor`` executes this list and ``hires.plan.prove`` proves it, so the order of a
step stands here and nowhere else. One step of two microbatches on the first of two stages:

    barrier  begin                        all ranks agree to go on; gradients are forgotten
    read F0  forward F0 [send] end F0     in the brackets halos and statistics, then the sends
    recv B0  read F1  forward F1 [send] end F1
    recv B1  wait_recv B0  backward B0 [] end B0
    wait_recv B1  backward B1 [issue large gradients] end B1
    wait_sends  collective (other gradients)  wait_issued
    statistics  [agree]  [grad_norm]  optimise  [publish]

With a loss scale (fp16) all ranks agree whether a gradient of any of them is not finite; where
gradients are clipped, their norm is a sum of all ranks. Where the
update is divided, parameters follow from their owners (:mod:`hires.plan.updates`).
Receives are posted one action ahead of the one that needs them.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from hires.plan.event import BARRIER, NOWHERE, WORLD, Event, Part
from hires.plan.factors import map_shape
from hires.plan.graph import INPUT, Node
from hires.plan.groups import (
    AGREEMENT,
    NORM,
    gradient_group,
    held_stages,
    sent_as,
    tile_group,
    wide_dtype,
)
from hires.plan.message_routes import channel_of, group_route, send_route
from hires.plan.plan import Box, CommOp, Edge, Plan, Stage, derived
from hires.plan.rules import dims_of
from hires.plan.updates import PUBLISH, at_once, lane_of, publications, sums_of


class Peer(NamedTuple):
    """The other side of a message."""

    tile: int
    box: Box
    shape: tuple[int, ...]
    is_source: bool = False
    """Of a halo: whether it sends on the way forward."""


class StageLink(NamedTuple):
    """What a tile sends, or receives, of one value that crosses stages."""

    edge: int
    stage: int
    """At the other side."""
    peers: list[Peer]


def events(plan: Plan, rank: int) -> Iterator[Event]:
    """Yields everything that a rank does in one step; receives are posted one action ahead."""
    yield from begin_events(plan)
    yield from pass_events(plan, rank)
    yield from update_events(plan, held_stages(plan, rank))


def begin_events(plan: Plan) -> Iterator[Event]:
    """Yields what a rank does before its first pass."""
    yield _of_world(plan, BARRIER, "the agreement to begin the step")
    if plan.training:
        yield _alone("begin", "the step")


def pass_events(plan: Plan, rank: int) -> Iterator[Event]:
    """Yields the passes of a rank, with their messages."""
    actions = plan.actions_of(rank)
    calls = itertools.count(1)
    for action in actions[:1]:
        yield from edge_messages(plan, rank, action, outgoing=False, call=next(calls))
    for action, later in itertools.zip_longest(actions, actions[1:], fillvalue=""):
        if later:
            yield from edge_messages(plan, rank, later, outgoing=False, call=next(calls))
        for post in edge_messages(plan, rank, action, outgoing=False):
            yield _wait_for(post)
        stage = plan.slot_of(rank, plan.direction_of(action)).stage
        compares = plan.training and stage == len(plan.stages) - 1
        if action[0] == "F" and (
            compares or any(INPUT in node.inputs for node in plan.nodes(stage))
        ):
            yield _alone("read", f"the microbatch of {action}", action)
        yield _alone("backward" if action[0] == "B" else "forward", f"pass {action}", action)
        yield from _inside(plan, rank, action, calls, is_last=not later)
        yield from edge_messages(plan, rank, action, outgoing=True, call=next(calls))
        yield _alone("end", f"the end of {action}", action)
    yield _alone("wait_sends", "its sends")


def update_events(plan: Plan, stages: Sequence[int]) -> Iterator[Event]:
    """Yields what follows the passes of those that hold some stages."""
    if plan.training:
        for stage in stages:
            yield from _gradient_events(plan, stage)
        yield _alone("statistics", "the running statistics")
        if plan.scales_loss:
            yield _of_world(plan, "agree", "the agreement that all gradients are finite")
        if plan.clips_gradients:
            yield _of_world(plan, "grad_norm", "the norm of all gradients", NORM)
        yield _alone("optimise", "the parameters")
        for stage in stages:
            yield from _publish_events(plan, stage)


def _alone(kind: str, what: str, action: str = "") -> Event:
    return Event(kind, -1, 0, what=what, part=Part(action))


def _of_world(plan: Plan, kind: str, what: str, dtype: str = AGREEMENT) -> Event:
    return _joint(plan, kind, ("all_reduce", kind), WORLD, (1, dtype), what)


def _wait_for(post: Event) -> Event:
    _, peer, tag, _, _, what, lane, _, part, _, channel, route, *_ = post
    return Event(f"wait_{post.kind}", peer, tag, (), "", what, lane, 0, part, None, channel, route)


class Step(NamedTuple):
    """A node, forward or backward, and the communication between ranks of the stage at it."""

    node: Node
    back: bool
    comm: list[CommOp]


@derived
def steps_of(plan: Plan, stage: Stage, back: bool) -> list[Step]:
    """Returns what a pass of a stage computes, in order; segments run again before the way back."""
    ops: dict[str, list[CommOp]] = {}
    returns: dict[str, list[CommOp]] = {}
    for op in stage.comm:
        ops.setdefault(op.node, []).append(op)
        # The way back comes to the last of joint norms first, and then goes through all of them.
        begin = op.readers[-1] if op.kind == "norm" and op.readers else op.node
        returns.setdefault(begin, []).append(op)
    left_out = ("share", "crop", "loss") if back else ("share", "crop")
    nodes = plan.graph.nodes

    def forward(part: list[Node]) -> list[Step]:
        at = ((node, ops.get(node.name, [])) for node in part)
        return [Step(n, False, [op for op in own if op.kind not in left_out]) for n, own in at]

    if not back:
        return forward(nodes[stage.first : stage.last])
    steps: list[Step] = []
    for first, last in reversed([*itertools.pairwise(stage.segments or [stage.first, stage.last])]):
        steps += forward(nodes[first:last]) if stage.segments else []
        for node in reversed(nodes[first:last]):
            if node.needs_grad:
                own = [op for op in reversed(returns.get(node.name, [])) if op.back]
                steps.append(Step(node, True, own))
    return steps


def _inside(
    plan: Plan, rank: int, action: str, calls: Iterator[int], is_last: bool
) -> Iterator[Event]:
    """Yields what a rank exchanges while it computes an action.

    The last backward pass completes the gradients, so the sums that are early are issued in it:

        backward   conv9 [halo]  conv8 [halo]  conv7 ...
        issue                  conv9         conv8         as soon as the pass is behind the node

    Where their number is bounded, a rank waits for those before in the same place.
    """
    direction, back_pass = plan.direction_of(action), action[0] == "B"
    stage = plan.stages[plan.slot_of(rank, direction).stage]
    wide = wide_dtype(plan.dtype)
    sums = deque(_gradient_events(plan, stage.index, action) if is_last and back_pass else ())
    done: set[str] = set()  # nodes whose gradients are complete
    for step in steps_of(plan, stage, back_pass):
        while step.comm and sums and sums[0].part.node in done:
            yield sums.popleft()
        for op in step.comm:
            if not op.moves_pixels:
                again = " again" if back_pass and not step.back else ""
                what = f"{op.kind} of {op.node}{again} in {action}"
                part = Part(action, op.node, op.value, step.back, _numbers(plan, stage)[op])
                group = tile_group(plan, rank, direction)
                facts = (op.operation, op.kind), group, (op.elements, wide)
                yield _joint(plan, "collective", *facts, what, 0, part)
                continue
            place = rank, direction, action, next(calls)
            sends, receives = halo_messages(plan, *place, op, step.back)
            yield from (*receives, *sends)
            for post in (*receives, *sends):
                yield _wait_for(post)
        if step.back:
            done.add(step.node.name)
    yield from sums


def _gradient_events(plan: Plan, stage: int, action: str = "") -> Iterator[Event]:
    """Yields the sums of a stage's gradients, the last layer's first, in the order of the plan.

    ``action``: those that begin in its pass; without one, what follows all passes.
    """
    sums, most = sums_of(plan, stage), at_once(plan)
    alone = [index for index, one in enumerate(sums) if one.alone]

    def sum_event(kind: str, index: int, node: str = "") -> Event:
        one = sums[index]
        count = f", part {index + 1} of {len(sums)}" if len(sums) > 1 else ""
        what = f"gradients of stage {stage}{count}"
        part = Part(action, node, "", bool(node), index)
        group = gradient_group(plan, stage, lane_of(plan, index) if one.alone else 0)
        name, numbers = one.operation if one.scatters else kind, (one.elements, one.dtype)
        is_bucket = not one.alone and not one.scatters
        call = one.operation, "gradient"
        event = _joint(plan, name, call, group, numbers, what, index, part, is_bucket, one.codec)
        return event._replace(operation="", traffic="") if kind == "wait_issued" else event

    for index in alone:
        if bool(node := sums[index].node) != bool(action):
            continue
        if most and index % most == 0:  # a window is full: all of it ends before the next begins
            yield from (sum_event("wait_issued", i, node) for i in range(index)[-most:])
        yield sum_event("issue", index, node)
    if action:
        return
    yield from (sum_event("collective", index) for index in range(len(alone), len(sums)))
    last = (len(alone) - 1) // most * most if most else 0
    yield from (sum_event("wait_issued", index) for index in alone[max(0, last) :])


def _publish_events(plan: Plan, stage: int) -> Iterator[Event]:
    group = gradient_group(plan, stage)
    for number, one in enumerate(publications(plan, stage)):
        what = f"parameters of stage {stage}"
        what += f" from rank {one.owner}" if one.kind == PUBLISH else ""
        operation = "broadcast" if one.kind == PUBLISH else one.kind
        call, numbers = (operation, "parameter"), (one.elements, one.dtype)
        place = number, Part(number=number)
        yield _joint(plan, one.kind, call, group, numbers, what, *place, codec=one.codec)


def _joint(
    plan: Plan,
    kind: str,
    call: tuple[str, str],
    group: int,
    numbers: tuple[int, str],
    what: str,
    tag: int = 0,
    part: Part = NOWHERE,
    is_bucket: bool = False,
    codec: str = "",
) -> Event:
    """Returns an event of a group.

    ``call``: operation and traffic; ``numbers``: how many of which type; ``is_bucket``: they are
    of several tensors.
    """
    (operation, traffic), (elements, dtype) = call, numbers
    facts = Event(kind, group, tag, (elements,), dtype, what, part=part)
    route = group_route(plan, operation, group, dtype, elements, is_bucket, codec)
    return facts._replace(route=route, operation=operation, traffic=traffic, codec=codec)


def edge_messages(plan: Plan, rank: int, action: str, outgoing: bool, call: int = 0) -> list[Event]:
    """Returns what a rank receives before, or sends after, an action, in order of posting."""
    direction, back = plan.direction_of(action), action[0] == "B"
    replica, _, stage, tile = plan.slot_of(rank, direction)
    kind, posts = "send" if outgoing else "recv", []
    # A gradient leaves the stage that read the value and comes to the stage that made it.
    for index, there, peers in links(plan, back)[stage, outgoing].get(tile, ()):
        value, traffic = plan.edges[index].value, edge_kind(plan, plan.edges[index])
        part = Part(action, "", value, back, index)
        what = f"{'the gradient of ' if back else ''}{value} in {action}"
        tag = (2 * index + back) * plan.total_microbatches + int(action[1:])
        way = (stage, there) if outgoing else (there, stage)
        channel = channel_of(plan, replica, (direction, *way))
        (dtype, codec), lane = sent_as(plan, value, traffic), direction
        for one in peers:
            peer = plan.rank_of(replica, direction, there, one.tile)
            route = send_route(plan, rank, peer, dtype, math.prod(one.shape), codec)
            facts, shape, box = (channel, route, kind, traffic, codec), one.shape, one.box
            posts.append(Event(kind, peer, tag, shape, dtype, what, lane, call, part, box, *facts))
    return posts


def edge_kind(plan: Plan, edge: Edge) -> str:
    """Returns what the messages of an edge are counted as."""
    counts = {plan.stages[index].num_ranks for index in (edge.source, edge.target)}
    return "stage" if len(counts) == 1 else "join"


def halo_messages(
    plan: Plan,
    rank: int,
    direction: int,
    action: str,
    call: int,
    op: CommOp,
    back: bool,
) -> tuple[list[Event], list[Event]]:
    """Returns what a rank sends and receives in one exchange of pixels, in order of posting.

    ``action`` and ``call`` are those of its events. ``back``: gradients take the way back.
    """
    replica, _, stage, tile = plan.slot_of(rank, direction)
    index = _numbers(plan, plan.stages[stage])[op]
    before = sum(len(one.comm) for one in plan.stages[:stage])
    # Behind the tags of the edges each exchange has four: two directions, two ways. Microbatches
    # share them; messages of one tag between two ranks keep order.
    tag = 2 * len(plan.edges) * plan.total_microbatches
    tag += 2 * (2 * (before + index) + direction) + back
    part = Part(action, op.node, op.value, back, index)
    what = f"the {'gradient of the ' if back else ''}{op.kind} of {op.node} in {action}"
    lane = plan.num_directions + direction
    dtype, codec = sent_as(plan, op.value, op.kind)
    channel = channel_of(plan, replica, (direction, stage, stage)) if op.messages else 0
    sends: list[Event] = []
    receives: list[Event] = []
    for one in halo_rows(plan, plan.stages[stage], op).get(tile, ()):
        sending = one.is_source == back
        peer = plan.rank_of(replica, direction, stage, one.tile)
        route = send_route(plan, rank, peer, dtype, math.prod(one.shape), codec)
        kind, posts = ("send", sends) if sending else ("recv", receives)
        facts, shape, box = (channel, route, kind, op.kind, codec), one.shape, one.box
        posts.append(Event(kind, peer, tag, shape, dtype, what, lane, call, part, box, *facts))
    return sends, receives


@derived
def _numbers(plan: Plan, stage: Stage) -> dict[CommOp, int]:
    return {op: index for index, op in enumerate(stage.comm)}


@derived
def halo_rows(plan: Plan, stage: Stage, op: CommOp) -> dict[int, list[Peer]]:
    """Returns by tile the messages of an exchange that concern it; all microbatches share them."""
    whole, by_tile = map_shape(dims_of(plan.graph, stage, op.value)), dict[int, list[Peer]]()
    for source, target, box in op.messages:
        shape = box.shape(whole)
        by_tile.setdefault(source, []).append(Peer(target, box, shape))
        by_tile.setdefault(target, []).append(Peer(source, box, shape, is_source=True))
    return by_tile


@derived
def links(plan: Plan, back: bool) -> dict[tuple[int, bool], dict[int, list[StageLink]]]:
    """Returns by (stage, whether outgoing), then by tile, what crosses in each microbatch."""
    found: dict[tuple[int, bool], dict[int, list[StageLink]]] = {
        (stage.index, outgoing): {} for stage in plan.stages for outgoing in (False, True)
    }
    for index, edge in enumerate(plan.edges):
        whole = edge.shape(plan.graph)
        at_source, at_target = dict[int, list[Peer]](), dict[int, list[Peer]]()
        for source, target, box in edge.back if back else edge.messages:
            shape = box.shape(whole)
            at_source.setdefault(source, []).append(Peer(target, box, shape))
            at_target.setdefault(target, []).append(Peer(source, box, shape))
        for stage, other, outgoing, ends in (
            (edge.source, edge.target, not back, at_source),
            (edge.target, edge.source, back, at_target),
        ):
            for tile, peers in ends.items():
                found[stage, outgoing].setdefault(tile, []).append(StageLink(index, other, peers))
    return found
