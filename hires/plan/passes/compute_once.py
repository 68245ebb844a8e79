r"""Computes a value once: at the start of a rank if it depends on parameters alone, or for all.

    weight_g, weight_v -> norm -> div -> mul -> conv2d(x, .)       conv2d(x, "mul:value")

A view of a parameter stays: to keep a copy of it costs memory and saves nothing. So does a value
that is much larger than what it is computed from.

    x -> relu1 -> conv1                 x -> relu1 -> conv1
    x -> relu2 -> conv2                       \\-----> conv2

Nodes are equal if operator, arguments and parameters are, and neither draws random numbers nor
writes a buffer. Sharing must cost neither messages nor memory, so only equal nodes become one that
are the only readers of what they read: their value takes the place of that. This comes before
layers are fused, because the one that is left may be fused into its maker.
"""

from __future__ import annotations

import dataclasses
import json

from hires.plan.event import BYTES
from hires.plan.graph import INPUT, Graph, Node, Parameter, ancestors, plain, renamed, rewired
from hires.plan.operators.operator_facts import facts_of, is_random
from hires.plan.operators.operator_table import updates_statistics
from hires.plan.passes.fuse import with_nodes

SMALL = 2**16
"""Numbers of a value that is kept however few it is computed from."""


def fold_constants(graph: Graph, dtype: str) -> Graph:
    """Returns the network without such values; ``dtype`` is that of the run's parameters."""
    folded = _folded(graph, dtype)
    views = {n.name for n in graph.nodes if n.name not in graph.of_images and facts_of(n.kind).view}
    kept, read, params = set[str](), set[str](), dict[str, Parameter]()
    for node in reversed(graph.nodes):
        if node.name in folded:
            if node.name in read:
                params[f"{node.name}:value"] = _parameter(node, graph, dtype)
        elif node.name not in views or node.name in read | graph.results:
            kept.add(node.name)
            read |= {*node.inputs}
    if not params:
        return graph
    nodes: dict[str, Node | None] = {}
    for node in graph.nodes:
        if node.name not in kept:
            nodes[node.name] = None
        elif not folded.isdisjoint(node.inputs):
            inner = (value for value in node.inputs if value in folded)
            refs = {("value", value): {"param": f"{value}:value"} for value in inner}
            nodes[node.name] = rewired(node, refs)
    return with_nodes(graph, nodes, params)


def _folded(graph: Graph, dtype: str) -> set[str]:
    """Returns the values that ranks compute at their start."""
    folded, views = set[str](), set[str]()
    for node in graph.nodes:
        writes = node.name in graph.results or not graph.updates.keys().isdisjoint(node.params)
        inner = folded | views >= {*node.inputs} and node.name not in graph.of_images
        if writes or not inner or node.shape is None or is_random(node):
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
    return node.num_elements <= max(sum(graph.params[n].num_elements for n in names), SMALL)


def _parameter(node: Node, graph: Graph, dtype: str) -> Parameter:
    behind = ancestors(graph.by_name, node.name)
    nodes = [one for one in graph.nodes if one.name in behind]
    names = list(dict.fromkeys(name for one in nodes for name in one.params))
    recipe = {"make": "computed", "params": names, "dtype": dtype, "value": node.name}
    recipe["nodes"] = plain(nodes)
    assert node.shape is not None
    return Parameter(node.shape, node.dtype or dtype, False, recipe=recipe)


def share_equal_values(graph: Graph) -> Graph:
    """Returns the network with equal nodes as one whose value takes the place of their inputs."""
    for names in _equal_nodes(graph):
        if _replaces_inputs(graph, names):
            graph = _with_one(graph, names)
    return graph


def _equal_nodes(graph: Graph) -> list[list[str]]:
    """Returns the names of nodes that compute one value, first to last, for each such value."""
    groups: dict[str, list[str]] = {}
    first: dict[str, str] = {}  # value -> the first one that equals it
    for node in graph.nodes:
        written = not graph.updates.keys().isdisjoint(node.params)
        if is_random(node) or updates_statistics(node) or written:
            continue
        read = renamed(node, {name: first.get(name, name) for name in node.inputs}).args
        facts = node.op, read, node.shape, node.dtype, node.needs_grad
        key = json.dumps(facts, sort_keys=True)
        if key not in groups or node.name not in graph.results:  # what the network returns stays
            group = groups.setdefault(key, [])
            group.append(node.name)
            first[node.name] = group[0]
    return [group for group in groups.values() if len(group) > 1]


def _replaces_inputs(graph: Graph, names: list[str]) -> bool:
    """Whether nothing else reads what equal nodes read, and their value is no larger."""
    node = graph.by_name[names[0]]
    for value in node.inputs:
        readers = {graph.nodes[index].name for index in graph.consumers[value]}
        if value in {INPUT, *graph.results} or not readers <= {*names}:
            return False
    return 0 < _num_bytes(node) <= sum(_num_bytes(graph.by_name[one]) for one in node.inputs)


def _with_one(graph: Graph, names: list[str]) -> Graph:
    """Returns the network with the first of equal nodes alone, if they still read the same."""
    kept, *others = (graph.by_name[name] for name in names)
    if any(other.inputs != kept.inputs for other in others):
        return graph
    gone = {other.name for other in others}
    nodes: dict[str, Node | None] = dict.fromkeys(gone)
    for index in sorted({at for other in others for at in graph.consumers.get(other.name, [])}):
        node = graph.nodes[index]
        nodes[node.name] = renamed(node, dict.fromkeys(gone, kept.name))
    left = {name: why for name, why in graph.kept.items() if name not in gone}
    made = with_nodes(graph, nodes, {})
    return dataclasses.replace(made, kept=left, shared=graph.shared + len(others))


def _num_bytes(node: Node) -> int:
    return node.num_elements * BYTES.get(node.dtype or "", 4)
