"""Computes values that depend on parameters alone once, at the start of a rank.

    weight_g, weight_v -> norm -> div -> mul -> conv2d(x, .)       conv2d(x, "mul:value")

A view of a parameter stays: to keep a copy of it costs memory and saves nothing. So does a value
that is much larger than what it is computed from.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from hires.plan.graph import Graph, Node, Parameter, ancestors, plain
from hires.plan.operators.operator_facts import facts_of, is_random
from hires.plan.passes.graph_edits import edited

SMALL = 2**16
"""Numbers of a value that is kept however few it is computed from."""


def fold_constants(graph: Graph, dtype: str) -> Graph:
    """Returns the network without such values; ``dtype`` is that of the run's parameters."""
    folded = _folded(graph, dtype)
    views = {n.name for n in graph.nodes if n.name not in graph.of_images and facts_of(n.kind).view}
    fixed = {graph.output, *graph.updates.values()}
    kept, read, params = set[str](), set[str](), dict[str, Parameter]()
    for node in reversed(graph.nodes):
        if node.name in folded:
            if node.name in read:
                params[f"{node.name}:value"] = _parameter(node, graph, dtype)
        elif node.name not in views or node.name in read | fixed:
            kept.add(node.name)
            read |= {*node.inputs}
    if not params:
        return graph
    nodes: dict[str, Node | None] = {}
    for node in graph.nodes:
        if node.name not in kept:
            nodes[node.name] = None
        elif not folded.isdisjoint(node.inputs):
            args = {key: _replaced(arg, folded.__contains__) for key, arg in node.args.items()}
            nodes[node.name] = dataclasses.replace(node, args=args)
    return edited(graph, nodes, params)


def _folded(graph: Graph, dtype: str) -> set[str]:
    """Returns the values that ranks compute at their start."""
    folded, views = set[str](), set[str]()
    for node in graph.nodes:
        fixed = node.name == graph.output or node.name in graph.updates.values()
        written = not graph.updates.keys().isdisjoint(node.params)
        inner = folded | views >= {*node.inputs} and node.name not in graph.of_images
        if fixed or written or not inner or node.shape is None or is_random(node):
            continue
        if facts_of(node.kind).view:
            views.add(node.name)
        elif ("float" not in (node.dtype or "") or node.dtype == dtype) and _pays(node, graph):
            folded.add(node.name)
    return folded


def _pays(node: Node, graph: Graph) -> bool:
    """Whether a value is no larger than the parameters that it is computed from, or small."""
    if "complex" in (node.dtype or ""):
        return False
    behind = ancestors(graph.by_name, node.name)
    names = {name for value in behind for name in graph.by_name[value].params}
    numbers = sum(math.prod(graph.params[name].shape) for name in names)
    return node.num_elements <= max(numbers, SMALL)


def _parameter(node: Node, graph: Graph, dtype: str) -> Parameter:
    behind = ancestors(graph.by_name, node.name)
    nodes = [one for one in graph.nodes if one.name in behind]
    names = list(dict.fromkeys(name for one in nodes for name in one.params))
    recipe = {"make": "computed", "params": names, "dtype": dtype, "value": node.name}
    recipe["nodes"] = plain(nodes)
    assert node.shape is not None
    return Parameter(node.shape, node.dtype or dtype, False, recipe=recipe)


def _replaced(arg: Any, is_folded: Callable[[str], bool]) -> Any:
    if isinstance(arg, list):
        return [_replaced(item, is_folded) for item in arg]
    if isinstance(arg, dict) and list(arg) == ["value"] and is_folded(arg["value"]):
        return {"param": f"{arg['value']}:value"}
    return arg
