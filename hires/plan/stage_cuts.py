"""Cuts the layers of a network into stages by what a stage costs, whatever that is.

layers   | 0 | 1 | 2 | 3 | 4 | 5 |        every cut has a slowest stage;
stages   |   0   | 1 |     2     |        the one whose slowest costs least wins
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence


def cut_of_least(
    num_stages: int, ends: Sequence[int], cost_of: Callable[[int, int, int], float]
) -> tuple[list[int], float]:
    """Returns the first layer of every stage, then the number of layers, and the slowest's cost.

    A dynamic program over (stages so far, layers so far). Every stage has a layer at the least.

    Args:
        num_stages: at most as many as there are layers.
        ends: first node of every layer, then the number of nodes.
        cost_of: (stage, first node, node after its last) -> its cost, no less with more layers.
    """
    slowest = [0.0 if n == 0 else math.inf for n in range(len(ends))]
    best: list[list[int]] = []
    for stage in range(num_stages):
        row, before = [math.inf] * len(ends), [0] * len(ends)
        for last in range(stage + 1, len(ends)):
            for first in range(last - 1, stage - 1, -1):
                own = cost_of(stage, ends[first], ends[last])
                if own >= row[last]:
                    break
                if max(slowest[first], own) < row[last]:
                    row[last], before[last] = max(slowest[first], own), first
        slowest = row
        best.append(before)
    cut = [len(ends) - 1]
    for before in reversed(best):
        cut.append(before[cut[-1]])
    cut.reverse()
    return cut, slowest[-1]
