"""Which messages does a layout need? Inside each stage between its tiles, and between stages."""

from __future__ import annotations

import math

from hires.plan.edges import edge_of
from hires.plan.fusing import widen
from hires.plan.graph import INPUT, Graph, Node, describe
from hires.plan.halos import halos_of, ran_back
from hires.plan.partition import layer_starts
from hires.plan.plan import CommOp, Edge, Finding, Stage
from hires.plan.rules import SHARDED, TILED, WHOLE, Rule, rule_of
from hires.plan.shards import shard_rule
from hires.plan.tiling import is_empty, own_rect


def lay_out(graph: Graph, stages: list[Stage], fuse: int = 1) -> list[Finding]:
    """Fills in how every value lies on the tiles of each stage, and the stage's communication.

    Args:
        graph: the network.
        stages: where it is cut, and into which tiles.
        fuse: windowed layers that one exchange serves.

    Returns:
        An error for every kind of node that the tiles of a stage cannot compute, with what avoids
        it.
    """
    findings: list[Finding] = []
    for stage in stages:
        incoming = {name: _incoming(graph, stages, stage, name) for name in _reads(graph, stage)}
        stage.layout = incoming
        rules: dict[str, Rule] = {}
        refused: dict[str, list[Node]] = {}
        for node in graph.nodes[stage.first : stage.last]:
            rule = _rule(graph, stage, node)
            if rule is None:
                refused.setdefault(node.kind, []).append(node)
                rule = _guessed(node, stage.layout)
            divided = stage.shards > 1 and rule.kind != "whole"
            stage.layout[node.name] = SHARDED if divided else rule.result
            rules[node.name] = rule
        widen(graph, stage, rules, fuse if not refused else 1)
        stage.comm = _stage_comm(graph, stage, rules)
        findings += [_no_rule(graph, stages, stage, nodes) for nodes in refused.values()]
    return findings


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


def _rule(graph: Graph, stage: Stage, node: Node) -> Rule | None:
    """Returns how the ranks of a stage compute a node together, or None if they cannot."""
    if stage.shards > 1:
        return shard_rule(node, graph, stage.layout)
    return rule_of(node, graph, stage.layout) if stage.num_tiles > 1 else Rule("whole")


def _reads(graph: Graph, stage: Stage) -> list[str]:
    """Returns the values that a stage reads and does not make, in order of first use."""
    nodes = graph.nodes[stage.first : stage.last]
    made = {node.name for node in nodes}
    read = dict.fromkeys(name for node in nodes for name in node.inputs)
    return [name for name in read if name not in made]


def _maker(graph: Graph, stages: list[Stage], value: str) -> Stage:
    """Returns the stage that makes a value."""
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
    """Returns what the tiles of a stage say to each other in a forward pass, in order."""
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
        return [], [_norm_comm(graph, node, node.inputs[0], back)]
    tiled = [name for name in node.inputs if stage.layout[name] == TILED]
    if not tiled:
        return [], []
    shares = [
        CommOp(node.name, "share", name, elements=_elements(graph, name), back=True)
        for name in node.inputs
        if stage.layout[name] == WHOLE and graph.needs_grad(name) and back
    ]
    value, others = tiled[0], []
    if rule.kind == "norm":
        others.append(_norm_comm(graph, node, value, back))
    elif rule.kind == "reduce":
        others.append(CommOp(node.name, "reduce", value, elements=_elements(graph, node.name)))
    return shares, others


def _norm_comm(graph: Graph, node: Node, value: str, back: bool) -> CommOp:
    """Returns the exchange of two statistics per channel, and of two sums on the way back."""
    elements = 2 * graph.shape(value)[1]
    back = back and graph.needs_grad(value)
    return CommOp(node.name, "norm", value, elements=elements, back=back)


def _elements(graph: Graph, value: str) -> int:
    """Returns how many numbers a value holds."""
    return math.prod(graph.shape(value))


def _guessed(node: Node, layout: dict[str, str]) -> Rule:
    """Returns how a refused node's value would lie, so that what follows it is judged as well."""
    image = node.shape is None or len(node.shape) == 4
    tiled = any(layout[name] == TILED for name in node.inputs)
    return Rule("pointwise" if image and tiled else "whole")


