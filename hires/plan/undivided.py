"""Names what the ranks of a stage cannot divide: refused, computed whole at a price, or empty.

A node without a rule is refused with ``parallel.gather=never`` and computed whole on every rank
otherwise. A finding names the layer before which the tiles of a layout would have to end.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice

from hires.core.units import listed, size
from hires.plan.conversions import Converted
from hires.plan.event import BYTES
from hires.plan.graph import Graph, Node, describe
from hires.plan.operators.operator_facts import facts_of
from hires.plan.partition import layer_starts
from hires.plan.plan import Finding, Plan, Stage
from hires.plan.rules import CROP, GATHER, TILED, WHOLE
from hires.plan.traffic import calls

SHOWN = 6
"""Most reasons, and most kinds of nodes of one reason, that a finding names."""


def no_rules(made: Converted) -> list[Finding]:
    """Explains which nodes no rank can compute, and what avoids the first of them."""
    if not made.refused:
        return []
    stage, first = made.refused[0]
    named = nodes_in_words(made.refused, made.reasons)
    ranks = "shards of the samples" if stage.shards > 1 else "tiles"
    remedy = f"use parallel.gather=auto, or {_end_before(made.graph, stage, first)}"
    return [Finding("error", "parallel.gather", f"{ranks} cannot divide {named}; {remedy}")]


def nodes_in_words(nodes: Sequence[tuple[Stage, Node]], reasons: Mapping[str, str]) -> str:
    """Returns the first node of each reason to have no rule, and how many others have the same."""
    alike: dict[tuple[int, str], list[Node]] = {}
    for stage, node in nodes:
        alike.setdefault((stage.index, reasons[node.name]), []).append(node)
    words = []
    for (index, reason), [first, *others] in alike.items():
        kinds = [*dict.fromkeys(node.kind for node in others)]
        others_are = f"for the same reason ({listed(kinds, SHOWN)})"
        like = "of its kind" if kinds == [first.kind] else others_are
        more = f" and {len(others)} more {like}" if others else ""
        where = f" in stage {index}" if len({index for index, _ in alike}) > 1 else ""
        words.append(f"{first.name} ({first.kind}: {reason}){more}{where}")
    left = len(words) - SHOWN
    return ", ".join(words[:SHOWN]) + (f" and {left} other reasons" if left > 0 else "")


def _end_before(graph: Graph, stage: Stage, node: Node) -> str:
    """Returns which keys end the tiles of a stage before a node."""
    if stage.shards > 1:
        return "parallel.local_dp=1"
    starts = layer_starts(graph)
    layer = sum(start <= graph.position[node.name] for start in starts) - 1
    if layer and starts[layer] > stage.first:
        name = graph.nodes[starts[layer]].name
        return (
            f"end the tiles before layer {layer} ({name}): parallel.spatial_stages="
            f"{stage.index + 1} and a parallel.balance whose tiled stages hold {layer} layers"
        )
    if stage.index:
        return f"end the tiles before stage {stage.index}: parallel.spatial_stages={stage.index}"
    return "fewer parallel.tiles: it is in the first layer"


def vanishing(graph: Graph, stages: list[Stage]) -> Iterator[Finding]:
    """Yields a warning for each stage's first value of which some tile holds nothing."""
    for stage in stages:
        (rows, cols) = stage.tiles
        for node in graph.nodes[stage.first : stage.last]:
            tiled = stage.layout[node.name] == TILED and node.name not in stage.factors
            if not tiled or node.shape is None or node.shape[0] == 0:
                continue
            height, width = node.shape[2:]
            if height >= rows and width >= cols:
                continue
            empty = rows * cols - min(rows, height) * min(cols, width)
            text = (
                f"{describe(node)} makes a map of {height}x{width}, so {empty} of the "
                f"{rows}x{cols} tiles of stage {stage.index} hold nothing from there on and wait; "
                f"the result is exact; use a larger image, or {_end_before(graph, stage, node)}"
            )
            yield Finding("warning", "parallel.tiles", text)
            break


def far_halos(stages: list[Stage]) -> Iterator[Finding]:
    """Yields a warning for each stage's first halo that reaches beyond the nearest tile."""
    for stage in stages:
        cols = stage.tiles[1]
        far = (
            f"tiles of stage {stage.index} are smaller than the halo of {op.node}: tile "
            f"{target} also borrows from tile {source}; fewer tiles would send less"
            for op in stage.comm
            if op.kind == "halo"  # gathers, which read from all tiles, have a note of their own
            for source, target, _ in op.messages
            if abs(source // cols - target // cols) > 1 or abs(source % cols - target % cols) > 1
        )
        yield from (Finding("warning", "parallel.tiles", text) for text in islice(far, 1))


def gather_prices(plan: Plan, reasons: Mapping[str, str]) -> Iterator[Finding]:
    """Yields a note for each stage that gathers values: for which operators, and the price."""
    sent = dict.fromkeys(range(len(plan.stages)), 0)
    for call, number in calls(plan).items():
        if call.traffic in ("gather", "crop"):
            sent[call.stage] += call.sent_bytes(number)
    for stage in plan.stages:
        yield from _price(plan, stage, sent[stage.index], reasons)


def _price(plan: Plan, stage: Stage, sent: int, reasons: Mapping[str, str]) -> Iterator[Finding]:
    nodes = plan.nodes(stage.index)
    gathered = {node.name for node in nodes if node.kind == GATHER}
    causes = [(stage, node) for node in nodes if not gathered.isdisjoint(node.inputs)]
    if not causes:
        return
    replicated: list[Node] = []
    behind = set[str]()
    for node in nodes:
        reached = node.name in gathered or not behind.isdisjoint(node.inputs)
        if reached and node.kind != CROP and stage.layout[node.name] == WHOLE:
            behind.add(node.name)
            replicated.append(node)
    sizes = [
        node.num_elements * BYTES[plan.dtype_of(node.name)]
        for node in replicated
        if not facts_of(node.kind).view
    ]
    held = sum(sizes) if plan.training else max(sizes)
    flops = sum(node.flops for node in replicated)
    share = flops / max(1, sum(node.flops for node in nodes))
    ranks, what = ("tiles", "maps") if stage.num_tiles > 1 else ("shards", "microbatches")
    text = (
        f"each of the {stage.num_ranks} {ranks} of stage {stage.index} gathers whole {what} for "
        f"{nodes_in_words(causes, reasons)}. A step sends {size(sent)} for that, a rank holds "
        f"whole values of {size(held)}, and {share:.0%} of the stage's operations run on every "
        f"rank; to avoid it, {_end_before(plan.graph, stage, causes[0][1])}"
    )
    yield Finding("note", "parallel.gather", text)
