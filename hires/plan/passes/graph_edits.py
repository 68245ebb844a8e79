"""Replaces nodes of a graph, and finds those that a pass may replace."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from hires.plan.graph import Graph, Node, Parameter


def edited(
    graph: Graph, nodes: Mapping[str, Node | None], params: Mapping[str, Parameter]
) -> Graph:
    """Returns a graph in which some nodes are others, or gone, with new parameters.

    Parameters that are no longer needed are left out.
    """
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
    if len(readers) != 1 or value == graph.output or value in graph.updates.values():
        return None
    return graph.nodes[readers[0]]


def is_alone(behind: Node, node: Node) -> bool:
    """Whether a node makes a value like that of another one, from values alone."""
    return behind.shape == node.shape and behind.dtype == node.dtype and not behind.params


def constant_params(node: Node, graph: Graph, *names: str) -> dict[str, str] | None:
    """Returns the parameters that arguments of a node hold, without those that are None.

    None: one of them is a value, or a buffer that the network writes.
    """
    params: dict[str, str] = {}
    for name in names:
        arg: Any = node.args.get(name)
        if arg is None:
            continue
        if not isinstance(arg, dict) or list(arg) != ["param"] or arg["param"] in graph.updates:
            return None
        params[name] = arg["param"]
    return params
