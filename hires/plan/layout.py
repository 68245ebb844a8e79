"""Decides what travels within and between stages, from how every value lies on their ranks.

A value lies on the ranks of a stage in tiles, in shards, or complete on each of them, as
``hires.plan.conversions`` has decided. A complete value has a complete gradient on each rank, too,
unless they are shards: then each has the part that its samples cause. Across an edge every target
rank gets each number that it needs once, and the gradient takes the way back.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from hires.plan.factors import map_shape, unpack
from hires.plan.graph import INPUT, Graph, Node, reads_of
from hires.plan.halos import extents_of, halos_of, map_grid, ran_back, widened
from hires.plan.norm_levels import joined
from hires.plan.operators.operator_facts import gradient_inputs
from hires.plan.plan import Box, CommOp, Edge, Plan, Stage, Transfer, derived
from hires.plan.rules import TILED, WHOLE, Rule, dims_of, rule_in
from hires.plan.tiling import (
    area,
    intersect,
    is_empty,
    own_rects,
    pieces_between,
    pieces_of_map,
    split_all,
)


def connected(graph: Graph, stage: Stage, fuse: int = 1, joint: bool = False) -> Stage:
    """Returns a stage with what travels within it; ``joint``: neighbouring norms share messages."""
    nodes = graph.nodes[stage.first : stage.last]
    rules = {node.name: rule_in(stage, node, graph) for node in nodes}
    stage = widened(graph, stage, rules, fuse)
    comm = _stage_comm(graph, stage, rules)
    return dataclasses.replace(stage, comm=joined(graph, stage, comm) if joint else comm)


def edges_of(graph: Graph, stages: list[Stage], training: bool) -> list[Edge]:
    """Returns every value that one stage sends to another, in order of stage and value."""
    edges = []
    for target in stages:
        for value in reads_of(graph.nodes[target.first : target.last]):
            if value != INPUT:
                source = next(s for s in stages if s.first <= graph.position[value] < s.last)
                back = training and graph.needs_grad(value)
                edges.append(edge_of(graph, value, source, target, back))
    return edges


def edge_of(graph: Graph, value: str, source: Stage, target: Stage, back: bool) -> Edge:
    """Returns the messages that bring a value to a later stage, and its gradient back."""
    made, read = source.layout[value], target.layout[value]
    factors = source.factors.get(value) or target.factors.get(value) or []
    if made == read == TILED:
        samples, _, *size = map_shape(unpack(factors)) if factors else graph.shape(value)
        pieces = pieces_of_map(size, source.tiles, own_rects(size, target.tiles))
        messages = [Transfer(s, t, Box(0, samples, rect)) for s, t, rect in pieces]
        return Edge(value, source.index, target.index, messages, messages if back else [], factors)
    held, wanted = (held_by(graph, stage, value, factors) for stage in (source, target))
    if TILED not in (made, read):  # all pixels travel
        held, wanted = ([box._replace(rect=None) for box in boxes] for boxes in (held, wanted))
    messages = _pieces(held, wanted, made)
    # A value that is made from parameters gets from each shard a part of its gradient; if its own
    # ranks are shards too, they add their parts up with those of the parameters.
    parts = read == WHOLE and target.shards > 1 and source.shards == 1
    returns = _pieces(wanted, held, "parts" if parts else read) if back else []
    returned = [Transfer(source, target, box) for target, source, box in returns]
    return Edge(value, source.index, target.index, messages, returned, factors)


def held_by(
    graph: Graph, stage: Stage, value: str, factors: Sequence[Any] | None = None
) -> list[Box]:
    """Returns the part of a value that each rank of a stage holds.

    Samples and pixels are those of its map; where all hold the whole value, ``factors`` say which
    of its dims these are if it is no map (n, C, H, W).
    """
    factors = factors or stage.factors.get(value)
    samples, *rest = (map_shape(unpack(factors)) if factors else graph.shape(value)) or [1]
    layout = stage.layout[value]
    if layout == TILED:
        return [Box(0, samples, rect) for rect in own_rects(rest[1:], stage.tiles)]
    pixels = (0, rest[1], 0, rest[2]) if len(rest) == 3 else None
    if layout == WHOLE:
        return [Box(0, samples, pixels)] * stage.num_ranks
    return [Box(n0, n1, pixels) for n0, n1 in split_all(samples, stage.shards)]


@derived
def shares_of(plan: Plan, stage: Stage, value: str) -> list[float]:
    """Returns the share of a value's numbers that each rank of a stage computes or reads."""
    shape = plan.graph.shape(value)
    if not shape or not math.prod(shape):
        return [1.0] * stage.num_ranks
    if stage.layout[value] == TILED:
        pixels = math.prod(map_shape(dims_of(plan.graph, stage, value))[2:])
        rects = extents_of(plan.graph, stage, value)  # more than they own where halos are fused
        return [area(rect) / pixels for rect in rects]
    return [(box.n1 - box.n0) / shape[0] for box in held_by(plan.graph, stage, value)]


