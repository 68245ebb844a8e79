"""Folds norms with stored statistics into the convolution or linear layer before them.

    y = scale * (W x + b - mean) + shift = (scale * W) x + (scale * (b - mean) + shift),
    scale = weight / sqrt(var + eps)

Every output channel of the weight is multiplied by its scale, so the norm costs nothing. It is not
folded if the convolution's value is read by others too, if the norm has the statistics of its own
input, or if the network writes one of the tensors.

Source:
    Jacob et al., "Quantization and training of neural networks for efficient
    integer-arithmetic-only inference", CVPR 2018, section 3.2.
"""

from __future__ import annotations

import dataclasses

from hires.plan.graph import INPUT, Graph, Node, Parameter
from hires.plan.operators.operator_facts import facts_of
from hires.plan.operators.operator_table import has_stored_statistics
from hires.plan.passes.graph_edits import constant_params, edited, sole_reader

NORM_ROLES = {"running_mean": "mean", "running_var": "var", "weight": "scale", "bias": "shift"}
"""Arguments of a norm -> their roles in recipes, where a layer has a weight and a bias, too."""


def fold_norms(graph: Graph) -> Graph:
    """Returns the network without the norms that can be folded."""
    while True:  # a norm may follow another one
        nodes: dict[str, Node | None] = {}
        params: dict[str, Parameter] = {}
        for norm in graph.nodes:
            source = graph.by_name.get(next(iter(norm.inputs), INPUT))
            tensors = None if source is None else _tensors(source, norm, graph)
            if source is not None and tensors is not None:
                own = folded_params(source, norm, tensors, graph)
                weight, bias = ({"param": name} for name in own)
                args = {**source.args, "weight": weight, "bias": bias}
                nodes[source.name], params = None, {**params, **own}
                nodes[norm.name] = dataclasses.replace(
                    source, name=norm.name, args=args, needs_grad=norm.needs_grad
                )
        if not nodes:
            return graph
        graph = edited(graph, nodes, params)


def folded_params(
    source: Node, norm: Node, tensors: dict[str, str], graph: Graph
) -> dict[str, Parameter]:
    """Returns weight and bias of a layer with a norm folded into it, by their names.

    ``tensors`` are those of both by their roles in the recipes.
    """
    weight = graph.params[tensors["weight"]]
    groups = source.args["groups"] if facts_of(source.kind).weight_channels else 0
    common = {"roles": [*tensors], "params": [*tensors.values()], "eps": norm.args["eps"]}
    recipes = (
        {"make": "folded_weight", **common, "transposed_groups": groups},
        {"make": "folded_bias", **common},
    )
    channels = norm.shape or []
    shapes = weight.shape, channels[1:2]
    return {
        f"{norm.name}:{part}": Parameter(shape, weight.dtype, weight.trainable, recipe=recipe)
        for part, shape, recipe in zip(("weight", "bias"), shapes, recipes, strict=True)
    }


def _tensors(source: Node, norm: Node, graph: Graph) -> dict[str, str] | None:
    """Returns the tensors of both by their roles; None if the norm cannot be folded."""
    if not has_stored_statistics(norm) or sole_reader(graph, source.name) is not norm:
        return None
    if next(iter(norm.args.values())) != {"value": source.name} or source.dtype != norm.dtype:
        return None
    own = constant_params(source, graph, "weight", "bias")
    kept = constant_params(norm, graph, *NORM_ROLES)
    if own is None or kept is None or "weight" not in own:
        return None
    # Without a batch the norm would take other dims for the channels.
    dims = len(graph.params[own["weight"]].shape)
    if facts_of(source.kind).weight_channels is None or len(source.shape or []) != dims:
        return None
    return own | {NORM_ROLES[name]: param for name, param in kept.items()}
