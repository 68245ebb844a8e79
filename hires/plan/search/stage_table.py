"""Sums what the nodes of a network cost a rank, so that a stage of it is one subtraction.

    node         conv1   bn1   relu   conv2  ...
    seconds      |-----|-----|-------|-----|          of one microbatch, on one tile or shard
    sums         0     a     a+b     ...              a stage [first, last) costs sums[last] -
                                                      sums[first], in any cut

These are estimates for the order of a search; what comes first is planned and simulated afterwards.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from hires.core.codecs import HALO
from hires.plan.event import sent_bytes
from hires.plan.graph import Graph, Node
from hires.plan.operators.operator_facts import facts_of
from hires.plan.plan import derived
from hires.plan.simulation.node_work import kept_bytes, value_bytes
from hires.plan.simulation.simulate import Network
from hires.plan.tiling import area, intersect, need_of, own_rects

Seconds = Callable[[Node, float, bool], float]
"""(node, share of the traced microbatch, whether backward) -> seconds on a rank."""


class RankShare(NamedTuple):
    """What a rank has of a microbatch."""

    samples: float
    grid: tuple[int, int] = (1, 1)


class NodeFacts(NamedTuple):
    """What a node costs whatever a rank has of it."""

    alike: str
    """The same for nodes that take the same time; empty: it takes none."""
    kept: float
    """Bytes that a training keeps for its backward pass."""
    largest: float
    """Bytes of its value with what it reads."""
    has_sums: bool
    """Whether tiles add its statistics."""


class StageTable(NamedTuple):
    """Sums over the nodes before each, on a rank with one tile or shard."""

    forward_s: list[float]
    """With the messages between the ranks of the stage."""
    back_s: list[float]
    kept_bytes: list[float]
    largest_bytes: list[float]
    """Of each node alone, while it is computed."""


@dataclass
class StageTables:
    """The tables of one network and machine, one for each part that a rank may have."""

    graph: Graph
    seconds: Seconds
    network: Network
    dtype: str
    training: bool
    codecs: Mapping[str, str]

    def __post_init__(self) -> None:
        self.facts = [*self._node_facts()]

    def _node_facts(self) -> Iterator[NodeFacts]:
        graph, dtype = self.graph, self.dtype
        kept = kept_bytes(graph, dtype) if self.training else {}
        for node in graph.nodes:
            facts, alike = facts_of(node.kind), ""
            if not facts.view and node.shape is not None:
                params = [graph.params[name].shape for name in node.params]
                reads = [graph.shape(value) for value in node.inputs if not graph.is_list(value)]
                alike = repr((node.kind, node.shape, params, reads))
            largest = sum(value_bytes(graph, value, dtype) for value in (node.name, *node.inputs))
            has_sums = facts.statistics is not None and self.training
            yield NodeFacts(alike, kept.get(node.name, 0), largest, has_sums)

    @derived
    def of(self, share: RankShare) -> StageTable:
        """Returns the sums of a rank's part."""
        part = self.part(share)
        link = self.network.link([0, math.prod(share.grid) - 1])
        seconds_of: dict[str, tuple[float, float]] = {"": (0.0, 0.0)}
        rows: list[tuple[float, ...]] = []
        for node, facts, num_bytes in zip(
            self.graph.nodes, self.facts, self._borrowed(share.grid), strict=True
        ):
            if facts.alike not in seconds_of:
                back_s = self.seconds(node, part, True) if self.training else 0.0
                seconds_of[facts.alike] = self.seconds(node, part, False), back_s
            forward_s, back_s = seconds_of[facts.alike]
            if share.grid != (1, 1):
                latency_s = (bool(num_bytes) + 2 * facts.has_sums) * link.latency_s
                halo_s = latency_s + num_bytes * share.samples / link.bytes_per_s
                forward_s += halo_s
                back_s += halo_s if self.training and node.needs_grad else 0.0
            rows.append((forward_s, back_s, facts.kept * part, facts.largest * part))
        *summed, largest = zip(*rows, strict=True)
        sums = [[0.0, *itertools.accumulate(column)] for column in summed]
        return StageTable(sums[0], sums[1], sums[2], [*largest])

    def part(self, share: RankShare) -> float:
        """Returns a rank's share of the network's values, traced with any number of samples."""
        return share.samples / self.graph.input_shape[0] / math.prod(share.grid)

    @derived
    def _borrowed(self, grid: tuple[int, int]) -> list[float]:
        """Returns the bytes of a sample that the tile in the middle borrows for each node."""
        graph, tile = self.graph, (grid[0] // 2) * grid[1] + grid[1] // 2

        def borrowed(node: Node) -> float:
            window = facts_of(node.kind).window
            if window is None or not node.inputs or node.shape is None or len(node.shape) != 4:
                return 0
            shape = graph.shape(node.inputs[0])
            axes = window.axes(node, shape, graph) if len(shape) == 4 else None
            if axes is None:
                return 0
            need = need_of(axes, own_rects(node.shape[2:], grid)[tile])
            own = own_rects(shape[2:], grid)[tile]
            share = (area(need) - area(intersect(need, own))) / (shape[0] * shape[2] * shape[3])
            num_bytes = share * value_bytes(graph, node.inputs[0], self.dtype)
            return self.sent(HALO, num_bytes, self.dtype)

        return [*map(borrowed, graph.nodes)]

    def sent(self, kind: str, num_bytes: float, dtype: str) -> float:
        """Returns the bytes in which so many bytes of numbers travel."""
        many = 2**20
        codec = self.codecs.get(kind, "")
        return num_bytes * sent_bytes(many, dtype, codec) / sent_bytes(many, dtype, "")
