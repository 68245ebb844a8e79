"""Decides which pixels the tiles of a stage borrow from each other, and at which node.

A value's pixels travel once: when the first node asks for more than the tiles hold, with the
margins of all nodes that do. Their gradients travel back once, summed.
"""

from __future__ import annotations

import bisect
import itertools

from hires.plan.graph import Graph, Node, Rect
from hires.plan.plan import CommOp, Stage
from hires.plan.rules import TILED, Rule
from hires.plan.tiling import cover, inside, loans, need_of, own_rect

BORDER_SHARE = 1 / 32
"""``parallel.halo.overlap=auto`` computes the border apart up to this part of a tile: it is
computed twice, and the copy that this saves costs a thirtieth of a 3x3 convolution of 64
channels."""


def halos_of(
    graph: Graph, stage: Stage, rules: dict[str, Rule], backward: set[str]
) -> dict[str, list[CommOp]]:
    """Returns the exchanges of a stage by the node before which they happen.

    Args:
        graph: the network.
        stage: tiles, layout and held rectangles.
        rules: how each node is computed.
        backward: the nodes to which the backward pass comes. Only their gradients are waited for,
            so the other nodes have exchanges of their own.
    """
    found: dict[tuple[str, bool], CommOp] = {}
    needs: dict[tuple[str, bool], list[Rect]] = {}
    for node in graph.nodes[stage.first : stage.last]:
        for value in node.inputs:
            if stage.layout[value] != TILED or is_list(graph, node.name, value):
                continue
            wanted = wanted_rects(graph, stage, node, value, rules[node.name])
            held = extents_of(graph, stage, value)
            if all(inside(a, b) for a, b in zip(wanted, held, strict=True)):
                continue
            key = value, graph.needs_grad(value) and node.name in backward
            op = found.setdefault(key, CommOp(node.name, "halo", value, back=key[1]))
            op.readers.append(node.name)
            before = needs.get(key, wanted)
            needs[key] = [cover(a, b) for a, b in zip(before, wanted, strict=True)]
    ops: dict[str, list[CommOp]] = {}
    for key, op in found.items():
        op.messages = loans(graph.shape(op.value)[2:], stage.tiles, needs[key])
        ops.setdefault(op.node, []).append(op)
    return ops


def companions(graph: Graph, stage: Stage) -> dict[str, CommOp]:
    """Returns the exchanges that set out together with the one before them, by that one's name.

    If the next value is there already, as where the branches of a cell read different values, its
    pixels travel while those of this one are waited for. No more than two are under way, in one
    order, and none crosses from one segment that is computed again to the next.
    """
    position = graph.position
    bounds = stage.segments or [stage.first]
    halos = [op for op in stage.comm if op.kind == "halo"]
    found = {}
    for this, later in itertools.pairwise(halos):
        at, other = position[this.node], position[later.node]
        same = bisect.bisect(bounds, at) == bisect.bisect(bounds, other)
        if same and position.get(later.value, -1) < at:
            found[name_of(this)] = later
    return found


def name_of(op: CommOp) -> str:
    """Returns what an exchange is called within its stage."""
    return f"halo of {op.value} for {op.node}"


def extents_of(graph: Graph, stage: Stage, value: str) -> list[Rect]:
    """Returns the rectangle of a tiled value that each tile holds; at least what it owns."""
    if value in stage.extents:
        return [(r[0], r[1], r[2], r[3]) for r in stage.extents[value]]
    size = graph.shape(value)[2:]
    return [own_rect(size, stage.tiles, tile) for tile in range(stage.num_tiles)]


def wanted_rects(graph: Graph, stage: Stage, node: Node, value: str, rule: Rule) -> list[Rect]:
    """Returns the rectangle of a value that each tile must see to compute what it holds of a node.

    What is reduced over the whole image is made of own pixels.
    """
    if rule.result != TILED:
        return [own_rect(graph.shape(value)[2:], stage.tiles, t) for t in range(stage.num_tiles)]
    made = extents_of(graph, stage, node.name)
    if rule.kind != "window":
        return made
    assert rule.axes is not None
    return [need_of(rule.axes, rect) for rect in made]


def is_list(graph: Graph, *values: str) -> bool:
    """Whether one of these values is a list of tensors, which has no map to borrow from."""
    return any(name in graph.by_name and graph.by_name[name].shape is None for name in values)


def ran_back(graph: Graph, stage: Stage) -> set[str]:
    """Returns the nodes of a stage to which a backward pass comes.

    Those whose value leaves the stage, and those from which a gradient flows to one that it comes
    to: not a convolution whose value is detached, for example.
    """
    found: set[str] = set()
    for node in reversed(graph.nodes[stage.first : stage.last]):
        readers = graph.consumers.get(node.name, [])
        leaves = node.name == graph.output or any(index >= stage.last for index in readers)
        inner = (graph.nodes[i].name in found for i in readers if i < stage.last)
        if node.needs_grad and (leaves or any(inner)):
            found.add(node.name)
    return found
