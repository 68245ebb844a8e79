"""Makes several nodes one: norms become part of layers, sums and activations, too.

    conv1 -> bn1 -> relu1               fused_conv2d(weight', bias', activation=["relu"])
    conv2 -> add(conv2, x) -> relu      fused_conv2d(..., other=x, activation=["relu"])
    add -> batch_norm -> relu           fused_norm(add, scale, shift, activation=["relu"])
    linear -> gelu                      fused_linear(..., activation=["gelu", "none"])

A norm with stored statistics is folded into the convolution or linear layer before it:

    y = scale * (W x + b - mean) + shift = (scale * W) x + (scale * (b - mean) + shift),
    scale = weight / sqrt(var + eps)

if nobody else reads the value in between and the network writes none of the tensors. Norms that no
layer before them could take are one operator with the activation behind them, whose scale and shift
are computed at the start of a rank, so that the map is read once.

A kernel that adds and activates while a result is in the cache writes it once in place of three
times. ``other`` has the shape of the result: it then lies on ranks as the result does. Of two
convolutions that are added, the later one takes the sum, as its ``other`` is there by then.

Source:
    Jacob et al., "Quantization and training of neural networks for efficient
    integer-arithmetic-only inference", CVPR 2018, section 3.2 (folded norms).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from hires.plan.graph import INPUT, Graph, Node, Parameter, renamed
from hires.plan.operators.operator_facts import activation_of, facts_of, num_draws
from hires.plan.operators.operator_table import has_stored_statistics
from hires.plan.operators.windows import pair

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
        graph = with_nodes(graph, nodes, params)


def folded_params(
    source: Node, norm: Node, tensors: dict[str, str], graph: Graph
) -> dict[str, Parameter]:
    """Returns weight and bias of a layer with a norm in it; ``tensors``: of both, by roles."""
    weight, channels = graph.params[tensors["weight"]], (norm.shape or [])[1:2]
    groups = source.args["groups"] if facts_of(source.kind).weight_channels else 0
    recipe = {**norm_recipe("folded_weight", norm, tensors), "transposed_groups": groups}
    folded = {
        "weight": dataclasses.replace(weight, data=None, recipe=recipe),
        "bias": dataclasses.replace(
            weight, shape=channels, data=None, recipe=norm_recipe("folded_bias", norm, tensors)
        ),
    }
    return {f"{norm.name}:{part}": param for part, param in folded.items()}


def norm_recipe(make: str, norm: Node, tensors: Mapping[str, str]) -> dict[str, Any]:
    """Returns how ranks make a tensor of a norm's, and of those of a layer before it by roles."""
    roles = {"roles": [*tensors], "params": [*tensors.values()]}
    return {"make": make, **roles, "eps": norm.args["eps"]}


def norm_tensors(norm: Node, graph: Graph) -> dict[str, str] | None:
    """Returns the tensors of a norm by their roles; None: not of stored statistics, or written."""
    own = constant_params(norm, graph, *NORM_ROLES) if has_stored_statistics(norm) else None
    return None if own is None else {NORM_ROLES[name]: param for name, param in own.items()}


def _tensors(source: Node, norm: Node, graph: Graph) -> dict[str, str] | None:
    """Returns the tensors of both by their roles; None if the norm cannot be folded."""
    if not has_stored_statistics(norm) or sole_reader(graph, source.name) is not norm:
        return None
    if next(iter(norm.args.values())) != {"value": source.name} or source.dtype != norm.dtype:
        return None
    own, kept = constant_params(source, graph, "weight", "bias"), norm_tensors(norm, graph)
    if own is None or kept is None or "weight" not in own:
        return None
    # Without a batch the norm would take other dims for the channels.
    dims = len(graph.params[own["weight"]].shape)
    if facts_of(source.kind).weight_channels is None or len(source.shape or []) != dims:
        return None
    return own | kept


def fuse_norms(graph: Graph) -> Graph:
    """Returns the network with such norms of maps (n, C, H, W) as fused ones."""
    nodes: dict[str, Node | None] = {}
    params: dict[str, Parameter] = {}
    for norm in graph.nodes:
        kept = norm_tensors(norm, graph)
        if kept is None or len(norm.shape or []) != 4 or len(norm.inputs) != 1:
            continue
        behind, activation = sole_reader(graph, norm.name), None
        if behind is not None and is_like(behind, norm):
            activation = activation_of(behind)
        last = norm if activation is None or behind is None else behind
        args = {"input": {"value": norm.inputs[0]}, "activation": activation}
        channels, dtype = (norm.shape or [])[1:2], graph.params[kept["mean"]].dtype
        for role, part, make in (
            ("weight", "scale", "norm_scale"),
            ("bias", "shift", "folded_bias"),
        ):
            recipe, name = norm_recipe(make, norm, kept), f"{last.name}:{part}"
            params[name] = Parameter(channels, dtype, True, recipe=recipe)
            args[role] = {"param": name}
        nodes |= {norm.name: None}
        nodes[last.name] = Node(
            last.name, "fused_norm.default", args, norm.shape, norm.dtype, norm.layer, norm.flops
        )
    return with_nodes(graph, nodes, params) if nodes else graph


