"""Fuses halos: one wider exchange of pixels serves several windowed layers.

    exchange     [---- own rows ----] + 2 on each side
    3x3 conv     [---- own rows ----] + 1                 computed by both neighbours
    3x3 conv     [---- own rows ----]                     no exchange in between

Between two exchanges a tile computes every value on a rectangle around its own pixels, as large as
the layers up to the next exchange need, clipped to the image. Pixels near a cut are computed by
several tiles: more arithmetic, fewer messages. The choice affects only the cost. The result is
exact for any choice, because an operator that needs more than the tile holds has an exchange of its
own (:mod:`hires.plan.halos`). At most ``fuse`` windowed layers lie between exchanges, and exchanges
happen where a single value is alive, so that both branches of a residual block start from the same
pixels.

Source:
    The thesis's design "D2": halos of several consecutive layers are exchanged at once.
"""

from __future__ import annotations

from collections.abc import Sequence

from hires.plan.graph import Graph, Node
from hires.plan.halos import extents_of, is_list, wanted_rects
from hires.plan.plan import Stage
from hires.plan.rules import TILED, Rule
from hires.plan.tiling import cover, halo_messages, is_empty, own_rect


def widen(
    graph: Graph, stage: Stage, rules: dict[str, Rule], fuse: int
) -> dict[str, list[list[int]]]:
    """Returns, and stores in the stage, the rectangles of values that tiles hold beyond their own.

    Args:
        graph: the network.
        stage: tiles and layout.
        rules: how each node is computed.
        fuse: most windowed layers that one exchange serves.

    Returns:
        Value -> [row0, row1, col0, col1] for each tile.
    """
    stage.extents = {}
    if fuse == 1 or stage.num_tiles == 1:
        return stage.extents
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
            if not is_list(graph, reader.name):
                wanted = wanted_rects(graph, stage, reader, node.name, rules[reader.name])
                held = [cover(a, b) for a, b in zip(held, wanted, strict=True)]
        if held != own:
            stage.extents[node.name] = [list(rect) for rect in held]
    return stage.extents


def _can_be_wider(graph: Graph, stage: Stage, node: Node, rule: Rule) -> bool:
    """Whether tiles may compute more of a node's value than they own.

    They may not of a value that another stage reads, of lists, or where a tile owns no pixel.
    """
    if rule.result != TILED or is_list(graph, node.name, *node.inputs):
        return False
    if node.name == graph.output or graph.consumers.get(node.name, [0])[-1] >= stage.last:
        return False
    size = graph.shape(node.name)[2:]
    return not any(is_empty(own_rect(size, stage.tiles, t)) for t in range(stage.num_tiles))


def _exchanged(
    graph: Graph, stage: Stage, rules: dict[str, Rule], fuse: int, wider: set[str]
) -> set[str]:
    """Returns the values whose pixels are exchanged, of those that could be held wider.

    One walk over the nodes counts the windowed layers since the last exchange. Where they are too
    many, the last value that was alive alone is exchanged and the walk resumes behind it; if there
    is none since the last exchange, the inputs of the layer are exchanged.
    """
    nodes = graph.nodes[stage.first : stage.last]
    index_of = {node.name: index for index, node in enumerate(nodes)}
    alone = _alive_alone(graph, stage, nodes)
    chosen: set[str] = set()
    depth: dict[str, int] = {}
    restart, index = -1, 0  # node of the last exchanged value that was alive alone; of the walk
    while index < len(nodes):
        node = nodes[index]
        reached = max((depth.get(name, 0) for name in node.inputs), default=0)
        rule = rules[node.name]
        if rule.axes is not None and halo_messages(rule.axes, stage.tiles):
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


def _alive_alone(graph: Graph, stage: Stage, nodes: Sequence[Node]) -> list[int]:
    """Returns the nodes behind which the stage reads no older tiled value than theirs."""
    last_read: dict[str, int] = {}
    for index, node in enumerate(nodes):
        last_read.update({n: index for n in node.inputs if stage.layout[n] == TILED})
    incoming = last_read.keys() - {node.name for node in nodes}
    until = max((last_read[name] for name in incoming), default=-1)
    alone = []
    for index, node in enumerate(nodes):
        if until <= index:
            alone.append(index)
        until = max(until, last_read.get(node.name, -1))
    return alone
