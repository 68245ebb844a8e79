"""Decides which pixels the tiles of a stage borrow from each other, and at which node.

A value's pixels travel once: when the first node asks for more than the tiles hold, with the
margins of all nodes that do. Their gradients travel back once, summed. With ``parallel.halo.fuse``
one wider exchange serves several windowed layers:

    exchange     [---- own rows ----] + 2 on each side
    3x3 conv     [---- own rows ----] + 1                 computed by both neighbours
    3x3 conv     [---- own rows ----]                     no exchange in between

Between two exchanges a tile computes every value on a rectangle around its own pixels, as large as
the layers up to the next exchange need, clipped to the image: more arithmetic, fewer messages. The
result is exact for any choice, because an operator that needs more than the tile holds has an
exchange of its own. Exchanges happen where a single value is alive, so that both branches of a
residual block start from the same pixels.

Source:
    The thesis's design "D2": halos of several consecutive layers are exchanged at once.
"""

from __future__ import annotations

import dataclasses

from hires.plan.factors import map_shape
from hires.plan.graph import Graph, Node, Rect
from hires.plan.operators.operator_facts import gradient_inputs
from hires.plan.plan import Box, CommOp, Stage, Transfer
from hires.plan.rules import TILED, Rule, dims_of, window_of
from hires.plan.tiling import (
    Parts,
    cover,
    cover_parts,
    inside,
    own_rects,
    parts_of,
    pieces_between,
    rect_around,
    rects_of,
    window_pieces,
)

BORDER_SHARE = 1 / 32
"""``parallel.halo.overlap=auto`` computes the border apart up to this part of a tile: it is
computed twice, and the copy that this saves costs a thirtieth of a 3x3 convolution of 64
channels."""


def halos_of(
    graph: Graph, stage: Stage, rules: dict[str, Rule], backward: set[str]
) -> dict[str, list[CommOp]]:
    """Returns the exchanges of a stage by the node before which they happen.

    Only the gradients of ``backward``, the nodes to which the backward pass comes, are waited for,
    so the other nodes have exchanges of their own.
    """
    readers: dict[tuple[str, bool], list[str]] = {}
    needs: dict[tuple[str, bool], list[Parts]] = {}
    for node in graph.nodes[stage.first : stage.last]:
        for value in node.inputs:
            if stage.layout[value] != TILED or graph.is_list(node.name, value):
                continue
            wanted = wanted_parts(graph, stage, node, value, rules[node.name])
            pairs = zip(map(rects_of, wanted), extents_of(graph, stage, value), strict=True)
            if all(inside(rect, held) for rects, held in pairs for rect in rects):
                continue
            key = value, graph.needs_grad(value) and node.name in backward
            readers.setdefault(key, []).append(node.name)
            before = needs.get(key, wanted)
            needs[key] = [cover_parts(a, b) for a, b in zip(before, wanted, strict=True)]
    ops: dict[str, list[CommOp]] = {}
    for (value, back), names in readers.items():
        samples, _, *size = map_shape(dims_of(graph, stage, value))
        pieces = pieces_between(size, stage.tiles, needs[value, back])
        messages = [Transfer(s, t, Box(0, samples, rect)) for s, t, rect in pieces]
        op = CommOp(names[0], "halo", value, messages, back=back, readers=names)
        ops.setdefault(op.node, []).append(op)
    return ops


def map_grid(stage: Stage) -> list[int]:
    """Returns into how many rows and columns of ranks a stage divides the maps of its values."""
    return [stage.shards, 1] if stage.shards > 1 else stage.tiles


def name_of(op: CommOp) -> str:
    """Returns what an exchange is called within its stage."""
    return f"halo of {op.value} for {op.node}"


def extents_of(graph: Graph, stage: Stage, value: str) -> list[Rect]:
    """Returns the rectangle of a tiled value that each tile holds; at least what it owns."""
    if value in stage.extents:
        return [(r[0], r[1], r[2], r[3]) for r in stage.extents[value]]
    return _owned(graph, stage, value)


def _owned(graph: Graph, stage: Stage, value: str) -> list[Rect]:
    return own_rects(map_shape(dims_of(graph, stage, value))[2:], stage.tiles)


def wanted_parts(graph: Graph, stage: Stage, node: Node, value: str, rule: Rule) -> list[Parts]:
    """Returns the parts of a value that each tile must see to compute what it holds of a node.

    What is reduced over the whole image, or is no map of the same size, is made of own pixels.
    """
    axes = window_of(node, value, rule)
    if axes is not None:
        return [parts_of(axes, rect) for rect in extents_of(graph, stage, node.name)]
    alike = rule.result == TILED and on_one_map(graph, stage, node.name, value)
    rects = extents_of(graph, stage, node.name) if alike else _owned(graph, stage, value)
    return [((rect[:2],), (rect[2:],)) for rect in rects]


def on_one_map(graph: Graph, stage: Stage, *values: str) -> bool:
    """Whether values in tiles are maps (n, C, H, W) of one size, whose tiles may hold more."""
    if graph.is_list(*values) or not stage.factors.keys().isdisjoint(values):
        return False
    return len({tuple(graph.shape(value)[2:]) for value in values}) == 1


