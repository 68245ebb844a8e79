"""Quantises the network of a run with ``precision=int8`` by the scales that its config names.

Also names what a calibration observes, what makes two networks one for their scales (both of the
fused float graph, whatever the layout, batch and image that it is run with), and what an int8
network rounds of what operators read and make: values, or rows of them.

    conv1 -> relu -> cat -> conv2       relu alone in 8 bits          rounds conv1, relu
      `---------------^                 all but cat                   rounds cat, which conv2 reads

A value is rounded where an operator that makes it or reads it computes with integers.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping
from typing import NamedTuple

from hires.core.config.precision_config import DYNAMIC, INT8, STATIC
from hires.core.config.run_config import RunConfig
from hires.core.errors import ConfigError
from hires.core.registry import offer
from hires.core.store.frozen import digest
from hires.plan.graph import INPUT, Graph, Node
from hires.plan.operators.operator_facts import facts_of
from hires.plan.passes.int8_state import UINT8, Quantiser, is_linear
from hires.plan.rules import CROP, GATHER
from hires.quant.affine import LARGEST, Affine
from hires.quant.scales import scales_of, stored_scales


def quantised(
    graph: Graph,
    values: Mapping[str, Affine],
    kept: Mapping[str, str],
    linear: str = STATIC,
    largest: int = LARGEST[INT8],
) -> Graph:
    """Returns a network that computes with integers what it can; a second time it changes nothing.

    ``values`` hold the scale and zero point of values by name, ``kept`` the nodes that stay in
    float with the reason, ``linear`` where linear layers have the scale of their input from, and
    ``largest`` the integer of a weight that is.
    """
    if any(facts_of(node.kind).quantized for node in graph.nodes):
        return graph
    return Quantiser(graph, values, kept, linear, largest).run()


def quantised_by_config(graph: Graph, config: RunConfig) -> Graph:
    """Returns the network as ``precision=int8`` computes it; another precision leaves it as it is.

    ConfigError: there are no scales, they are of another network, or the file of a quantised one
    lacks what ``quant.keep`` asks for.
    """
    if config.precision.name != INT8:
        return graph
    scales = scales_of(config)
    if scales is None:
        raise ConfigError(
            f"precision={INT8} needs the scales of a calibration; make them with `hires quantize` "
            f"and give quant.scales=FILE.json"
        )
    if any(facts_of(node.kind).quantized for node in graph.nodes):
        return graph
    if scales.network != params_digest(graph):
        key = "weights" if config.quant.scales is None else "quant.scales"
        raise ConfigError(
            f"the scales of {key}={config.quant.scales or config.weights} are of another network: "
            f"its parameters have other names or sizes; calibrate this one with `hires quantize`"
        )
    named = kept_by_name(graph, config)
    linear, weights = config.quant.linear, config.quant.weights
    if stored_scales(config) is not None:  # the file of weights has its own
        _require_float(graph, config, {n: why for n, why in named.items() if n not in scales.kept})
        linear, weights = scales.linear, scales.weight_type
    return quantised(graph, scales.values, {**scales.kept, **named}, linear, LARGEST[weights])


def _require_float(graph: Graph, config: RunConfig, named: dict[str, str]) -> None:
    # What a file holds was made for its own kept layers: others change the scale of a neighbour.
    if named:
        name, key = next(iter(named.items()))
        every = ",".join(config.quant.keep)
        raise ConfigError(
            f"{key}: weights={config.weights} was quantised with {graph.described(name)} in 8 "
            f"bits; quantise the float weights again, with `hires quantize quant.keep=[{every}]`, "
            f"or leave quant.keep out"
        )


def kept_by_name(graph: Graph, config: RunConfig) -> dict[str, str]:
    """Returns the layers of ``quant.keep`` with the reason; ConfigError: a name means none.

    A layer has its own name, and those of the modules that were fused into it.
    """
    kept: dict[str, str] = {}
    named = [(node.name, [node.name, *graph.modules(node)]) for node in graph.nodes]
    for pattern in config.quant.keep:
        layers = [name for name, every in named if fnmatch.filter(every, pattern)]
        if not layers:
            remedy = offer(pattern, dict.fromkeys(one for _, every in named for one in every))
            raise ConfigError(f"quant.keep={pattern} names no layer of the network; {remedy}")
        kept |= dict.fromkeys(layers, f"quant.keep={pattern}")
    return kept


def observed_values(graph: Graph) -> list[str]:
    """Returns the real values that depend on the images, sample by sample, in order."""
    samples = graph.input_shape[0]
    values = [INPUT] if INPUT in graph.consumers else []
    for node in graph.nodes:
        shape = node.shape or []
        if node.name in graph.of_images and "float" in (node.dtype or "") and len(shape) > 1:
            converts = node.kind in (GATHER, CROP)  # nodes of a layout, which another one lacks
            values += [node.name] if shape[0] == samples and not converts else []
    return values


def params_digest(graph: Graph) -> str:
    """Returns 16 digits that differ where two networks' own parameters and buffers do."""
    own = graph.own_params(name for node in graph.nodes for name in node.params)
    return digest([[name, graph.params[name].shape] for name in sorted(own)])


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
        joins = node.dtype == UINT8 and not (facts.is_selection or facts.view)  # under its own kind
        if (facts.quantized or joins) and not facts.only_converts:
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
