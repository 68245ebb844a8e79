"""Sums what the nodes of a network cost a rank, so that a stage of it is one subtraction.

    node         conv1   bn1   relu   conv2  ...
    seconds      |-----|-----|-------|-----|          of one microbatch, on one tile or shard
    prefix sums  0     a     a+b     ...              a stage [first, last) costs sums[last] -
                                                      sums[first], in any cut

Blocks that repeat are looked at once: the seconds of a node are kept by what decides them, and what
a grid borrows serves all numbers of samples. These are estimates for the order of a search; what
comes first is planned and simulated afterwards.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hires.plan.graph import Graph, Node
from hires.plan.operators.operator_facts import facts_of
from hires.plan.simulation.simulate import Link
from hires.plan.tensor_bytes import kept_bytes, value_bytes
from hires.plan.tiling import area, intersect, need_of, own_rects

Seconds = Callable[[Node, float, bool], float]
"""(node, share of the traced microbatch, whether backward) -> seconds on a rank."""


@dataclass
class StageTable:
    """Prefix sums over the nodes of a network, on a rank that has one tile or shard of it."""

    forward_s: list[float]
    back_s: list[float]
    halo_s: list[float]
    """Messages of a forward pass between the ranks of a stage."""
    halo_back_s: list[float]
    kept_bytes: list[float]
    """By a training, until the backward pass of a microbatch."""
    largest_bytes: list[float]
    """Of each node: its value with what it reads, while it is computed."""

    def of(self, sums: list[float], first: int, last: int) -> float:
        """Returns what a stage costs."""
        return sums[last] - sums[first]


@dataclass(frozen=True)
class RankShare:
    """What a rank has of a microbatch."""

    samples: float
    grid: tuple[int, int] = (1, 1)

    def of(self, graph: Graph) -> float:
        """Returns its share of the network's values, traced with any number of samples."""
        return self.samples / graph.input_shape[0] / (self.grid[0] * self.grid[1])


@dataclass(frozen=True)
class NodeFacts:
    """What a node costs whatever a rank has of it."""

    node: Node
    alike: str
    """The same for nodes that take the same time; empty: it takes none."""
    kept: float
    """Bytes that a training keeps for its backward pass."""
    largest: float
    """Bytes of its value with what it reads."""
    sums: bool
    """Whether tiles add its statistics."""


def node_facts(graph: Graph, dtype: str, training: bool) -> list[NodeFacts]:
    """Returns the facts of every node of a network that computes in a type."""
    kept = kept_bytes(graph, dtype) if training else {}
    every = []
    for node in graph.nodes:
        facts, alike = facts_of(node.kind), ""
        if not facts.view and node.shape is not None:
            params = [graph.params[name].shape for name in node.params]
            reads = [graph.shape(value) for value in node.inputs if not graph.is_list(value)]
            alike = repr((node.kind, node.shape, params, reads))
        largest = sum(value_bytes(graph, value, dtype) for value in (node.name, *node.inputs))
        sums = facts.statistics is not None and training
        every.append(NodeFacts(node, alike, kept.get(node.name, 0), largest, sums))
    return every


def borrowed_bytes(graph: Graph, grid: tuple[int, int], dtype: str) -> list[float]:
    """Returns the bytes of a sample that the tile with most neighbours borrows for each node."""
    tile = (grid[0] // 2) * grid[1] + grid[1] // 2
    return [_borrowed(graph, node, grid, tile, dtype) for node in graph.nodes]


def stage_table(
    graph: Graph,
    share: RankShare,
    *,
    seconds: Seconds,
    link: Link,
    training: bool,
    every: Sequence[NodeFacts],
    borrowed: Sequence[float],
) -> StageTable:
    """Returns the sums for a rank with one tile of so many samples.

    ``every`` are the facts of the nodes (:func:`node_facts`), ``borrowed`` what the grid borrows
    for each (:func:`borrowed_bytes`).
    """
    part = share.of(graph)
    seconds_of: dict[str, tuple[float, float]] = {"": (0.0, 0.0)}
    rows: list[tuple[float, ...]] = []
    for facts, num_bytes in zip(every, borrowed, strict=True):
        node = facts.node
        if facts.alike not in seconds_of:
            back_s = seconds(node, part, True) if training else 0.0
            seconds_of[facts.alike] = seconds(node, part, False), back_s
        halo_s = 0.0
        if share.grid != (1, 1):
            sent = num_bytes * share.samples
            halo_s = (link.latency_s if num_bytes else 0.0) + sent / link.bytes_per_s
            halo_s += 2 * link.latency_s if facts.sums else 0.0
        way_back = halo_s if training and node.needs_grad else 0.0
        rows.append(
            (*seconds_of[facts.alike], halo_s, way_back, facts.kept * part, facts.largest * part)
        )
    columns = [*zip(*rows, strict=True)]
    sums = [[0.0, *itertools.accumulate(column)] for column in columns[:-1]]
    return StageTable(sums[0], sums[1], sums[2], sums[3], sums[4], [*columns[-1]])


def _borrowed(graph: Graph, node: Node, grid: tuple[int, int], tile: int, dtype: str) -> float:
    """Returns the bytes that a tile borrows for a node of one sample."""
    window = facts_of(node.kind).window
    if window is None or not node.inputs or node.shape is None or len(node.shape) != 4:
        return 0
    shape = graph.shape(node.inputs[0])
    if len(shape) != 4:
        return 0
    axes = window.axes(node, shape, graph)
    if axes is None:
        return 0
    need = need_of(axes, own_rects(node.shape[2:], grid)[tile])
    own = own_rects(shape[2:], grid)[tile]
    share = (area(need) - area(intersect(need, own))) / (shape[0] * shape[2] * shape[3])
    return share * value_bytes(graph, node.inputs[0], dtype)
