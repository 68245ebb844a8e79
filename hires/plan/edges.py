"""Decides which part of a value each rank of one stage sends to which rank of the next.

A value lies on the ranks of a stage in tiles, in shards, or complete on each of them. Whatever the
two sides, every target rank gets each number that it needs once, and the gradient takes the way
back.
"""

from __future__ import annotations

from typing import NamedTuple

from hires.plan.graph import Graph
from hires.plan.plan import Edge, Stage
from hires.plan.rules import SHARDED, TILED, WHOLE
from hires.plan.tiling import intersect, is_empty, own_rect, regrid_messages, split


class Box(NamedTuple):
    """A part of a value: some samples, and some pixels if it is an image."""

    n0: int
    n1: int
    r0: int = 0
    r1: int = 1
    c0: int = 0
    c1: int = 1


def held_by(graph: Graph, stage: Stage, value: str) -> list[Box]:
    """Returns the part of a value that each rank of a stage holds."""
    samples, *rest = graph.shape(value) or [1]
    layout = stage.layout[value]
    if layout == SHARDED:
        return [_box(split(samples, stage.shards, i), rest) for i in range(stage.shards)]
    if layout == WHOLE:
        return [_box((0, samples), rest)] * stage.num_ranks
    rects = [own_rect(rest[1:], stage.tiles, tile) for tile in range(stage.num_tiles)]
    return [Box(0, samples, *rect) for rect in rects]


def edge_of(graph: Graph, value: str, source: Stage, target: Stage, back: bool) -> Edge:
    """Returns the messages that bring one value from a stage to another.

    Args:
        graph: the network.
        value: what travels.
        source: the stage that makes it.
        target: a later stage that reads it.
        back: whether its gradient travels too.
    """
    layouts = source.layout[value], target.layout[value]
    if layouts == (TILED, TILED):
        samples = graph.shape(value)[0]
        found = regrid_messages(graph.shape(value)[2:], source.tiles, target.tiles)
        messages = [[s, t, 0, samples, *rect] for s, t, *rect in found]
        return Edge(value, source.index, target.index, False, messages, messages if back else [])
    held, wanted = held_by(graph, source, value), held_by(graph, target, value)
    messages = _pieces(held, wanted, layouts[0])
    # A value that is made from parameters gets from each shard a part of its gradient; if its own
    # ranks are shards too, they add their parts up with those of the parameters.
    parts = layouts[1] == WHOLE and target.shards > 1 and source.shards == 1
    returns = _pieces(wanted, held, "parts" if parts else layouts[1])
    returned = [[s, t, *box] for t, s, *box in returns]
    whole = TILED not in layouts
    return Edge(value, source.index, target.index, whole, messages, returned if back else [])


def _pieces(held: list[Box], wanted: list[Box], layout: str) -> list[list[int]]:
    """Returns [holder, receiver, *box] so that every receiver gets all of what it wants.

    If every holder has the complete value they take turns, else each sends what it has.
    """
    found = []
    for receiver, want in enumerate(wanted):
        holders = [receiver % len(held)] if layout == WHOLE else range(len(held))
        for holder in holders:
            box = _common(held[holder], want)
            if box is not None:
                found.append([holder, receiver, *box])
    return found


def _common(a: Box, b: Box) -> Box | None:
    """Returns what two boxes share, or None."""
    n0, n1 = max(a.n0, b.n0), min(a.n1, b.n1)
    rect = intersect(a[2:], b[2:])
    return None if n0 >= n1 or is_empty(rect) else Box(n0, n1, *rect)


def _box(samples: tuple[int, int], rest: list[int]) -> Box:
    """Returns the box of some samples and all pixels, if there are any."""
    if len(rest) != 3:
        return Box(*samples)
    return Box(*samples, 0, rest[1], 0, rest[2])
