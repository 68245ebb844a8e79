"""Makes a norm with stored statistics, and the activation behind it, one operator.

    add -> batch_norm -> relu        fused_norm(add, scale, shift, activation=["relu"])

It serves norms that no layer before them could take, as those before the convolutions of a block:
scale and shift of each channel are computed at the start of a rank, and the map is read once.
"""

from __future__ import annotations

from hires.plan.graph import Graph, Node, Parameter
from hires.plan.operators.operator_facts import facts_of
from hires.plan.operators.operator_table import has_stored_statistics
from hires.plan.passes.fold_norms import NORM_ROLES
from hires.plan.passes.graph_edits import constant_params, edited, is_alone, sole_reader


def fuse_norms(graph: Graph) -> Graph:
    """Returns the network with such norms of maps (n, C, H, W) as fused ones."""
    nodes: dict[str, Node | None] = {}
    params: dict[str, Parameter] = {}
    for norm in graph.nodes:
        kept = constant_params(norm, graph, *NORM_ROLES) if has_stored_statistics(norm) else None
        if kept is None or len(norm.shape or []) != 4 or len(norm.inputs) != 1:
            continue
        behind, activation = sole_reader(graph, norm.name), None
        if behind is not None and is_alone(behind, norm):
            describe = facts_of(behind.kind).activation
            activation = None if describe is None else describe(behind)
        last = norm if activation is None or behind is None else behind
        names = f"{last.name}:scale", f"{last.name}:shift"
        params |= zip(names, _parameters(norm, kept, graph), strict=True)
        args = {"input": {"value": norm.inputs[0]}, "activation": activation}
        args |= {"weight": {"param": names[0]}, "bias": {"param": names[1]}}
        facts = norm.shape, norm.dtype, norm.layer
        nodes |= {norm.name: None}
        nodes[last.name] = Node(last.name, "fused_norm.default", args, *facts, norm.flops)
    return edited(graph, nodes, params) if nodes else graph


def _parameters(norm: Node, kept: dict[str, str], graph: Graph) -> list[Parameter]:
    roles = {NORM_ROLES[name]: param for name, param in kept.items()}
    common = {"roles": [*roles], "params": [*roles.values()], "eps": norm.args["eps"]}
    held, channels = graph.params[roles["mean"]], (norm.shape or [])[1:2]
    makes = "norm_scale", "folded_bias"
    recipes = ({"make": make, **common} for make in makes)
    return [Parameter(channels, held.dtype, True, recipe=recipe) for recipe in recipes]
