"""Lists the messages of a layout: inside each stage between its tiles, and between stages."""

from __future__ import annotations

import math

from hires.plan.edges import edge_of
from hires.plan.fusing import widen
from hires.plan.graph import INPUT, Graph, Node
from hires.plan.halos import halos_of, ran_back
from hires.plan.plan import CommOp, Edge, Finding, Stage
from hires.plan.rules import SHARDED, TILED, WHOLE, Rule, rule_in
from hires.plan.search.joins import far_halos, no_rule, vanishing


def lay_out(
    graph: Graph, stages: list[Stage], fuse: int = 1, listed: bool = False
) -> list[Finding]:
    """Fills in how every value lies on the tiles of each stage, and the stage's communication.

    Args:
        graph: the network.
        stages: where it is cut, and into which tiles.
        fuse: windowed layers that one exchange serves.
        listed: whether ``parallel.tiles`` names a grid for each stage.

    Returns:
        An error for every kind of node that the tiles of a stage cannot compute, with what avoids
        it.
    """
    findings: list[Finding] = []
    for stage in stages:
        rules, refused = _judged(graph, stages, stage)
        widen(graph, stage, rules, fuse if not refused else 1)
        stage.comm = _stage_comm(graph, stage, rules)
        findings += [no_rule(graph, stages, stage, nodes, listed) for nodes in refused]
    return findings


def look_over(graph: Graph, stages: list[Stage], listed: bool) -> list[Finding]:
    """Returns what a layout would meet, without its messages, which are many where tiles are.

    The errors are those of :func:`lay_out`; tiles that hold nothing are warnings.
    """
    findings: list[Finding] = []
    for stage in stages:
        _, refused = _judged(graph, stages, stage)
        findings += [no_rule(graph, stages, stage, nodes, listed) for nodes in refused]
    return [*findings, *vanishing(graph, stages, listed)]


def small_tiles(graph: Graph, stages: list[Stage], listed: bool) -> list[Finding]:
    """Returns warnings of tiles that hold nothing or borrow from beyond their neighbour."""
    far = [finding for stage in stages for finding in far_halos(stage)]
    return [*vanishing(graph, stages, listed), *far]


def add_loss(graph: Graph, stage: Stage) -> None:
    """Adds the sum of the ranks' losses where the output lies in tiles or shards."""
    if stage.num_ranks > 1 and stage.layout[graph.output] != WHOLE:
        stage.comm.append(CommOp(graph.output, "loss", graph.output, elements=1))


def edges_of(graph: Graph, stages: list[Stage], training: bool) -> list[Edge]:
    """Returns every value that one stage sends to another, in order of stage and value."""
    edges = []
    for target in stages:
        for value in _reads(graph, target):
            if value != INPUT:
                source = _maker(graph, stages, value)
                back = training and graph.needs_grad(value)
                edges.append(edge_of(graph, value, source, target, back))
    return edges


def _judged(
    graph: Graph, stages: list[Stage], stage: Stage
) -> tuple[dict[str, Rule], list[list[Node]]]:
    """Fills in the layout of a stage; returns every node's rule, and those without by kind."""
    stage.layout = {name: _incoming(graph, stages, stage, name) for name in _reads(graph, stage)}
    rules: dict[str, Rule] = {}
    refused: dict[str, list[Node]] = {}
    for node in graph.nodes[stage.first : stage.last]:
        rule = rule_in(stage, node, graph)
        if rule is None:
            refused.setdefault(node.kind, []).append(node)
            rule = _guessed(node, stage.layout)
        divided = stage.shards > 1 and rule.kind != "whole"
        stage.layout[node.name] = SHARDED if divided else rule.result
        rules[node.name] = rule
    return rules, list(refused.values())


def _reads(graph: Graph, stage: Stage) -> list[str]:
    """Returns the values that a stage reads and does not make, in order of first use."""
    nodes = graph.nodes[stage.first : stage.last]
    made = {node.name for node in nodes}
    read = dict.fromkeys(name for node in nodes for name in node.inputs)
    return [name for name in read if name not in made]


def _maker(graph: Graph, stages: list[Stage], value: str) -> Stage:
    return next(s for s in stages if s.first <= graph.position[value] < s.last)


def _incoming(graph: Graph, stages: list[Stage], stage: Stage, value: str) -> str:
    """Returns how a value that comes from outside lies on the ranks of a stage."""
    if stage.shards > 1:
        batched = graph.shape(value)[:1] == graph.input_shape[:1]
        return SHARDED if batched and value in graph.of_images else WHOLE
    if stage.num_tiles == 1:
        return WHOLE
    if value == INPUT:
        return TILED
    maker, shape = _maker(graph, stages, value), graph.shape(value)
    image = len(shape) == 4 and shape[2] * shape[3] > 1 and value in graph.of_images
    if maker.num_ranks == 1 and image:
        return TILED
    return maker.layout[value]


def _stage_comm(graph: Graph, stage: Stage, rules: dict[str, Rule]) -> list[CommOp]:
    """Returns the communication between the tiles of a stage in a forward pass, in order."""
    if stage.num_ranks == 1:
        return []
    backward = ran_back(graph, stage)
    halos = halos_of(graph, stage, rules, backward) if stage.num_tiles > 1 else {}
    ops = []
    for node in graph.nodes[stage.first : stage.last]:
        shares, others = _node_comm(graph, stage, node, rules[node.name], node.name in backward)
        ops += [*shares, *halos.get(node.name, []), *others]
    return ops


def _node_comm(
    graph: Graph, stage: Stage, node: Node, rule: Rule, back: bool
) -> tuple[list[CommOp], list[CommOp]]:
    """Returns the collectives before and after a node's halos.

    Args:
        graph: the network.
        stage: the node's stage.
        node: what is computed.
        rule: how.
        back: whether the backward pass comes to the node.
    """
    if stage.shards > 1 and rule.kind == "norm":
        return [], [_norm_comm(graph, node, rule, back)]
    tiled = [name for name in node.inputs if stage.layout[name] == TILED]
    if not tiled:
        return [], []
    shares = [
        CommOp(node.name, "share", name, elements=_elements(graph, name), back=True)
        for name in node.inputs
        if stage.layout[name] == WHOLE and graph.needs_grad(name) and back
    ]
    others = []
    if rule.kind == "norm":
        others.append(_norm_comm(graph, node, rule, back))
    elif rule.kind == "reduce":
        others.append(CommOp(node.name, "reduce", tiled[0], elements=rule.elements))
    return shares, others


def _norm_comm(graph: Graph, node: Node, rule: Rule, back: bool) -> CommOp:
    """Returns the exchange of statistics, and of as many sums on the way back."""
    value = node.inputs[0]
    back = back and graph.needs_grad(value)
    return CommOp(node.name, "norm", value, elements=rule.elements, back=back)


def _elements(graph: Graph, value: str) -> int:
    return math.prod(graph.shape(value))


def _guessed(node: Node, layout: dict[str, str]) -> Rule:
    """Returns how a refused node's value would lie, so that what follows it is judged as well."""
    image = node.shape is None or len(node.shape) == 4
    tiled = any(layout[name] == TILED for name in node.inputs)
    return Rule("pointwise" if image and tiled else "whole")
