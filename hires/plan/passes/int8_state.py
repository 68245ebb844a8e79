"""Replaces operators by those of unsigned 8-bit integers, where they exist.

    float      input -> conv1 -> pool -> silu -> conv2 -> output
    quantised  input -> quantize -> conv1 -> pool -> dequantize -> silu -> quantize -> conv2 ...

How a value's integers stand for real numbers is given: the scale and the zero point that a
calibration found. Each operator has its rule in ``hires.plan.passes.int8_rules``. One without a
rule, one that is kept by name, and one whose values have no scale stay in float, between a
dequantize and a quantize; ``Graph.kept`` has the reason. A value that no reader takes as integers
is computed in float, as the scores of a classifier: so it is not rounded.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from hires.core.config.precision_config import DYNAMIC, INT8, STATIC
from hires.core.errors import ConfigError
from hires.core.registry import imported
from hires.plan.graph import INPUT, Graph, Node, Parameter, renamed
from hires.plan.operators.operator_facts import facts_of
from hires.plan.passes.fuse import with_nodes
from hires.quant.affine import FACTOR_LIMIT, LARGEST, Affine

UINT8 = "uint8"
FOLLOWS = "its input is computed in float"
"""Why a node with an int8 rule stays in float."""
_FACTORS = ("factor", "other_factor")


class QuantisedValue(NamedTuple):
    """A value as unsigned integers."""

    name: str
    affine: Affine

    @property
    def ref(self) -> dict[str, str]:
        """As an argument."""
        return {"value": self.name}


class StaysFloat(Exception):  # noqa: N818 an answer, no failure
    """Why a node is computed in float, in words."""


Rule = Callable[["Quantiser", Node], None]
"""Appends what computes a node with integers; StaysFloat: it cannot."""

_MOVED = "hires.plan.passes.int8_rules:moved"


def rule_of(node: Node) -> Rule | None:
    """Returns the rule of an operator, of which those that move numbers share one; None: none."""
    facts = facts_of(node.kind)
    rule: Rule | None = imported(facts.int8 or (_MOVED if facts.is_selection else None))
    return rule


def is_linear(node: Node) -> bool:
    """Whether ``quant.linear`` is about a node: it is a product with a weight of its own."""
    facts = facts_of(node.kind)
    return facts.product is not None and facts.multiplies is not None


class Quantiser:
    """The quantised network while it is made, and what a rule needs of it."""

    def __init__(
        self,
        graph: Graph,
        values: Mapping[str, Affine],
        kept: Mapping[str, str],
        linear: str = STATIC,
        largest: int = LARGEST[INT8],
    ) -> None:
        self.graph, self.values, self.kept, self.linear = graph, values, dict(kept), linear
        self.largest = largest
        self.nodes: list[Node] = []
        self.params: dict[str, Parameter] = {}
        self.numbers: dict[str, QuantisedValue] = {}
        """Values that are quantised."""
        self.computed: set[str] = set()
        """Nodes of the network that are computed with integers."""
        self._reals: dict[str, str] = {INPUT: INPUT}
        self._layer = ""

    def run(self) -> Graph:
        """Returns the network, with the reasons for what stays in float."""
        for node in self.graph.nodes:
            self._layer = node.layer
            if reason := self.tried(node):
                self.nodes.append(renamed(node, {one: self.real(one) for one in node.inputs}))
                self._reals[node.name] = node.name
                if reason != FOLLOWS and not self.only_moves(node):
                    self.kept.setdefault(node.name, reason)
            else:
                self.computed.add(node.name)
        self._finish_output()
        graph = dataclasses.replace(self.graph, nodes=self.nodes)
        graph = with_nodes(graph, {}, self.params)
        made = {node.name for node in graph.nodes}
        kept = {name: why for name, why in self.kept.items() if name in made}
        return dataclasses.replace(graph, kept=kept)

    def tried(self, node: Node) -> str:
        """Computes a node with integers by its rule; returns why it cannot, else nothing."""
        if reason := self._why_float(node):
            return reason
        num_nodes, params, rule = len(self.nodes), set(self.params), rule_of(node)
        assert rule is not None
        try:
            rule(self, node)
        except StaysFloat as error:  # what its rule has appended is dropped
            gone = {made.name for made in self.nodes[num_nodes:]}
            del self.nodes[num_nodes:]
            self.params = {name: fact for name, fact in self.params.items() if name in params}
            self.numbers = {v: one for v, one in self.numbers.items() if one.name not in gone}
            self._reals = {value: name for value, name in self._reals.items() if name not in gone}
            return str(error)
        return ""

    def integers(self, value: str, why: str = "its input has no scale") -> QuantisedValue:
        """Returns a value as integers, quantised where it is float; StaysFloat: it has no scale."""
        if value not in self.numbers and value in self.values and value in self._reals:
            affine = self.values[value]
            shape, name = self.graph.shape(value), f"{value}.quantized"
            args = {"input": {"value": self._reals[value]}, **_scale_args(affine)}
            self.add(name, "quantize", args, shape)
            self.numbers[value] = QuantisedValue(name, affine)
        if value not in self.numbers:
            raise StaysFloat(why)
        return self.numbers[value]

    def only_input(self, node: Node) -> QuantisedValue:
        """Returns the only input of a node; StaysFloat: it is not quantised."""
        first, inputs = next(iter(node.args.values())), node.inputs
        if len(inputs) != 1 or first != {"value": inputs[0]} or inputs[0] not in self.numbers:
            raise StaysFloat(FOLLOWS)
        return self.numbers[inputs[0]]

    def real(self, value: str) -> str:
        """Returns the name of a value as real numbers."""
        if value not in self._reals:
            numbers, name = self.numbers[value], f"{value}.real"
            args = {"input": numbers.ref, **_scale_args(numbers.affine)}
            self.add(name, "dequantize", args, self.graph.shape(value), "float32")
            self._reals[value] = name
        return self._reals[value]

    def has_int8_reader(self, value: str) -> bool:
        """Whether some reader of a value may compute with integers."""
        readers = (self.graph.nodes[index] for index in self.graph.consumers.get(value, []))
        reals = self.linear == DYNAMIC
        return any(not (self._why_float(node) or (reals and is_linear(node))) for node in readers)

    def only_moves(self, node: Node) -> bool:
        """Whether a node computes nothing from the images, so that its place is its input's."""
        facts = facts_of(node.kind)
        return facts.is_selection or facts.view or node.name not in self.graph.of_images

    def add(
        self,
        name: str,
        kind: str,
        args: dict[str, Any],
        shape: list[int] | None,
        dtype: str = UINT8,
        flops: int = 0,
    ) -> dict[str, str]:
        """Appends a node; returns it as an argument. ConfigError: scales are too far apart."""
        if any(not abs(args.get(key, 0.0)) <= FACTOR_LIMIT for key in _FACTORS):
            raise ConfigError(
                f"the scales of {name} and of what it reads are too far apart: a factor between "
                f"them is above {FACTOR_LIMIT:.3g}; calibrate again with `hires quantize`"
            )
        op = kind if "." in kind else f"{kind}.default"
        self.nodes.append(Node(name, op, args, shape, dtype, self._layer, flops))
        return {"value": name}

    def emit(self, node: Node, kind: str, args: dict[str, Any], affine: Affine | None) -> None:
        """Appends the operator that computes a node's value; without ``affine`` as real numbers."""
        dtype = "float32" if affine is None else UINT8
        self.add(node.name, kind, args, node.shape, dtype, node.flops)
        if affine is None:
            self._reals[node.name] = node.name
        else:
            self.numbers[node.name] = QuantisedValue(node.name, affine)

    def param(self, name: str, shape: list[int], dtype: str, recipe: dict[str, Any]) -> Any:
        """Adds a tensor that ranks compute; returns it as an argument."""
        self.params[name] = Parameter(shape, dtype, False, recipe=recipe)
        return {"param": name}

    def _why_float(self, node: Node) -> str:
        if node.name in self.kept:
            return self.kept[node.name]
        if rule_of(node) is None:
            return f"{node.kind} has no rule for 8-bit integers"
        if node.shape is None or node.name not in self.graph.of_images:
            return "it is no map of the image"
        return "" if "float" in (node.dtype or "") else "it is no map of real numbers"

    def _finish_output(self) -> None:
        # The network returns real numbers, under the name of its output.
        output = self.graph.output
        if output in self._reals:
            return
        numbers, inner = self.numbers[output], f"{output}.quantized"
        for index, node in enumerate(self.nodes):
            name = inner if node.name == output else node.name
            self.nodes[index] = dataclasses.replace(renamed(node, {output: inner}), name=name)
        self._layer = self.graph.by_name[output].layer
        args = {"input": {"value": inner}, **_scale_args(numbers.affine)}
        self.add(output, "dequantize", args, self.graph.shape(output), "float32")


def _scale_args(affine: Affine) -> dict[str, Any]:
    return {"scale": affine.scale, "zero_point": affine.zero_point}
