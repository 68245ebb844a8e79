"""Lists what an int8 network rounds of what operators read and make: values, or rows of them.

    conv1 -> relu -> cat -> conv2       relu alone in 8 bits          rounds conv1, relu
      `---------------^                 all but cat                   rounds cat, which conv2 reads

A value is rounded where an operator that makes it or reads it computes with integers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from hires.core.config.precision_config import DYNAMIC
from hires.plan.graph import Graph, Node
from hires.plan.operators.operator_facts import CONVERTS, facts_of
from hires.plan.passes.quantise import UINT8, Quantiser, is_linear
from hires.quant.affine import Affine


class Rounding(NamedTuple):
    """What is rounded."""

    values: Mapping[str, Affine]
    rows: frozenset[str]
    """Values that are rounded row by row, each with a scale of its own."""


_INNER = re.compile(r"\.(sum|quantized|part\d+)$")
"""How the names of nodes inside an operator end (``hires.plan.passes.int8_rules``)."""
NOTHING = Rounding({}, frozenset())


def int8_operators(graph: Graph) -> dict[str, Node]:
    """Returns what a quantised network computes with integers, by the operators' names.

    A layer with a table behind it is one operator. Conversions between integers and real numbers,
    and operators that only move data, are not counted.
    """
    made: dict[str, Node] = {}
    for node in graph.nodes:
        facts = facts_of(node.kind)
        joins = node.dtype == UINT8 and not (facts.moves or facts.view)  # under its own kind
        if (facts.quantized or joins) and node.kind not in CONVERTS:
            operator = _INNER.sub("", node.name)
            made.setdefault(operator if operator in graph.by_name else node.name, node)
    return made


class Roundings:
    """What the int8 network of given scales rounds, for any choice of nodes that stay in float.

    ``graph`` is the fused float network without conversions of a layout, ``named`` are the nodes
    that stay in float anyway. ConfigError: the scales are too far apart.
    """

    def __init__(
        self,
        graph: Graph,
        values: Mapping[str, Affine],
        named: Mapping[str, str],
        linear: str,
    ) -> None:
        self.graph, self._values, self._named = graph, values, named
        self._linear = linear
        self._whole = self._quantised({})
        own = (node for node in graph.nodes if node.name in self._whole.computed)
        self.operators = [node for node in own if not self._whole.only_moves(node)]
        """Nodes that may be computed with integers, except those that only move data."""

    def keeping(self, kept: Mapping[str, str]) -> frozenset[str]:
        """Returns the values that the network rounds that has these nodes in float, too."""
        return frozenset(self._quantised(kept).numbers)

    def alone(self, node: Node) -> Rounding:
        """Returns what one operator rounds beside its weights: its value, and what it reads."""
        dynamic = self._linear == DYNAMIC and is_linear(node)
        rows, numbers = frozenset(node.inputs[:1] if dynamic else ()), self._whole.numbers
        ends = {node.name, *node.inputs} - rows
        if rows:  # its value is one of real numbers
            ends -= {node.name}
        values = {name: numbers[name].affine for name in ends & numbers.keys()}
        return Rounding(values, rows)

    def in_int8(self, kept: Mapping[str, str]) -> frozenset[str]:
        """Returns the operators that are computed with integers if these nodes are not."""
        return frozenset(node.name for node in self.operators) & self._quantised(kept).computed

    def _quantised(self, kept: Mapping[str, str]) -> Quantiser:
        made = Quantiser(self.graph, self._values, {**self._named, **kept}, self._linear)
        made.run()
        return made
