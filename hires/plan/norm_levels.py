"""Lets norms that do not depend on each other share one message for their statistics.

Where a cell has branches, the norm of one is not behind the norm of another. Nodes are put into a
legal order in which such norms are neighbours; they exchange their statistics in one gather, and
the sums of the way back in one as well:

    before    conv1 [norm1] relu1 conv2 [norm2]   conv3 [norm3] add      3 messages
    after     conv1 conv3 [norm1 norm3]   relu1 conv2 [norm2]   add      2 messages

The level of a norm is the number of norms before it on the longest path to it. No order has fewer
messages than levels. A norm that may be in several levels joins the one whose norms are nearest, so
that nodes stay about where they were, and values live about as long.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from hires.plan.graph import Graph, Node
from hires.plan.halos import ran_back
from hires.plan.operators.operator_facts import facts_of, is_random
from hires.plan.operators.operator_table import updates_statistics
from hires.plan.plan import CommOp, Stage
from hires.plan.rules import rule_in

MOST_NUMBERS = 8192
"""Most that a joint message holds of each rank: small messages take short cuts."""


def with_norms_together(graph: Graph, stages: Sequence[Stage]) -> Graph:
    """Returns the network in an order in which the norms of a level are neighbours, by stages."""
    nodes: list[Node] = []
    for stage in stages:
        part = graph.nodes[stage.first : stage.last]
        nodes += _ordered(graph, stage, part) if stage.num_ranks > 1 else part
    return dataclasses.replace(graph, nodes=nodes)


def joined(graph: Graph, stage: Stage, ops: list[CommOp]) -> list[CommOp]:
    """Returns a stage's communication with one gather for several norms, which are its readers."""
    at: dict[str, list[CommOp]] = {}
    for op in ops:
        at.setdefault(op.node, []).append(op)
    backward = ran_back(graph, stage)
    runs: list[list[CommOp]] = []  # those of the norms that share one
    run: list[CommOp] = []
    for node in graph.nodes[stage.first : stage.last]:
        own = at.get(node.name, [])
        if len(own) != 1 or not _can_join(graph, stage, node):
            run = []
            continue
        [op] = own
        fits = sum(one.elements for one in run) + op.elements <= MOST_NUMBERS
        apart = {one.node for one in run}.isdisjoint(node.inputs)
        alike = {(one.back, one.node in backward) for one in (*run, op)}
        if not (run and fits and apart and len(alike) == 1):
            run = []
            runs.append(run)
        run.append(op)
    joint: dict[CommOp, CommOp] = {}
    for run in (run for run in runs if run[1:]):
        elements, readers = sum(op.elements for op in run), [op.node for op in run]
        joint[run[0]] = dataclasses.replace(run[0], elements=elements, readers=readers)
    gone = {op for run in runs for op in run[1:]}
    return [joint.get(op, op) for op in ops if op not in gone]


def _can_join(graph: Graph, stage: Stage, node: Node) -> bool:
    # A norm whose statistics are of several ranks, with parameters and no values for its weight
    # and bias.
    if facts_of(node.kind).statistics is None or len(node.inputs) != 1:
        return False
    return rule_in(stage, node, graph).kind == "norm"


def _ordered(graph: Graph, stage: Stage, nodes: Sequence[Node]) -> list[Node]:
    # What draws random numbers, or reads a buffer that the network writes, keeps its place.
    written, backward = graph.updates.keys(), ran_back(graph, stage)
    ordered: list[Node] = []
    run: list[Node] = []
    for node in nodes:
        if is_random(node) or not written.isdisjoint(node.params):
            ordered += [*_by_level(graph, stage, run, backward), node]
            run = []
        else:
            run.append(node)
    return ordered + _by_level(graph, stage, run, backward)


def _by_level(graph: Graph, stage: Stage, nodes: list[Node], backward: set[str]) -> list[Node]:
    norms = {node.name for node in nodes if _can_join(graph, stage, node)}
    needs, position = _needs(nodes), {node.name: index for index, node in enumerate(nodes)}
    levels = _levels(nodes, norms, needs, position)
    if len(levels) == len(norms):
        return nodes

    def way_back(node: Node) -> tuple[bool, bool]:
        return node.name in backward, graph.needs_grad(node.inputs[0])

    ordered: dict[str, Node] = {}
    for level in levels:
        first, last = position[level[0]], position[level[-1]]
        wanted, ahead = set[str](), [name for norm in level for name in needs[norm]]
        while ahead:
            if (name := ahead.pop()) not in wanted and name not in ordered:
                wanted.add(name)
                ahead += needs[name]
        for node in nodes[:last]:
            is_free = position[node.name] < first and node.name not in norms
            if node.name in wanted or (is_free and ordered.keys() >= {*needs[node.name]}):
                ordered.setdefault(node.name, node)
        together = sorted((nodes[position[name]] for name in level), key=way_back)
        ordered |= {node.name: node for node in together}
    return [*(ordered | {node.name: node for node in nodes}).values()]


def _needs(nodes: list[Node]) -> dict[str, list[str]]:
    # The nodes that come before each. Two uses of one norm keep their order: both move its
    # running statistics.
    last_use: dict[str, str] = {}
    needs: dict[str, list[str]] = {}
    for node in nodes:
        needs[node.name] = [name for name in node.inputs if name in needs]
        if updates_statistics(node):
            needs[node.name] += [last_use[name] for name in node.params if name in last_use]
            last_use |= dict.fromkeys(node.params, node.name)
    return needs


def _levels(
    nodes: list[Node], norms: set[str], needs: dict[str, list[str]], position: dict[str, int]
) -> list[list[str]]:
    """Returns the norms of each level, each level in the order of the nodes."""
    after: dict[str, int] = {}  # norms on the longest path behind a node
    for node in reversed(nodes):
        behind = after.setdefault(node.name, 0) + (node.name in norms)
        for name in needs[node.name]:
            after[name] = max(after.get(name, 0), behind)
    least: dict[str, int] = {}  # the first level that a node can have
    for node in nodes:
        least[node.name] = max((least[n] + (n in norms) for n in needs[node.name]), default=0)
    count = max((least[name] + 1 for name in norms), default=0)
    fixed: list[list[int]] = [[] for _ in range(count)]
    for name in norms:
        if least[name] == count - 1 - after[name]:
            fixed[least[name]].append(position[name])
    levels: list[list[str]] = [[] for _ in range(count)]
    level: dict[str, int] = {}
    for node in nodes:
        first = max((level[n] + (n in norms) for n in needs[node.name]), default=0)
        level[node.name] = first
        if node.name in norms:
            here = position[node.name]
            level[node.name] = chosen = min(
                range(first, count - after[node.name]),
                key=lambda one: min(abs(here - other) for other in fixed[one]),
            )
            levels[chosen].append(node.name)
    return levels
