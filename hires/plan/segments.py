"""Cuts a stage into segments that the backward pass computes again (``memory.checkpoint``).

    forward    [ segment 0 ] c [ segment 1 ] c [ segment 2 ]     only the crossing values c are kept
    backward                                   [ again, back ]   then segment 1, then segment 0

One segment (``stage``) keeps least between the passes; several (``block``) need less memory while
one of them is computed again. The cuts minimise what all microbatches in flight keep plus the
largest segment.

Source:
    Chen et al., "Training deep nets with sublinear memory cost", 2016.
"""

from __future__ import annotations

import itertools
import math

from hires.plan.graph import Graph
from hires.plan.partition import layer_starts
from hires.plan.plan import Plan, Stage

MAX_CANDIDATES = 160
"""Most places for cuts that are considered, so that planning stays fast for thousands of nodes."""
STEPS = 24
"""Limits on the largest segment that are tried, from the largest node to the whole stage."""


def add_segments(plan: Plan, checkpoint: str) -> None:
    """Sets the segments of every stage: the first node of each, then the index after the last."""
    if checkpoint == "none" or not plan.training:
        return
    for stage in plan.stages:
        if checkpoint == "stage":
            stage.segments = [stage.first, stage.last]
        else:
            stage.segments = cut_segments(plan.graph, stage, _most_in_flight(plan, stage.index))


def cut_segments(graph: Graph, stage: Stage, in_flight: int) -> list[int]:
    """Returns the bounds of the segments that hold the fewest numbers at their peak.

    Args:
        graph: the network.
        stage: the stage to cut.
        in_flight: microbatches that keep their crossing values at the same time.
    """
    crossing = crossing_elements(graph, stage)
    places = _candidates(graph, stage, crossing)
    made = [0, *itertools.accumulate(n.num_elements for n in graph.nodes[stage.first : stage.last])]
    inner = [made[place - stage.first] for place in places]
    kept = [in_flight * crossing[place] for place in places]
    smallest = max(b - a for a, b in itertools.pairwise(inner))
    best: tuple[int, list[int]] | None = None
    for step in range(STEPS + 1):
        limit = int(smallest * max(1.0, inner[-1] / max(1, smallest)) ** (step / STEPS))
        cuts = _fewest_kept(inner, kept, limit)
        ends = [inner[i] for i in cuts]
        peak = sum(kept[i] for i in cuts[:-1]) + max(b - a for a, b in itertools.pairwise(ends))
        if best is None or peak < best[0]:
            best = peak, [places[i] for i in cuts]
    assert best is not None
    return best[1]


def crossing_elements(graph: Graph, stage: Stage) -> dict[int, int]:
    """Returns for each node of a stage the numbers that are made before it and read from it on."""
    last_use: dict[str, int] = {}
    for index in range(stage.first, stage.last):
        last_use |= dict.fromkeys(graph.nodes[index].inputs, index)
    made_at = {graph.nodes[index].name: index for index in range(stage.first, stage.last)}
    change = [0] * (stage.last - stage.first + 2)
    for value, last in last_use.items():
        first = made_at.get(value, stage.first - 1) + 1
        if first <= last and (value in made_at or value in stage.layout):
            node = graph.by_name.get(value)
            size = math.prod(graph.input_shape) if node is None else node.num_elements
            change[first - stage.first] += size
            change[last + 1 - stage.first] -= size
    totals = itertools.accumulate(change)
    return dict(zip(range(stage.first, stage.last + 1), totals, strict=False))


def _candidates(graph: Graph, stage: Stage, crossing: dict[int, int]) -> list[int]:
    """Returns the places of cuts, with both ends of the stage: layers where little crosses.

    All readers of one halo stay in one segment, and only tensors may cross, not lists of them.
    """
    barred: set[int] = set()
    for op in stage.comm:
        at = [graph.position[name] for name in (op.node, *op.readers)]
        barred.update(range(min(at) + 1, max(at) + 1))
    listed = {
        index
        for node in graph.nodes[stage.first : stage.last]
        if node.shape is None and node.name in graph.consumers
        for index in range(graph.position[node.name] + 1, graph.consumers[node.name][-1] + 1)
    }
    inner = range(stage.first + 1, stage.last)
    starts = [i for i in layer_starts(graph) if i in inner and i not in barred | listed]
    least = [
        place
        for before, place, after in zip([None, *starts], starts, [*starts[1:], None], strict=False)
        if all(o is None or crossing[place] <= crossing[o] for o in (before, after))
    ]
    least = sorted(sorted(least, key=lambda place: crossing[place])[:MAX_CANDIDATES])
    return [stage.first, *least, stage.last]


def _fewest_kept(inner: list[int], kept: list[int], limit: int) -> list[int]:
    """Returns the cuts, as indices of places, that keep least with no segment above a limit."""
    best: list[tuple[int, int]] = [(0, 0)]  # for each place: (numbers kept so far, previous cut)
    for end in range(1, len(inner)):
        options = []
        for start in range(end - 1, -1, -1):
            if inner[end] - inner[start] > limit and start < end - 1:
                break
            options.append((best[start][0] + kept[start], start))
        best.append(min(options))
    cuts = [len(inner) - 1]
    while cuts[-1] > 0:
        cuts.append(best[cuts[-1]][1])
    return cuts[::-1]


def _most_in_flight(plan: Plan, stage: int) -> int:
    """Returns the most microbatches that a rank of a stage holds between their passes."""
    actions = plan.actions_of(plan.rank_of(0, 0, stage, 0))
    held = itertools.accumulate(1 if action[0] == "F" else -1 for action in actions)
    return max(held, default=0)