def fuse_convolutions(graph: Graph) -> Graph:
    """Returns the network with its layers as fused ones where something can be fused."""
    nodes: dict[str, Node | None] = {}
    for node in reversed(graph.nodes):  # of two that are added the later one comes first
        target = facts_of(node.kind).fused
        if target and (len(node.shape or []) == 4 or not facts_of(target).residual_arg):
            parts, args = _behind(node, graph, nodes)
            if parts:
                last = parts[-1]
                flops = node.flops + sum(part.flops for part in parts)
                nodes |= dict.fromkeys(part.name for part in (node, *parts))
                nodes[last.name] = dataclasses.replace(
                    node,
                    name=last.name,
                    op=f"{target}.default",
                    args={**node.args, **args},
                    needs_grad=last.needs_grad,
                    flops=flops,
                )
    return with_nodes(graph, nodes, {}) if nodes else graph


def _behind(
    node: Node, graph: Graph, replaced: dict[str, Node | None]
) -> tuple[list[Node], dict[str, Any]]:
    """Returns the nodes that a layer takes with it, and what they become of its arguments."""
    parts: list[Node] = []
    sums = bool(facts_of(facts_of(node.kind).fused).residual_arg)
    args: dict[str, Any] = {"other": None, "activation": None} if sums else {"activation": None}
    behind = sole_reader(graph, node.name)
    free = sums and behind is not None and behind.name not in replaced
    other = _added(node, behind, graph) if behind is not None and free else None
    if behind is not None and other is not None:
        parts, args["other"] = [behind], {"value": other}
        behind = sole_reader(graph, behind.name)
    if behind is not None and behind.name not in replaced and is_like(behind, node):
        args["activation"] = activation_of(behind)
        parts += [behind] if args["activation"] is not None else []
    return parts, args


def _added(node: Node, behind: Node, graph: Graph) -> str | None:
    """Returns the value that a node adds to a convolution's; None: it does something else."""
    if behind.op != "add.Tensor" or behind.args["alpha"] != 1 or not is_like(behind, node):
        return None
    others = [name for name in behind.inputs if name != node.name]
    if len(others) != 1 or graph.shape(others[0]) != node.shape:
        return None
    maker = graph.by_name.get(others[0])
    if others[0] == INPUT or maker is None or maker.dtype != node.dtype:
        return None
    # A window of a stride may leave out pixels of its own map.
    strided = pair(node.args["stride"]) != [1, 1]
    return None if strided and others[0] == node.inputs[0] else others[0]


def drop_identities(graph: Graph) -> Graph:
    """Returns the network without what does nothing in inference, as dropout."""
    names: dict[str, str] = {}  # value -> the one that it equals
    nodes: dict[str, Node | None] = {}
    for node in graph.nodes:
        read = {name: names.get(name, name) for name in node.inputs}
        is_dropout = facts_of(node.kind).positional != "" and node.args.get("train") is False
        if is_dropout and not num_draws(node) and node.name not in graph.results:
            names[node.name], nodes[node.name] = read[node.inputs[0]], None
        elif any(name != own for own, name in read.items()):
            nodes[node.name] = renamed(node, read)
    return with_nodes(graph, nodes, {}) if nodes else graph


def with_nodes(
    graph: Graph, nodes: Mapping[str, Node | None], params: Mapping[str, Parameter]
) -> Graph:
    """Returns a graph in which some nodes are others, or gone, with the parameters it needs."""
    made = [nodes.get(node.name, node) for node in graph.nodes]
    kept = [node for node in made if node is not None]
    every = {**graph.params, **params}
    needed, ahead = set[str](), [*graph.updates, *(name for node in kept for name in node.params)]
    while ahead:
        name = ahead.pop()
        if name in every and name not in needed:
            needed.add(name)
            ahead += (every[name].recipe or {}).get("params", [])
    facts = {name: fact for name, fact in every.items() if name in needed}
    return dataclasses.replace(graph, nodes=kept, params=facts)


def sole_reader(graph: Graph, value: str) -> Node | None:
    """Returns the node that reads a value if it is the only one and the network keeps it inside."""
    readers = graph.consumers.get(value, [])
    is_inner = len(readers) == 1 and value not in graph.results
    return graph.nodes[readers[0]] if is_inner else None


def is_like(behind: Node, node: Node) -> bool:
    """Whether a node makes a value like that of another one, from values alone."""
    return behind.shape == node.shape and behind.dtype == node.dtype and not behind.params


def constant_params(node: Node, graph: Graph, *names: str) -> dict[str, str] | None:
    """Returns the parameters of some arguments; None: one is a value, or a written buffer."""
    params: dict[str, str] = {}
    for name in names:
        arg: Any = node.args.get(name)
        if arg is None:
            continue
        if not isinstance(arg, dict) or list(arg) != ["param"] or arg["param"] in graph.updates:
            return None
        params[name] = arg["param"]
    return params
