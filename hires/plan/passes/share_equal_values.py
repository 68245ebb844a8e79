r"""Computes a value once that several nodes compute alike, as ReLUs of one map in several branches.

    x -> relu1 -> conv1                 x -> relu1 -> conv1
    x -> relu2 -> conv2                       \-----> conv2

Nodes are equal if operator, arguments and parameters are, and neither draws random numbers nor
writes a buffer. Sharing must cost neither messages nor memory, so only equal nodes become one that
are the only readers of what they read: their value takes the place of that. This comes before
layers are fused, because the one that is left may be fused into its maker.
"""

from __future__ import annotations

import dataclasses
import json
import math

from hires.plan.conversions import renamed
from hires.plan.event import BYTES
from hires.plan.graph import INPUT, Graph, Node
from hires.plan.operators.operator_facts import is_random
from hires.plan.operators.operator_table import updates_statistics
from hires.plan.passes.graph_edits import edited


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
    fixed = _fixed(graph)
    for node in graph.nodes:
        if is_random(node) or updates_statistics(node) or not fixed[1].isdisjoint(node.params):
            continue
        read = renamed(node, {name: first.get(name, name) for name in node.inputs}).args
        facts = node.op, read, node.shape, node.dtype, node.needs_grad
        key = json.dumps(facts, sort_keys=True)
        if key not in groups or node.name not in fixed[0]:  # what the network returns stays
            group = groups.setdefault(key, [])
            group.append(node.name)
            first[node.name] = group[0]
    return [group for group in groups.values() if len(group) > 1]


def _fixed(graph: Graph) -> tuple[set[str], set[str]]:
    """Returns the values that the network returns or keeps, and the buffers that it writes."""
    return {graph.output, *graph.updates.values()}, {*graph.updates}


def _replaces_inputs(graph: Graph, names: list[str]) -> bool:
    """Whether nothing else reads what equal nodes read, and their value is no larger."""
    node, fixed = graph.by_name[names[0]], _fixed(graph)[0]
    for value in node.inputs:
        readers = {graph.nodes[index].name for index in graph.consumers[value]}
        if value == INPUT or value in fixed or not readers <= {*names}:
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
        values = {one: kept.name if one in gone else one for one in node.inputs}
        nodes[node.name] = renamed(node, values)
    left = {name: why for name, why in graph.kept.items() if name not in gone}
    made = edited(graph, nodes, {})
    return dataclasses.replace(made, kept=left, shared=graph.shared + len(others))


def _num_bytes(node: Node) -> int:
    if node.shape is None:
        return 0
    return math.prod(node.shape) * BYTES.get(node.dtype or "", 4)
