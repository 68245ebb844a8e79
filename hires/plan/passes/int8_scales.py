"""Quantises the network of a run with ``precision=int8`` by the scales that its config names.

Also names what a calibration observes, and what makes two networks one for their scales: both of
the fused float graph, whatever the layout, batch and image that it is run with.
"""

from __future__ import annotations

import fnmatch

from hires.core.config.run_config import RunConfig
from hires.core.errors import ConfigError
from hires.core.precisions import INT8
from hires.core.registry import offer
from hires.core.store.frozen import digest
from hires.plan.graph import INPUT, Graph
from hires.plan.operators.operator_facts import facts_of
from hires.plan.passes import (  # noqa: F401, they register the rules
    int8_pointwise,
    int8_rules,
)
from hires.plan.passes.quantise import quantised
from hires.plan.rules import CROP, GATHER
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
    """Returns 16 digits that differ where the parameters and buffers of two networks do.

    They are the network's own: how it was rewritten, cut and tiled makes no difference.
    """
    own = graph.own_params(name for node in graph.nodes for name in node.params)
    return digest([[name, graph.params[name].shape] for name in sorted(own)])
