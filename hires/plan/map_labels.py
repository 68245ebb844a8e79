"""Follows the rows and columns of the images to every value, whether tiles can hold it or not.

A value that tiles compute whole, as behind a window that a border cuts, may be cropped to tiles
again where it has pixels. Which of its dims are rows and columns follows from the same rules as on
tiles, for a single tile, which no border cuts.
"""

from __future__ import annotations

import contextlib

from hires.plan.factor_rules import TILINGS, NoRule, OperandDims, fit_of
from hires.plan.factors import Dims, map_dims, shape_of
from hires.plan.graph import INPUT, Graph, Node
from hires.plan.operators.operator_facts import facts_of

ONE_TILE = (1, 1)
MOVES = {"regrouped", "permuted", "expanded", "repeated", "product", "indexed"}
"""Ways in which the dims of a result are others than those of its operands."""


def labels_of(graph: Graph) -> dict[str, Dims]:
    """Returns the dims of every value that depends on the images, on one tile."""
    labels = {INPUT: map_dims(graph.input_shape, ONE_TILE)}
    for node in graph.nodes:
        read = {name: labels[name] for name in node.inputs if name in labels}
        dims = _label(node, graph, read) if node.name in graph.of_images else None
        if dims is not None and "complex" not in (node.dtype or ""):  # those are a spectrum
            labels[node.name] = dims
    return labels


def is_plain(label: Dims) -> bool:
    """Whether a label is that of an ordinary map (n, C, H, W)."""
    return len(label) == 4 and label == map_dims(shape_of(label), ONE_TILE)


def _label(node: Node, graph: Graph, read: dict[str, Dims]) -> Dims | None:
    ways, shape = facts_of(node.kind).tiling, node.shape or []
    if len(shape) == 4 and MOVES.isdisjoint(ways) and all(map(is_plain, read.values())):
        return map_dims(shape, ONE_TILE)
    found = None
    for way in ways if read else ():
        with contextlib.suppress(NoRule):
            found = fit_of(way, OperandDims(node, graph, read)).dims if way in TILINGS else None
        if found is not None:
            break
    if found is None:  # one without a rule may still make as many numbers as it reads
        found = next((dims for dims in read.values() if shape_of(dims) == shape), None)
    return map_dims(shape, ONE_TILE) if found is None and len(shape) == 4 else found
