"""Decides what travels within and between stages, from how every value lies on their ranks.

A value lies on the ranks of a stage in tiles, in shards, or complete on each of them, as
``hires.plan.conversions`` has decided. A complete value has a complete gradient on each rank, too,
unless they are shards: then each has the part that its samples cause. Across an edge every target
rank gets each number that it needs once, and the gradient takes the way back.

Norms that do not depend on each other share one message for their statistics. A legal order of the
nodes makes them neighbours:

    before    conv1 [norm1] relu1 conv2 [norm2]   conv3 [norm3] add      3 messages
    after     conv1 conv3 [norm1 norm3]   relu1 conv2 [norm2]   add      2 messages

The level of a norm is the number of norms before it on the longest path to it. No order has fewer
messages than levels. A norm that may be in several levels joins the one whose norms are nearest, so
that values live about as long.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from hires.plan.factors import map_shape, unpack
from hires.plan.graph import INPUT, Graph, Node, reads_of
from hires.plan.halos import extents_of, halos_of, map_grid, ran_back, widened
from hires.plan.operators.operator_facts import facts_of, gradient_inputs, is_random
from hires.plan.operators.operator_table import updates_statistics
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


MOST_NUMBERS = 8192
"""Most that a joint message holds of each rank: small messages take short cuts."""


def with_norms_together(graph: Graph, stages: Sequence[Stage]) -> Graph:
    """Returns the network in an order in which the norms of a level are neighbours, by stages."""
    nodes: list[Node] = []
    for stage in stages:
        part = graph.nodes[stage.first : stage.last]
        nodes += _ordered(graph, stage, part) if stage.num_ranks > 1 else part
    return dataclasses.replace(graph, nodes=nodes)


def joined(graph: Graph, stage: Stage, ops: list[CommOp]) -> list[CommOp]:
    """Returns a stage's communication with one gather for several norms, which are its readers."""
    at: dict[str, list[CommOp]] = {}
    for op in ops:
        at.setdefault(op.node, []).append(op)
    backward = ran_back(graph, stage)
    runs: list[list[CommOp]] = []  # those of the norms that share one
    run: list[CommOp] = []
    for node in graph.nodes[stage.first : stage.last]:
        own = at.get(node.name, [])
        if len(own) != 1 or not _can_join(graph, stage, node):
            run = []
            continue
        [op] = own
        fits = sum(one.elements for one in run) + op.elements <= MOST_NUMBERS
        apart = {one.node for one in run}.isdisjoint(node.inputs)
        alike = {(one.back, one.node in backward) for one in (*run, op)}
        if not (run and fits and apart and len(alike) == 1):
            run = []
            runs.append(run)
        run.append(op)
    joint: dict[CommOp, CommOp] = {}
    for run in (run for run in runs if run[1:]):
        elements, readers = sum(op.elements for op in run), [op.node for op in run]
        joint[run[0]] = dataclasses.replace(run[0], elements=elements, readers=readers)
    gone = {op for run in runs for op in run[1:]}
    return [joint.get(op, op) for op in ops if op not in gone]


def _can_join(graph: Graph, stage: Stage, node: Node) -> bool:
    # A norm whose statistics are of several ranks, with parameters and no values for its weight
    # and bias.
    if facts_of(node.kind).statistics is None or len(node.inputs) != 1:
        return False
    return rule_in(stage, node, graph).kind == "norm"


def _ordered(graph: Graph, stage: Stage, nodes: Sequence[Node]) -> list[Node]:
    # What draws random numbers, or reads a buffer that the network writes, keeps its place.
    written, backward = graph.updates.keys(), ran_back(graph, stage)
    ordered: list[Node] = []
    run: list[Node] = []
    for node in nodes:
        if is_random(node) or not written.isdisjoint(node.params):
            ordered += [*_by_level(graph, stage, run, backward), node]
            run = []
        else:
            run.append(node)
    return ordered + _by_level(graph, stage, run, backward)


def _by_level(graph: Graph, stage: Stage, nodes: list[Node], backward: set[str]) -> list[Node]:
    norms = {node.name for node in nodes if _can_join(graph, stage, node)}
    needs, position = _needs(nodes), {node.name: index for index, node in enumerate(nodes)}
    levels = _levels(nodes, norms, needs, position)
    if len(levels) == len(norms):
        return nodes

    def way_back(node: Node) -> tuple[bool, bool]:
        return node.name in backward, graph.needs_grad(node.inputs[0])

    ordered: dict[str, Node] = {}
    for level in levels:
        first, last = position[level[0]], position[level[-1]]
        wanted, ahead = set[str](), [name for norm in level for name in needs[norm]]
        while ahead:
            if (name := ahead.pop()) not in wanted and name not in ordered:
                wanted.add(name)
                ahead += needs[name]
        for node in nodes[:last]:
            is_free = position[node.name] < first and node.name not in norms
            if node.name in wanted or (is_free and ordered.keys() >= {*needs[node.name]}):
                ordered.setdefault(node.name, node)
        together = sorted((nodes[position[name]] for name in level), key=way_back)
        ordered |= {node.name: node for node in together}
    return [*(ordered | {node.name: node for node in nodes}).values()]


def _needs(nodes: list[Node]) -> dict[str, list[str]]:
    # The nodes that come before each. Two uses of one norm keep their order: both move its
    # running statistics.
    last_use: dict[str, str] = {}
    needs: dict[str, list[str]] = {}
    for node in nodes:
        needs[node.name] = [name for name in node.inputs if name in needs]
        if updates_statistics(node):
            needs[node.name] += [last_use[name] for name in node.params if name in last_use]
            last_use |= dict.fromkeys(node.params, node.name)
    return needs


def _levels(
    nodes: list[Node], norms: set[str], needs: dict[str, list[str]], position: dict[str, int]
) -> list[list[str]]:
    after: dict[str, int] = {}  # norms on the longest path behind a node
    for node in reversed(nodes):
        behind = after.setdefault(node.name, 0) + (node.name in norms)
        for name in needs[node.name]:
            after[name] = max(after.get(name, 0), behind)
    least: dict[str, int] = {}  # the first level that a node can have
    for node in nodes:
        least[node.name] = max((least[n] + (n in norms) for n in needs[node.name]), default=0)
    count = max((least[name] + 1 for name in norms), default=0)
    fixed: list[list[int]] = [[] for _ in range(count)]
    for name in norms:
        if least[name] == count - 1 - after[name]:
            fixed[least[name]].append(position[name])
    levels: list[list[str]] = [[] for _ in range(count)]
    level: dict[str, int] = {}
    for node in nodes:
        first = max((level[n] + (n in norms) for n in needs[node.name]), default=0)
        level[node.name] = first
        if node.name in norms:
            here = position[node.name]
            level[node.name] = chosen = min(
                range(first, count - after[node.name]),
                key=lambda one: min(abs(here - other) for other in fixed[one]),
            )
            levels[chosen].append(node.name)
    return levels