def _no_rule(graph: Graph, stages: list[Stage], stage: Stage, nodes: list[Node]) -> Finding:
    """Explains that nodes of one kind cannot be tiled, and how to compute them after a join."""
    alike = f" and {len(nodes) - 1} more of its kind" if len(nodes) > 1 else ""
    has = "have" if alike else "has"
    who = f"{describe(nodes[0])}{alike} in stage {stage.index} {has}"
    if stage.shards > 1:
        text = f"{who} no rule for samples on several ranks; use parallel.local_dp=1"
        return Finding("error", "parallel.local_dp", text)
    if stage.index > 0:
        return Finding(
            "error",
            "parallel.spatial_stages",
            f"{who} no tiling rule; parallel.spatial_stages={stage.index} joins the tiles before "
            f"that stage (it begins at {stage.first_layer})",
        )
    cut = _earlier_cut(graph, nodes[0])
    return Finding("error", "parallel.balance", f"{who} no tiling rule; {cut}")


def _earlier_cut(graph: Graph, node: Node) -> str:
    """Returns which cut would leave a node of stage 0 to a later, untiled stage."""
    starts = layer_starts(graph)
    before = sum(start <= graph.position[node.name] for start in starts) - 1
    if before == 0:
        return "it belongs to the first layer, so this network cannot begin with tiles"
    return (
        f"stage 1 can begin at layer {before} ({graph.nodes[starts[before]].name}): use "
        f"parallel=sp+lp parallel.stages=2 parallel.spatial_stages=1 "
        f"parallel.balance=[{before},{len(starts) - before}]"
    )


def small_tiles(graph: Graph, stages: list[Stage]) -> list[Finding]:
    """Returns warnings of tiles that hold nothing or borrow from beyond their neighbour."""
    findings = []
    for stage in stages:
        if stage.num_tiles > 1:
            findings += _empty_tiles(graph, stage) + _far_halos(stage)
    return findings


def _empty_tiles(graph: Graph, stage: Stage) -> list[Finding]:
    """Returns a warning for the first value of which some tile of a stage holds nothing."""
    rows, cols = stage.tiles
    for node in graph.nodes[stage.first : stage.last]:
        if stage.layout[node.name] != TILED or node.shape is None or node.shape[0] == 0:
            continue
        size = node.shape[2:]
        empty = [t for t in range(rows * cols) if is_empty(own_rect(size, stage.tiles, t))]
        if empty:
            text = (
                f"{describe(node)} makes a map of {size[0]}x{size[1]}, so {len(empty)} of the "
                f"{rows}x{cols} tiles of stage {stage.index} hold nothing from there on and wait; "
                f"the result is exact, a larger image would use them, and so would a join before: "
                f"{_join_before(graph, stage, node)}"
            )
            return [Finding("warning", "parallel.tiles", text)]
    return []


def _join_before(graph: Graph, stage: Stage, node: Node) -> str:
    """Returns how the tiles of a stage would join before a node, as keys."""
    starts = layer_starts(graph)
    layer = max(i for i, start in enumerate(starts) if start <= graph.position[node.name])
    first = sum(start < stage.first for start in starts)
    if layer <= first:
        return f"parallel.spatial_stages={stage.index}" if stage.index else "fewer parallel.tiles"
    cut = f"layer {layer} ({graph.nodes[starts[layer]].name})"
    return (
        f"end the stage at {cut}, as parallel=sp+lp parallel.stages=2 "
        f"parallel.balance=[{layer},{len(starts) - layer}] does"
    )


def _far_halos(stage: Stage) -> list[Finding]:
    """Returns a warning for the first halo that reaches beyond the nearest tile."""
    cols = stage.tiles[1]
    for op in stage.comm:
        for source, target, *_ in op.messages:
            far_rows = abs(source // cols - target // cols) > 1
            if far_rows or abs(source % cols - target % cols) > 1:
                text = (
                    f"tiles of stage {stage.index} are smaller than the halo of {op.node}: tile "
                    f"{target} also borrows from tile {source}; fewer tiles would send less"
                )
                return [Finding("warning", "parallel.tiles", text)]
    return []
