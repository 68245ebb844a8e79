"""Quantises the network of a run with ``precision=int8`` by the scales that its config names."""

from __future__ import annotations

import fnmatch

from hires.core.config.run_config import RunConfig
from hires.core.errors import ConfigError
from hires.core.precisions import INT8
from hires.core.registry import offer
from hires.plan.calibrated_values import params_digest
from hires.plan.graph import Graph
from hires.plan.operators.operator_facts import facts_of
from hires.plan.passes import (  # noqa: F401, they register the rules
    int8_pointwise,
    int8_rules,
)
from hires.plan.passes.quantise import quantised
from hires.quant.scales import linear_way, scales_of, stored_scales


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
    if stored_scales(config) is not None:
        _require_float(graph, config, {n: why for n, why in named.items() if n not in scales.kept})
    kept = {**scales.kept, **named}
    return quantised(graph, scales.values, kept, linear_way(config, scales))


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
