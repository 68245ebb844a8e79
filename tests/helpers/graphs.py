"""Graphs written by hand: what plans look at, without torch."""

from __future__ import annotations

from typing import Any

from hires.plan.graph import INPUT, Graph, Node, Parameter


def node(
    name: str, kind: str, reads: list[str], shape: list[int] | None, **facts: Any
) -> tuple[Node, dict[str, Parameter]]:
    """Returns a node of the values ``reads``, and its weight if it is a convolution."""
    args: dict[str, Any] = {f"input{i}": {"value": value} for i, value in enumerate(reads)}
    params = {}
    if kind == "conv2d":
        args["weight"] = {"param": f"{name}.weight"}
        params[f"{name}.weight"] = Parameter([1, 1, 1, 1], "float32", True)
    facts = {"dtype": "float32", "layer": name, "needs_grad": True, **facts}
    return Node(name, f"{kind}.default", args, shape, **facts), params


def graph_of(*made: tuple[Node, dict[str, Parameter]], image: tuple[int, ...] = (1, 1, 8, 8)):
    """Returns the graph of these nodes, which returns the last one's value."""
    params = {name: fact for _, own in made for name, fact in own.items()}
    nodes = [one for one, _ in made]
    return Graph(nodes, nodes[-1].name, list(image), params)


def cut_values(graph: Graph, index: int) -> list[str]:
    """Returns the values that are made before node ``index`` and read at or after it."""
    made = [one.name for one in graph.nodes[:index]]
    return [name for name in made if graph.consumers.get(name, [0])[-1] >= index]


def chain(costs: list[tuple[int, int]], between: int = 0) -> Graph:
    """Returns convolutions c0, c1, ... of these (FLOPs, numbers in the value), one after another.

    Args:
        costs: of each convolution.
        between: free operations after each of them.
    """
    made, last = [], INPUT
    for index, (flops, elements) in enumerate(costs):
        made.append(node(f"c{index}", "conv2d", [last], [1, elements], flops=flops))
        last = f"c{index}"
        for extra in range(between):
            made.append(node(f"c{index}.{extra}", "relu", [last], [1, elements]))
            last = f"c{index}.{extra}"
    return graph_of(*made)
