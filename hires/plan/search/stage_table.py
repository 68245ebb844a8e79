"""Sums what the nodes of a network cost a rank, so that a stage of it is one subtraction.

    node         conv1   bn1   relu   conv2  ...
    seconds      |-----|-----|-------|-----|          of one microbatch, on one tile or shard
    prefix sums  0     a     a+b     ...              a stage [first, last) costs sums[last] -
                                                      sums[first], in any cut

Blocks that repeat are looked at once: the seconds of a node are kept by what decides them. These
are estimates for the order of a search; what comes first is planned and simulated afterwards.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

from hires.plan.event import BYTES
from hires.plan.graph import INPUT, Graph, Node
from hires.plan.operators.operator_facts import facts_of
from hires.plan.operators.operator_families import KEEPS_NOTHING, KEEPS_VALUE
from hires.plan.simulation.simulate import Link
from hires.plan.tiling import area, intersect, need_of, own_rects

INDEX_BYTES = 8
"""Of a maximum's place, which its backward pass reads."""

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
    sent_bytes: list[float]
    """By a rank, forward and backward."""
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


def stage_table(
    graph: Graph, share: RankShare, seconds: Seconds, link: Link, width: int, training: bool
) -> StageTable:
    """Returns the sums for a rank with one tile of so many samples, in numbers of ``width`` bytes.

    The rank has the tile with the most neighbours.
    """
    part = share.samples / graph.input_shape[0] / (share.grid[0] * share.grid[1])
    tile = (share.grid[0] // 2) * share.grid[1] + share.grid[1] // 2
    known: dict[object, tuple[float, float]] = {}
    rows: list[tuple[float, ...]] = []
    kept = kept_values(graph) if training else {}
    for node in graph.nodes:
        facts, here, back = facts_of(node.kind), 0.0, 0.0
        if not facts.view and node.shape is not None:
            key = repr((node.kind, node.shape, [graph.params[p].shape for p in node.params],
                        [graph.shape(v) for v in node.inputs if is_tensor(graph, v)]))  # fmt: skip
            if key not in known:
                known[key] = (
                    seconds(node, part, False), seconds(node, part, True) if training else 0.0
                )  # fmt: skip
            here, back = known[key]
        halo_s = sent = 0.0
        if share.grid != (1, 1):
            sent, peers = _borrowed(graph, node, share, tile)
            sent *= width
            halo_s = (link.latency_s if peers else 0.0) + sent / link.bytes_per_s
            if facts.statistics is not None and training:
                halo_s += 2 * link.latency_s
        way_back = halo_s if training and node.needs_grad else 0.0
        largest = sum(_bytes(graph, value, width) for value in (node.name, *node.inputs)) * part
        rows.append(
            (here, back, halo_s, way_back, sent * (2 if way_back else 1),
             kept.get(node.name, 0) * width * part, largest)
        )  # fmt: skip
    columns = [*zip(*rows, strict=True)]
    made = [[0.0, *itertools.accumulate(column)] for column in columns[:-1]]
    return StageTable(made[0], made[1], made[2], made[3], made[4], made[5], [*columns[-1]])


def kept_values(graph: Graph) -> dict[str, float]:
    """Returns the numbers that a training keeps until the backward pass, by their node.

    A map that convolution, norm and activation read is kept once. A norm's value that an
    activation writes over is not kept.
    """
    kept: dict[str, float] = {}
    for node in graph.nodes:
        if node.shape is None or not node.needs_grad:
            continue
        facts = facts_of(node.kind)
        learns = any(graph.params[name].trainable for name in node.params)
        if node.kind in KEEPS_VALUE:
            read = [node.name]
        elif facts.view or node.kind in KEEPS_NOTHING or facts.moves or not facts.tiling:
            read = []
        elif facts.multiplies or facts.statistics is not None:
            read = [*node.inputs] if learns or graph.needs_grad(node.inputs[0]) else []
        elif "avg_pool" in node.kind or "interpolate" in node.kind or "upsample" in node.kind:
            read = []
        else:
            read = [*node.inputs]
        for value in read:
            base = _base(graph, value)
            if base != INPUT and is_tensor(graph, base):
                kept[base] = float(math.prod(graph.shape(base)))
        if "max_pool" in node.kind:
            kept[node.name] = (
                kept.get(node.name, 0) + node.num_elements * INDEX_BYTES / BYTES["float32"]
            )
    return kept


def is_tensor(graph: Graph, value: str) -> bool:
    """Whether a value is one tensor, not a list of them."""
    return value == INPUT or graph.by_name[value].shape is not None


def _base(graph: Graph, value: str) -> str:
    """Returns the value in whose memory another one lies."""
    while value != INPUT and facts_of(graph.by_name[value].kind).view:
        if not graph.by_name[value].inputs:
            break
        value = graph.by_name[value].inputs[0]
    return value


def _bytes(graph: Graph, value: str, width: int) -> float:
    return math.prod(graph.shape(value)) * width if is_tensor(graph, value) else 0.0


def _borrowed(graph: Graph, node: Node, share: RankShare, tile: int) -> tuple[float, bool]:
    """Returns the numbers that a tile borrows for a node, and whether it borrows any."""
    window = facts_of(node.kind).window
    if window is None or not node.inputs or node.shape is None or len(node.shape) != 4:
        return 0.0, False
    shape = graph.shape(node.inputs[0])
    if len(shape) != 4:
        return 0.0, False
    axes = window.axes(node, shape, graph)
    if axes is None:
        return 0.0, False
    need = need_of(axes, own_rects(node.shape[2:], share.grid)[tile])
    own = own_rects(shape[2:], share.grid)[tile]
    pixels = area(need) - area(intersect(need, own))
    return pixels * shape[1] * share.samples, pixels > 0
