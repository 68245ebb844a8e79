"""Leaves out what does nothing in inference: dropout, and other operators that would draw numbers.

A reader of its value reads what went into it; the value that the network returns stays.
"""

from __future__ import annotations

from hires.plan.conversions import renamed
from hires.plan.graph import Graph, Node
from hires.plan.operators.operator_facts import facts_of, num_draws
from hires.plan.passes.graph_edits import edited


def drop_identities(graph: Graph) -> Graph:
    """Returns the network without them."""
    names: dict[str, str] = {}  # value -> the one that it equals
    nodes: dict[str, Node | None] = {}
    for node in graph.nodes:
        read = {name: names.get(name, name) for name in node.inputs}
        if _does_nothing(node) and node.name not in (graph.output, *graph.updates.values()):
            names[node.name], nodes[node.name] = read[node.inputs[0]], None
        elif any(name != own for own, name in read.items()):
            nodes[node.name] = renamed(node, read)
    return edited(graph, nodes, {}) if nodes else graph


def _does_nothing(node: Node) -> bool:
    facts = facts_of(node.kind)
    return facts.positional and node.args.get("train") is False and not num_draws(node)
