"""Cuts the network into stages, and stages into segments that are computed again.

A layer is a run of nodes with one operation that has a weight matrix (convolution, linear). It
begins where the least crosses, so a network whose blocks begin with norm and ReLU is cut before
them. Stages are balanced by FLOPs per rank, so that a stage in four tiles gets four times the work;
among cuts whose slowest stage is within 5 % of the best, the one that the least crosses wins.

Segments (``memory.checkpoint``) keep only the values c that cross from one to the next:

    forward    [ segment 0 ] c [ segment 1 ] c [ segment 2 ]
    backward                                   [ again, back ]   then segment 1, then segment 0

One segment (``stage``) keeps least between the passes; several (``block``) need less memory while
one of them is computed again. The cuts minimise what all microbatches in flight keep plus the
largest segment.

Source:
    Chen et al., "Training deep nets with sublinear memory cost", 2016.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections import deque
from collections.abc import Callable, Sequence

from hires.plan.graph import Graph, Node
from hires.plan.operators.operator_facts import facts_of
from hires.plan.operators.operator_table import updates_statistics
from hires.plan.plan import Stage
from hires.plan.simulation.node_work import most_in_flight

SLACK = 1.05

MESSAGE = 60_000
"""Numbers of four bytes that travel in the time of an empty message: over gloo on one machine 1 KB
takes 49 us and 1 MB 265 us."""


def layer_starts(graph: Graph) -> list[int]:
    """Returns the index of the first node of every layer."""
    heavy = [
        index
        for index, node in enumerate(graph.nodes)
        if facts_of(node.kind).multiplies and node.args.get("weight") is not None
    ]
    costs = cut_costs(graph)
    starts = [0]
    for before, after in itertools.pairwise(heavy):
        # Of equals the first wins: as late as possible.
        places = [(cost, i) for i in range(after, before, -1) if (cost := costs[i]) is not None]
        if places:
            starts.append(min(places, key=lambda place: place[0])[1])
    return starts


def partition(
    graph: Graph, num_ranks: list[int], balance: list[int] | None, training: bool = False
) -> list[int]:
    """Returns the index of every stage's first node, then the number of nodes.

    ``num_ranks`` share each stage; ``balance`` is layers per stage, None: by FLOPs, and in training
    all uses of a parameter in one stage if that is possible.
    """
    starts, costs = layer_starts(graph), cut_costs(graph)
    if balance is None and training:
        apart = starts_between_ties(graph)
        starts = apart if len(apart) >= len(num_ranks) else starts
    if balance is not None:
        chosen = [0, *itertools.accumulate(balance)][:-1]
        return [*(starts[index] for index in chosen), len(graph.nodes)]
    before = [0, *itertools.accumulate(node.flops for node in graph.nodes)]
    total = [before[start] for start in [*starts, len(graph.nodes)]]

    def work(stage: int, first: int, last: int) -> float:
        return (total[last] - total[first]) / num_ranks[stage]

    limit = cut_of_least_largest(len(starts), len(num_ranks), work)[1] * SLACK

    def is_too_long(stage: int, first: int, last: int) -> bool:
        return total[last] - total[first] > limit * num_ranks[stage]

    crossing = [0, *(costs[start] or 0 for start in starts[1:])]
    *chosen, _ = _cut_of_least_sum(len(starts), len(num_ranks), crossing, is_too_long)
    return [*(starts[index] for index in chosen), len(graph.nodes)]


def starts_between_ties(graph: Graph) -> list[int]:
    """Returns the starts of layers at which a cut leaves all uses of each parameter on one side.

    A recurrent block that is applied three times:    conv | [step] [step] [step] | head
    """
    barred: set[int] = set()
    for uses in tied_uses(graph, graph.nodes).values():
        first, last = (graph.position[node.name] for node in (uses[0], uses[-1]))
        barred.update(range(first + 1, last + 1))
    return [start for start in layer_starts(graph) if start not in barred]


def tied_uses(graph: Graph, nodes: Sequence[Node]) -> dict[str, list[Node]]:
    """Returns the users of every parameter that a step changes, in order, a buffer's maker last."""
    users: dict[str, list[Node]] = {}
    updated = {value: name for name, value in graph.updates.items()}
    for node in nodes:
        for name in node.params:
            changes = graph.params[name].trainable or name in graph.updates
            if changes or updates_statistics(node):
                users.setdefault(name, []).append(node)
        if node.name in updated:
            users.setdefault(updated[node.name], []).append(node)
    return users


