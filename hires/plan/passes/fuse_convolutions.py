"""Makes a layer, the sum behind it and the activation behind that one operator.

    conv2 -> add(conv2, x) -> relu        fused_conv2d(..., other=x, activation=["relu"])
    linear -> gelu                        fused_linear(..., activation=["gelu", "none"])

A kernel that adds and activates while a result is in the cache writes it once in place of three
times. The values in between must have no other reader, and ``other`` the shape of the result: it
then lies on ranks as the result does. Of two convolutions that are added, the later one takes the
sum, as its ``other`` is there by then. A linear layer takes an activation alone.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from hires.plan.graph import INPUT, Graph, Node
from hires.plan.operators.operator_facts import facts_of
from hires.plan.operators.windows import pair
from hires.plan.passes.graph_edits import edited, is_alone, sole_reader


def fuse_convolutions(graph: Graph) -> Graph:
    """Returns the network with its layers as fused ones where something can be fused."""
    nodes: dict[str, Node | None] = {}
    for node in reversed(graph.nodes):  # of two that are added the later one comes first
        target = facts_of(node.kind).fused
        if target and (len(node.shape or []) == 4 or not facts_of(target).beside):
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
    return edited(graph, nodes, {}) if nodes else graph


def _behind(
    node: Node, graph: Graph, replaced: dict[str, Node | None]
) -> tuple[list[Node], dict[str, Any]]:
    """Returns the nodes that a layer takes with it, and what they become of its arguments."""
    parts: list[Node] = []
    sums = bool(facts_of(facts_of(node.kind).fused).beside)
    args: dict[str, Any] = {"other": None, "activation": None} if sums else {"activation": None}
    behind = sole_reader(graph, node.name)
    free = sums and behind is not None and behind.name not in replaced
    other = _added(node, behind, graph) if behind is not None and free else None
    if behind is not None and other is not None:
        parts, args["other"] = [behind], {"value": other}
        behind = sole_reader(graph, behind.name)
    if behind is not None and behind.name not in replaced and is_alone(behind, node):
        activation = facts_of(behind.kind).activation
        args["activation"] = None if activation is None else activation(behind)
        parts += [behind] if args["activation"] is not None else []
    return parts, args


def _added(node: Node, behind: Node, graph: Graph) -> str | None:
    """Returns the value that a node adds to a convolution's; None: it does something else."""
    if behind.op != "add.Tensor" or behind.args["alpha"] != 1 or not is_alone(behind, node):
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