def ran_back(graph: Graph, stage: Stage) -> set[str]:
    """Returns the nodes of a stage to which a backward pass comes; none behind a detached value."""
    found: set[str] = set()
    for node in reversed(graph.nodes[stage.first : stage.last]):
        readers = graph.consumers.get(node.name, [])
        leaves = node.name == graph.output or any(index >= stage.last for index in readers)
        behind = (graph.nodes[index] for index in readers if index < stage.last)
        inner = (r.name in found and node.name in gradient_inputs(r) for r in behind)
        if node.needs_grad and (leaves or any(inner)):
            found.add(node.name)
    return found


def widened(graph: Graph, stage: Stage, rules: dict[str, Rule], fuse: int) -> Stage:
    """Returns a stage with what its tiles hold beyond their own, for ``fuse`` windowed layers."""
    stage = dataclasses.replace(stage, extents={})
    if fuse == 1 or stage.num_tiles == 1:
        return stage
    nodes = graph.nodes[stage.first : stage.last]
    wider = {node.name for node in nodes if _can_be_wider(graph, stage, node, rules[node.name])}
    wider -= _exchanged(graph, stage, rules, fuse, wider)
    # From the last node to the first: what a value's readers hold decides what is needed of it.
    for node in reversed(nodes):
        if node.name not in wider:
            continue
        own = extents_of(graph, stage, node.name)
        held = own
        for index in graph.consumers.get(node.name, []):
            reader = graph.nodes[index]
            if not graph.is_list(reader.name):
                wanted = wanted_parts(graph, stage, reader, node.name, rules[reader.name])
                held = [cover(a, rect_around(b)) for a, b in zip(held, wanted, strict=True)]
        if held != own:
            stage.extents[node.name] = [list(rect) for rect in held]
    return stage


def _can_be_wider(graph: Graph, stage: Stage, node: Node, rule: Rule) -> bool:
    """Whether tiles may compute more of a node's value than they own.

    They may not of a value that another stage reads, of lists, of one that they crop, of a softmax
    over pixels, or where a tile owns no pixel.
    """
    of_pixels = rule.kind == "crop" or (rule.kind == "norm" and rule.fit is not None)
    if rule.result != TILED or of_pixels or graph.is_list(node.name, *node.inputs):
        return False
    tiled = [value for value in node.inputs if stage.layout[value] == TILED]
    if rule.axes is None and not on_one_map(graph, stage, node.name, *tiled):
        return False
    if node.name == graph.output or graph.consumers.get(node.name, [0])[-1] >= stage.last:
        return False
    rows, cols = graph.shape(node.name)[2:]
    return rows >= stage.tiles[0] and cols >= stage.tiles[1]


def _exchanged(
    graph: Graph, stage: Stage, rules: dict[str, Rule], fuse: int, wider: set[str]
) -> set[str]:
    """Returns the values whose pixels are exchanged, of those that could be held wider.

    One walk over the nodes counts the windowed layers since the last exchange. Where they are too
    many, the last value that was alive alone is exchanged and the walk resumes behind it; if there
    is none since the last exchange, the inputs of the layer are exchanged:

        fuse=2    conv1 -> relu1 -> conv2 -> conv3        conv3 is the third: relu1 is exchanged,
                  1        1  ^     2        too deep     and the walk resumes with conv2 at 1
    """
    nodes = graph.nodes[stage.first : stage.last]
    index_of = {node.name: index for index, node in enumerate(nodes)}
    # Behind these nodes the stage reads no older tiled value than theirs.
    last_read: dict[str, int] = {}
    for index, node in enumerate(nodes):
        last_read.update({n: index for n in node.inputs if stage.layout[n] == TILED})
    until = max((last for name, last in last_read.items() if name not in index_of), default=-1)
    alone: list[int] = []
    for index, node in enumerate(nodes):
        if until <= index:
            alone.append(index)
        until = max(until, last_read.get(node.name, -1))
    chosen: set[str] = set()
    depth: dict[str, int] = {}
    restart, index = -1, 0  # node of the last exchanged value that was alive alone; of the walk
    while index < len(nodes):
        node = nodes[index]
        reached = max((depth.get(name, 0) for name in node.inputs), default=0)
        rule = rules[node.name]
        if rule.axes is not None and window_pieces(rule.axes, stage.tiles):
            reached += 1
        if reached > fuse:
            before = [i for i in alone if restart < i < index and nodes[i].name in wider]
            if before and depth[nodes[before[-1]].name]:
                restart = before[-1]
                chosen = {name for name in chosen if index_of[name] < restart}
                chosen.add(nodes[restart].name)
                depth[nodes[restart].name] = 0
                index = restart + 1
                continue
            chosen |= {name for name in node.inputs if name in wider}
            depth.update(dict.fromkeys(node.inputs, 0))
            reached = 1
        depth[node.name] = reached if node.name in wider else 0
        index += 1
    return chosen