def cut_costs(graph: Graph) -> list[int | None]:
    """Returns what a cut before each node costs, in numbers that cross it; None where it cannot be.

    A tensor that crosses costs as much as ``MESSAGE`` numbers beside its own. Only floating-point
    tensors and 8-bit integers may cross: no lists of tensors, masks or indices.
    """

    def refused(node: Node | None) -> bool:
        dtype = "" if node is None else node.dtype or ""
        real = "float" in dtype or dtype == "uint8"
        return node is not None and (node.shape is None or not real)

    whole = 0, len(graph.nodes)
    costs = crossing(graph, *whole, lambda node: node.num_elements + MESSAGE if node else 0)
    strange = crossing(graph, *whole, refused)
    return [None if bad else cost for cost, bad in zip(costs, strange, strict=True)]


MAX_CANDIDATES = 160
"""Most places for cuts that are considered, so that planning stays fast for thousands of nodes."""
STEPS = 24
"""Limits on the largest segment that are tried, from the largest node to the whole stage."""


def segments_of(graph: Graph, stage: Stage, checkpoint: str, actions: list[str]) -> list[int]:
    """Returns the first nodes of a stage's segments, and its end; empty: nothing is recomputed."""
    if checkpoint != "block":
        return [] if checkpoint == "none" else [stage.first, stage.last]

    def size(node: Node | None) -> int:
        return math.prod(graph.input_shape) if node is None else node.num_elements

    sizes = crossing(graph, stage.first, stage.last, size)
    crossing_at = dict(enumerate(sizes, start=stage.first))
    places = _candidates(graph, stage, crossing_at)
    made = [0, *itertools.accumulate(n.num_elements for n in graph.nodes[stage.first : stage.last])]
    inner = [made[place - stage.first] for place in places]
    in_flight = most_in_flight(actions)  # microbatches that keep what crosses at the same time
    kept = [in_flight * crossing_at[place] for place in places]
    smallest = max(b - a for a, b in itertools.pairwise(inner))
    limits = (
        int(smallest * max(1.0, inner[-1] / max(1, smallest)) ** (step / STEPS))
        for step in range(STEPS + 1)
    )

    def peak(cuts: list[int]) -> int:
        largest = max(inner[b] - inner[a] for a, b in itertools.pairwise(cuts))
        return largest + sum(kept[i] for i in cuts[:-1])

    def fewest_kept(limit: int) -> list[int]:
        """Returns the cuts, as indices of places, with no segment of several above a limit."""
        longer = lambda _, a, b: inner[b] - inner[a] > limit and a < b - 1  # noqa: E731
        return _cut_of_least_sum(len(inner) - 1, None, kept, longer)

    return [places[i] for i in min(map(fewest_kept, limits), key=peak)]


def crossing(
    graph: Graph, first: int, last: int, weight: Callable[[Node | None], int]
) -> list[int]:
    """Returns the weight of the values that cross each place between two nodes, ends included.

    Those are made before it and read from it on, by nodes up to ``last``. None: the images.
    """
    last_use: dict[str, int] = {}
    for index in range(first, last):
        last_use |= dict.fromkeys(graph.nodes[index].inputs, index)
    change = [0] * (last - first + 2)
    for value, end in last_use.items():
        begin = max(first, graph.position.get(value, -1) + 1)
        change[begin - first] += (amount := weight(graph.by_name.get(value)))
        change[end + 1 - first] -= amount
    return [*itertools.accumulate(change)][:-1]


