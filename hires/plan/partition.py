"""Where is the network cut into stages?

A layer is a run of nodes that begins with an operation that has a weight matrix (convolution,
linear); cuts fall between layers. Stages are balanced by FLOPs per rank, so that a stage in four
tiles gets four times the work; among cuts whose slowest stage is within 5 % of the best, the one
that the fewest numbers cross wins.
"""

from __future__ import annotations

import itertools
import math

from hires.plan.graph import Graph

SLACK = 1.05
HEAVY = ("conv2d", "conv_transpose2d", "linear")
"""Operations that begin a layer."""


def layer_starts(graph: Graph) -> list[int]:
    """Returns the index of the first node of every layer."""
    heavy = [
        index
        for index, node in enumerate(graph.nodes)
        if any(len(graph.params[name].shape) > 1 for name in node.params) and node.kind in HEAVY
    ]
    starts = [0, *heavy[1:]] if heavy else [0]
    return [start for start in starts if start == 0 or _can_cut(graph, start)]


def partition(graph: Graph, num_ranks: list[int], balance: list[int] | None) -> list[int]:
    """Returns the index of every stage's first node, then the number of nodes.

    Args:
        graph: the network.
        num_ranks: ranks that share each stage; at most as many stages as the network has layers.
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
    crossing = [cut_elements(graph, start) for start in starts]
    chosen = _cheapest_cuts(flops, crossing, num_ranks)
    return [*(starts[index] for index in chosen), len(graph.nodes)]


def cut_values(graph: Graph, index: int) -> list[str]:
    """Returns the values that are made before node ``index`` and read at or after it."""
    made = [node.name for node in graph.nodes[:index]]
    return [name for name in made if graph.consumers.get(name, [0])[-1] >= index]


def cut_elements(graph: Graph, index: int) -> int:
    """Returns how many numbers cross a cut before node ``index``, one microbatch."""
    return sum(graph.by_name[name].num_elements for name in cut_values(graph, index))


def _can_cut(graph: Graph, index: int) -> bool:
    """Whether only floating-point tensors cross a cut: no lists of tensors, masks or indices."""
    crossing = [graph.by_name[name] for name in cut_values(graph, index)]
    return all(node.shape is not None and "float" in (node.dtype or "") for node in crossing)


def _cheapest_cuts(flops: list[int], elements: list[int], num_ranks: list[int]) -> list[int]:
    """Returns the first layer of every stage.

    Dynamic programming: the fewest numbers that cross, of all cuts whose slowest stage is within
    SLACK of the fastest possible.
    """
    total = [0, *itertools.accumulate(flops)]
    limit = _smallest_maximum(total, num_ranks) * SLACK
    n = len(flops)
    # best[k][i]: (numbers that cross, first layers) of k stages that hold the layers before i.
    best: list[dict[int, tuple[int, list[int]]]] = [{0: (0, [])}]
    for ranks in num_ranks:
        row: dict[int, tuple[int, list[int]]] = {}
        for start, (sent, cuts) in best[-1].items():
            here = sent + (elements[start] if 0 < start < n else 0)
            for end in range(start + 1, n + 1):
                if total[end] - total[start] > limit * ranks:
                    break
                if end not in row or here < row[end][0]:
                    row[end] = (here, [*cuts, start])
        best.append(row)
    return best[-1][n][1]


def _smallest_maximum(total: list[int], num_ranks: list[int]) -> float:
    """Returns the FLOPs per rank of the slowest stage in the best balance.

    Args:
        total: FLOPs of the layers before each layer, and of all.
        num_ranks: ranks of each stage.
    """
    n = len(total) - 1
    row = [math.inf] + [work / num_ranks[0] for work in total[1:]]  # one stage, the layers before i
    for stage, ranks in enumerate(num_ranks[1:], start=1):
        longer = [math.inf] * (n + 1)
        for end in range(stage + 1, n + 1):
            for start in range(end - 1, stage - 1, -1):
                own = (total[end] - total[start]) / ranks
                if own >= longer[end]:
                    break
                longer[end] = min(longer[end], max(row[start], own))
        row = longer
    return row[n]
