r"""Computes a value once that several nodes compute alike, as ReLUs of one map in several branches.

    x -> relu1 -> conv1                 x -> relu1 -> conv1
    x -> relu2 -> conv2                       \-----> conv2

Nodes are equal if operator, arguments and parameters are, and neither draws random numbers nor
writes a buffer. Sharing must cost neither messages nor memory, so there are two rules:

* Equal nodes that are the only readers of what they read become one wherever the network is cut:
  their value takes the place of that, in memory and in messages. This comes before layers are
  fused, because the one that is left may be fused into its maker.
* Others become one within a stage (a value that is cheap to compute is not sent to a later one), if
  the values that the stage holds at its fullest node do not grow by it.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Iterable, Sequence

from hires.plan.conversions import renamed
from hires.plan.event import BYTES
from hires.plan.graph import INPUT, Graph, Node
from hires.plan.operators.operator_facts import facts_of, is_random
from hires.plan.operators.operator_table import updates_statistics
from hires.plan.passes.graph_edits import edited


def share_equal_values(graph: Graph) -> Graph:
    """Returns the network with equal nodes as one whose value takes the place of their inputs."""
    for names in _equal_nodes(graph, graph.nodes):
        if _replaces_inputs(graph, names):
            graph = _with_one(graph, names)
    return graph


def share_in_stages(graph: Graph, bounds: Sequence[int]) -> tuple[Graph, list[int]]:
    """Returns the network with equal nodes of a stage as one where that needs no more memory.

    ``bounds`` are the index of each stage's first node and the number of nodes; also returned.
    """
    stages = [graph.nodes[first:last] for first, last in itertools.pairwise(bounds)]
    counts: list[int] = []
    for nodes in stages:
        first = sum(counts)
        last, behind = first + len(nodes), len(graph.nodes) - first - len(nodes)
        for names in _equal_nodes(graph, nodes):
            shared = _with_one(graph, names)
            if shared is not graph:
                end = len(shared.nodes) - behind
                if _fullest(shared, first, end) <= _fullest(graph, first, last):
                    graph, last = shared, end
        counts.append(last - first)
    return graph, [0, *itertools.accumulate(counts)]


def _equal_nodes(graph: Graph, nodes: Sequence[Node]) -> list[list[str]]:
    """Returns the names of nodes that compute one value, first to last, for each such value."""
    groups: dict[str, list[str]] = {}
    first: dict[str, str] = {}  # value -> the first one that equals it
    fixed = _fixed(graph)
    for node in nodes:
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


def _fullest(graph: Graph, first: int, last: int) -> int:
    """Returns the most bytes of values that the nodes of a stage hold at a time, images apart."""
    lies_in = _memory(graph, range(first, last))
    ends: dict[str, int] = {}
    for index in range(first, last):
        for value in (graph.nodes[index].name, *graph.nodes[index].inputs):
            readers = graph.consumers.get(value, [])
            kept = value == graph.output or any(reader >= last for reader in readers)
            place = lies_in.get(value, value)
            ends[place] = last if kept else max(index, ends.get(place, 0))
    change = [0] * (last - first + 2)
    for value, end in ends.items():
        if value != INPUT:
            num_bytes = _num_bytes(graph.by_name[value])
            change[max(0, graph.position[value] - first)] += num_bytes
            change[end + 1 - first] -= num_bytes
    return max(itertools.accumulate(change))


def _memory(graph: Graph, indices: Iterable[int]) -> dict[str, str]:
    """Returns the value in whose memory each value lies that has none of its own."""
    lies_in: dict[str, str] = {}
    for index in indices:
        node = graph.nodes[index]
        facts = facts_of(node.kind)
        beside = node.args.get(facts.beside) if facts.beside else None
        source = beside["value"] if beside is not None else next(iter(node.inputs), INPUT)
        maker = graph.by_name.get(source)
        inside = facts.view or facts.may_share or node.shape is None
        if not inside and maker is not None and (facts.in_place or beside is not None):
            readers = graph.consumers[source]
            over = facts_of(maker.kind).overwritable and maker.name != graph.output
            alone = readers == [index] or (beside is not None and readers[-1] == index)
            inside = over and alone
        if inside:
            lies_in[node.name] = lies_in.get(source, source)
    return lies_in


def _num_bytes(node: Node) -> int:
    if node.shape is None:
        return 0
    return math.prod(node.shape) * BYTES.get(node.dtype or "", 4)