def _candidates(graph: Graph, stage: Stage, crossing: dict[int, int]) -> list[int]:
    """Returns places for cuts, ends included, where little crosses and no halo's readers part."""
    barred: set[int] = set()
    for op in stage.comm:
        at = [graph.position[name] for name in (op.node, *op.readers)]
        barred.update(range(min(at) + 1, max(at) + 1))
    inner = range(stage.first + 1, stage.last)
    starts = [i for i in layer_starts(graph) if i in inner and i not in barred]
    least = [
        place
        for before, place, after in zip([None, *starts], starts, [*starts[1:], None], strict=False)
        if all(o is None or crossing[place] <= crossing[o] for o in (before, after))
    ]
    least = sorted(sorted(least, key=lambda place: crossing[place])[:MAX_CANDIDATES])
    return [stage.first, *least, stage.last]


Row = dict[int, tuple[float, int]]
"""Places so far -> the least cost, and the first place of the last part."""


def cut_of_least_largest(
    end: int, count: int, cost_of: Callable[[int, int, int], float]
) -> tuple[list[int], float]:
    """Returns the cut of a line whose most expensive part is the cheapest, and what that costs.

    A dynamic program over (parts so far, places so far). The cut is the first place of every part,
    then ``end``; every part has a place at the least. ``cost_of``: (part, first place, place after
    its last) -> what it costs, which grows with its length.
    """
    rows: list[Row] = [{0: (0.0, 0)}]
    for part in range(count):
        row: Row = {}
        begun: list[tuple[float, int]] = []  # ascending: costs so far, and places of the part
        for last in range(1, end + 1):
            so_far, _ = rows[-1].get(last - 1, (math.inf, 0))
            while begun and begun[-1][0] > so_far:
                begun.pop()
            begun += [(so_far, last - 1)] if so_far < math.inf else []
            # From here on the parts before cost as much as this one.
            costly = lambda one: one[0] >= cost_of(part, one[1], last)  # noqa: B023, E731
            low = bisect.bisect_left(begun, True, key=costly)
            near = begun[max(0, low - 1) : low + 1][::-1]
            costs = [(max(before, cost_of(part, first, last)), first) for before, first in near]
            if costs:
                row[last] = min(costs, key=lambda one: one[0])
        rows.append(row)
    return _cut_of(rows[1:], end), rows[-1][end][0]


def _cut_of_least_sum(
    end: int,
    count: int | None,
    costs: Sequence[float],
    is_too_long: Callable[[int, int, int], bool],
) -> list[int]:
    """Returns the cut of a line of the least sum of ``costs``, one for each first place of a part.

    None: any number of parts. ``is_too_long``: (part, first place, place after its last) -> whether
    it is, and longer ones with that end, too.
    """
    rows: list[Row] = [{0: (0.0, 0)}]
    for part in range(1 if count is None else count):
        row: Row = rows[-1] if count is None else {}
        begun: deque[tuple[float, int]] = deque()  # ascending, as above
        for last in range(1, end + 1):
            if last - 1 in rows[-1]:
                so_far = rows[-1][last - 1][0] + costs[last - 1]
                while begun and begun[-1][0] > so_far:
                    begun.pop()
                begun.append((so_far, last - 1))
            while begun and is_too_long(part, begun[0][1], last):
                begun.popleft()
            if begun:
                row[last] = begun[0]
        rows.append(row)
    return _cut_of(rows[1:] if count is not None else rows[:1] * end, end)


def _cut_of(rows: Sequence[Row], end: int) -> list[int]:
    cut = [end]
    for row in reversed(rows):
        if cut[-1] > 0:
            cut.append(row[cut[-1]][1])
    return cut[::-1]