def _stage_comm(graph: Graph, stage: Stage, rules: dict[str, Rule]) -> list[CommOp]:
    """Returns what the ranks of a stage exchange in a forward pass, in order.

    A node's collectives stand around its halos:

        share    whole operand: nothing forward, the sum of its gradient on the way back
        halos    pixels of the inputs
        norm     statistics, and as many sums on the way back; or reduce, a sum over the image

    A gather has its messages forward, a crop on the way back only (:func:`_conversion`).
    """
    if stage.num_ranks == 1:
        return []
    backward = ran_back(graph, stage)
    halos = halos_of(graph, stage, rules, backward) if stage.num_tiles > 1 else {}
    ops: list[CommOp] = []
    for node in graph.nodes[stage.first : stage.last]:
        rule, back = rules[node.name], node.name in backward
        tiled = [name for name in node.inputs if stage.layout[name] == TILED]
        for name in gradient_inputs(node) if tiled and back else ():
            if stage.layout[name] == WHOLE and graph.needs_grad(name):
                size = math.prod(graph.shape(name))
                ops.append(CommOp(node.name, "share", name, elements=size, back=True))
        ops += halos.get(node.name, [])
        if rule.kind in ("gather", "crop"):
            ops += _conversion(graph, stage, node, rule, back)
        elif rule.kind == "norm":
            value = node.inputs[0]
            way_back = back and graph.needs_grad(value)
            ops.append(CommOp(node.name, "norm", value, elements=rule.elements, back=way_back))
        elif rule.kind == "reduce":
            ops.append(CommOp(node.name, "reduce", tiled[0], elements=rule.elements))
    return ops


def _conversion(graph: Graph, stage: Stage, node: Node, rule: Rule, back: bool) -> list[CommOp]:
    """Returns the messages with which all ranks get all of a value, or of its gradient.

    A crop gives each tile its part of what every tile holds, so the gradient comes from there.
    """
    if not node.inputs:  # a parameter's gradients are summed at the end of the step
        return []
    crops, needs_grad = rule.kind == "crop", graph.needs_grad(node.inputs[0])
    way_back = back and needs_grad and (stage.shards > 1) != crops
    if crops and not way_back:
        return []
    value = node.name if crops else node.inputs[0]  # what the ranks divide
    samples, _, *size = map_shape(dims_of(graph, stage, value))
    every = [(((0, size[0]),), ((0, size[1]),))] * stage.num_ranks
    messages = [
        Transfer(*(there, here) if crops else (here, there), Box(0, samples, rect))
        for here, there, rect in pieces_between(size, map_grid(stage), every)
    ]
    return [CommOp(node.name, rule.kind, value, messages, back=way_back, readers=[node.name])]


def _pieces(held: list[Box], wanted: list[Box], layout: str) -> list[Transfer]:
    """Returns messages that bring all that is wanted; holders of a complete value take turns."""
    pieces = []
    for receiver, want in enumerate(wanted):
        for holder in [receiver % len(held)] if layout == WHOLE else range(len(held)):
            n0, n1 = max(held[holder].n0, want.n0), min(held[holder].n1, want.n1)
            rect = held[holder].rect
            if rect is not None and want.rect is not None:
                rect = intersect(rect, want.rect)
            if n0 < n1 and (rect is None or not is_empty(rect)):
                pieces.append(Transfer(holder, receiver, Box(n0, n1, rect)))
    return pieces
