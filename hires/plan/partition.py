"""Where is the network cut into stages?

A layer is a run of nodes that begins with an operation that has a weight matrix (convolution,
linear); cuts fall between layers. Stages are balanced by FLOPs; among cuts whose slowest stage is
within 5 % of the best, the one that sends the fewest bytes wins.
"""

from __future__ import annotations

import itertools

from hires.plan.graph import Graph

SLACK = 1.05


def layer_starts(graph: Graph) -> list[int]:
    """Returns the index of the first node of every layer."""
    heavy = [
        index
        for index, node in enumerate(graph.nodes)
        if any(len(graph.params[name].shape) > 1 for name in node.params)
        and node.kind in ("conv2d", "conv_transpose2d", "linear")
    ]
    starts = [0, *heavy[1:]] if heavy else [0]
    return [start for start in starts if start == 0 or _can_cut(graph, start)]


def partition(graph: Graph, num_stages: int, balance: list[int] | None) -> list[int]:
    """Returns the index of every stage's first node, then the number of nodes.

    Args:
        graph: the network.
        num_stages: at most the number of layers.
        balance: layers per stage, summing to the number of layers; None: by FLOPs.
    """
    starts = layer_starts(graph)
    ends = [*starts[1:], len(graph.nodes)]
    if balance is not None:
        counts = [0, *itertools.accumulate(balance)]
        return [*(starts[count] for count in counts[:-1]), len(graph.nodes)]
    flops = [
        sum(node.flops for node in graph.nodes[a:b]) for a, b in zip(starts, ends, strict=True)
    ]
    bytes_cut = [cut_elements(graph, start) for start in starts]
    chosen = _cheapest_cuts(flops, bytes_cut, num_stages)
    return [*(starts[index] for index in chosen), len(graph.nodes)]


def cut_values(graph: Graph, index: int) -> list[str]:
    """Returns the values that are made before node ``index`` and read at or after it."""
    made = [node.name for node in graph.nodes[:index]]
    return [name for name in made if any(i >= index for i in graph.consumers.get(name, []))]


def cut_elements(graph: Graph, index: int) -> int:
    """Returns how many numbers a cut before node ``index`` sends, one microbatch."""
    return sum(graph.by_name[name].num_elements for name in cut_values(graph, index))


def _can_cut(graph: Graph, index: int) -> bool:
    """Whether only tensors cross a cut, no lists of tensors."""
    return all(graph.by_name[name].shape is not None for name in cut_values(graph, index))


def _cheapest_cuts(flops: list[int], elements: list[int], num_stages: int) -> list[int]:
    """Returns the first layer of every stage.

    Dynamic programming twice: the smallest possible maximum of a stage's FLOPs, then the fewest
    bytes whose maximum is within SLACK of it.
    """
    total = [0, *itertools.accumulate(flops)]
    limit = _smallest_maximum(total, num_stages) * SLACK
    n = len(flops)
    # best[k][i]: (elements sent, first layers) of k stages that hold the layers before i.
    best: list[dict[int, tuple[int, list[int]]]] = [{0: (0, [])}]
    for _ in range(num_stages):
        row: dict[int, tuple[int, list[int]]] = {}
        for start, (sent, cuts) in best[-1].items():
            here = sent + (elements[start] if start else 0)
            for end in range(start + 1, n + 1):
                if total[end] - total[start] > limit and end > start + 1:
                    break
                if total[end] - total[start] <= limit and (end not in row or here < row[end][0]):
                    row[end] = (here, [*cuts, start])
        best.append(row)
    return best[-1][n][1]


def _smallest_maximum(total: list[int], num_stages: int) -> int:
    """Returns the FLOPs of the largest stage in the best balance; ``total`` accumulates layers."""
    n = len(total) - 1
    row = list(total)  # one stage holds everything before i
    for stages in range(2, num_stages + 1):
        row = [0] * stages + [
            min(max(row[j], total[i] - total[j]) for j in range(stages - 1, i))
            for i in range(stages, n + 1)
        ]
    return row[n]
