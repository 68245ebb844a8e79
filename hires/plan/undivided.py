"""Names what the ranks of a stage cannot divide: refused, computed whole at a price, or empty.

A node without a rule is refused with ``parallel.gather=never`` and computed whole on every rank
otherwise. A finding names the layer before which the tiles of a layout would have to end.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from hires.core.units import listed, size
from hires.plan.conversions import Converted
from hires.plan.graph import Graph, Node, describe
from hires.plan.partition import layer_starts
from hires.plan.plan import Finding, Plan, Stage
from hires.plan.rules import CROP, GATHER, TILED, WHOLE
from hires.plan.traffic import calls

SHOWN = 6


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
    alike: dict[str, list[Node]] = {}
    for _, node in nodes:
        alike.setdefault(reasons[node.name], []).append(node)
    words = []
    for reason, [first, *others] in alike.items():
        kinds = [*dict.fromkeys(node.kind for node in others)]
        more = f" and {len(others)} more ({listed(kinds, SHOWN)})" if others else ""
        words.append(f"{first.name} ({first.kind}: {reason}){more}")
    return listed(words, SHOWN)


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


def gather_prices(plan: Plan, reasons: Mapping[str, str]) -> Iterator[Finding]:
    """Yields a note for each stage that gathers values: for which operators, and the price."""
    for stage in plan.stages:
        nodes = plan.nodes(stage.index)
        gathered = {node.name for node in nodes if node.kind == GATHER}
        causes = [(stage, node) for node in nodes if not gathered.isdisjoint(node.inputs)]
        if not causes:
            continue
        behind: dict[str, Node] = {}
        for node in nodes:
            reached = node.name in gathered or not behind.keys().isdisjoint(node.inputs)
            if reached and node.kind != CROP and stage.layout[node.name] == WHOLE:
                behind[node.name] = node
        sent = sum(
            call.sent_bytes(number)
            for call, number in calls(plan).items()
            if call.traffic in ("gather", "crop") and call.stage == stage.index
        )
        share = sum(n.flops for n in behind.values()) / max(1, sum(n.flops for n in nodes))
        ranks, what = ("tiles", "maps") if stage.num_tiles > 1 else ("shards", "microbatches")
        text = (
            f"each of the {stage.num_ranks} {ranks} of stage {stage.index} gathers whole {what} "
            f"for {nodes_in_words(causes, reasons)}. A step sends {size(sent)} for that, and "
            f"{share:.0%} of the stage's operations run on every rank; to avoid it, "
            f"{_end_before(plan.graph, stage, causes[0][1])}"
        )
        yield Finding("note", "parallel.gather", text)
