"""Advises where the tiles of a layout would have to end, as keys.

Tiles end where an operation has no rule, or where a map has fewer rows or columns than the grid.
The candidates change as few keys as they can: directions, stages and tiles stay wherever they may.

    layer      0  1  2  3 | 4  5  6  7 | 8       parallel.balance=[4,4,1], two stages in 2 x 2 tiles
                                   ^             a node that cannot be tiled, or a map of 1 x 1
    cut here   0  1  2  3 | 4  5 | 6  7  8       parallel.balance=[4,2,3]
    or join    0  1  2  3 | 4  5  6  7 | 8       parallel.spatial_stages=1
    in layer 0 neither helps                     parallel.tiles=[1,1]
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any

from hires.plan.graph import INPUT, Graph, Node, describe
from hires.plan.operators.operator_facts import OPERATORS, facts_of, is_random
from hires.plan.partition import layer_starts, scaled
from hires.plan.plan import Finding, Stage
from hires.plan.rules import TILED
from hires.plan.search.change import Change

SHOWN = 6
"""Most reasons, and most kinds of nodes of one reason, that a finding names."""
REASONS = {
    "regrouped": "moves pixels across the borders of tiles",
    "permuted": "moves pixels across the borders of tiles",
    "expanded": "moves pixels across the borders of tiles",
    "indexed": "reads the order of the pixels",
    "product": "multiplies along rows or columns",
}
"""How tiles compute an operator -> why they cannot compute a node of it."""


def no_rules(
    graph: Graph, stages: list[Stage], refused: list[tuple[Stage, Node]], listed: bool
) -> list[Finding]:
    """Explains which nodes no rank can compute, with the one change that avoids all of them."""
    if not refused:
        return []
    stage, first = refused[0]
    named = nodes_in_words(graph, refused)
    key, remedy = end_before(graph, stages, stage, first, listed)
    if not remedy:
        remedy = f"{first.name} belongs to the first layer, so this network cannot begin with tiles"
        key, remedy = "parallel.gather", f"{remedy}; use parallel.gather=auto"
    ranks = "shards of the samples" if stage.shards > 1 else "tiles"
    return [Finding("error", key, f"{ranks} cannot divide {named}; {remedy}")]


def nodes_in_words(graph: Graph, nodes: Sequence[tuple[Stage, Node]]) -> str:
    """Returns the first node of each reason to have no rule, and how many others have the same."""
    alike: dict[tuple[int, str], list[Node]] = {}
    for stage, node in nodes:
        alike.setdefault((stage.index, _why_whole(node, graph, stage)), []).append(node)
    words = []
    for (index, reason), [first, *others] in alike.items():
        kinds = [*dict.fromkeys(node.kind for node in others)]
        like = "of its kind" if kinds == [first.kind] else f"for the same reason ({_list(kinds)})"
        more = f" and {len(others)} more {like}" if others else ""
        where = f" in stage {index}" if len({index for index, _ in alike}) > 1 else ""
        words.append(f"{first.name} ({first.kind}: {reason}){more}{where}")
    left = len(words) - SHOWN
    return ", ".join(words[:SHOWN]) + (f" and {left} other reasons" if left > 0 else "")


def _why_whole(node: Node, graph: Graph, stage: Stage) -> str:
    """Returns why a node of a stage has no rule, as ``reflect padding``; it names the cause."""
    facts, args = facts_of(node.kind), node.args
    if is_random(node) and not facts.positional:
        return "draws random numbers for the whole value"
    if stage.shards > 1:
        return "works across the samples"
    maps = [value for value in node.inputs if stage.layout[value] == TILED]
    if any(value != INPUT and graph.by_name[value].shape is None for value in maps):
        return "reads a list of maps"
    if node.kind not in OPERATORS:
        return "no entry in the table of operators"
    if args.get("weight") in [{"value": value} for value in maps]:
        return "its weight is a map"
    if "pad" in args:
        mode = args.get("mode", "constant")
        return f"{mode} padding" if mode != "constant" else "pads channels or samples"
    if "output_size" in args:
        return f"pools to {args['output_size']} cells"
    if args.get(facts.argument) is not None:
        return f"works along {facts.argument} {args[facts.argument]}"
    for way in facts.tiling:
        if way in REASONS:
            return REASONS[way]
    sizes = {tuple(graph.shape(value)[2:]) for value in maps}
    if "pointwise" in facts.tiling and len(sizes) > 1:
        return f"its maps differ: {' and '.join('x'.join(map(str, s)) for s in sorted(sizes))}"
    if "pointwise" in facts.tiling and len(maps) > 1:
        return "its operands have their rows and columns in other dims"
    return "has no rule for tiles"


def _list(kinds: list[str]) -> str:
    left = len(kinds) - SHOWN
    return ", ".join(kinds[:SHOWN]) + (f" and {left} others" if left > 0 else "")


def end_before(
    graph: Graph, stages: list[Stage], stage: Stage, node: Node, listed: bool
) -> tuple[str, str]:
    """Returns the key and the words of the layout whose tiles end before a node.

    Without words: it belongs to the first layer, so there is none.
    """
    if stage.shards > 1:
        return "parallel.local_dp", "use parallel.local_dp=1"
    if stage.index > 0:
        key = "parallel.tiles" if listed else "parallel.spatial_stages"
        return key, (
            f"{_join(stages, stage.index, listed).text} joins the tiles before stage "
            f"{stage.index} (it begins at {stage.first_layer})"
        )
    layer = _layer_of(graph, node)
    if layer == 0:
        return "parallel.balance", ""
    name = graph.nodes[layer_starts(graph)[layer]].name
    keys = _cut(graph, stages, stage, layer, listed).text
    return "parallel.balance", f"stage 1 can begin at layer {layer} ({name}): use {keys}"


def vanishing(graph: Graph, stages: list[Stage], listed: bool) -> list[Finding]:
    """Returns a warning for each stage's first value of which some tile holds nothing."""
    findings = []
    for stage in stages:
        node = _vanishes(graph, stage, stage.tiles)
        if node is None or node.shape is None:
            continue
        (rows, cols), size = stage.tiles, node.shape[2:]
        empty = rows * cols - min(rows, size[0]) * min(cols, size[1])
        starts, layer = layer_starts(graph), _layer_of(graph, node)
        # Where the tiles join, or fit the map: with most tiles first.
        if starts[layer] > stage.first:
            name = graph.nodes[starts[layer]].name
            where = f"a join before: end the stage at layer {layer} ({name}) with"
            change = _cut(graph, stages, stage, layer, listed)
        elif stage.index:
            where, change = "a join before:", _join(stages, stage.index, listed)
        else:
            where, change = "fewer tiles:", _fewer(graph, stages, listed)
        text = (
            f"{describe(node)} makes a map of {size[0]}x{size[1]}, so {empty} of the "
            f"{rows}x{cols} tiles of stage {stage.index} hold nothing from there on and wait; "
            f"the result is exact, a larger image would use them, and so would {where} "
            f"{change.text}"
        )
        findings.append(Finding("warning", "parallel.tiles", text))
    return findings


def far_halos(stages: list[Stage]) -> list[Finding]:
    """Returns a warning for each stage's first halo that reaches beyond the nearest tile."""
    findings = []
    for stage in stages:
        cols = stage.tiles[1]
        far = (
            f"tiles of stage {stage.index} are smaller than the halo of {op.node}: tile "
            f"{target} also borrows from tile {source}; fewer tiles would send less"
            for op in stage.comm
            if op.kind == "halo"  # a gather borrows from all tiles, and its note says so
            for source, target, *_ in op.messages
            if abs(source // cols - target // cols) > 1 or abs(source % cols - target % cols) > 1
        )
        findings += [Finding("warning", "parallel.tiles", text) for text in islice(far, 1)]
    return findings


def _cut(graph: Graph, stages: list[Stage], last: Stage, layer: int, listed: bool) -> Change:
    """Returns the keys with which ``last`` is the last stage in tiles and ends before a layer.

    The stages before it stay as they are, and as many as there are follow it, or one.
    """
    starts = layer_starts(graph)
    counts = [sum(s.first <= start < s.last for start in starts) for s in stages]
    before = counts[: last.index]
    behind = scaled(counts[last.index + 1 :] or [1], len(starts) - layer)
    balance = [*before, layer - sum(before), *behind]
    keys: dict[str, Any] = {}
    if len(balance) != len(stages):
        keys["parallel.stages"] = len(balance)
    if _spatial(stages) != last.index + 1:
        keys |= _join(stages, last.index + 1, listed).keys
    return Change({**keys, "parallel.balance": balance})


def _join(stages: list[Stage], count: int, listed: bool) -> Change:
    """Returns the keys with which only the first ``count`` stages are tiled.

    A list of grids implies their number, which is named beside it: it may have been given.
    """
    grids = {"parallel.tiles": [stage.tiles for stage in stages[:count]]} if listed else {}
    return Change({**grids, "parallel.spatial_stages": count})


def _fewer(graph: Graph, stages: list[Stage], listed: bool) -> Change:
    """Returns the largest grid of which every tile holds pixels throughout the first layer.

    Where it is too large for what follows, the tiles join there.
    """
    stage, starts = stages[0], [*layer_starts(graph), len(graph.nodes)]
    grid = list(stage.tiles)
    for node in graph.nodes[: min(starts[1], stage.last)]:
        if _is_map(stage, node) and node.shape is not None:
            grid = [max(1, min(pair)) for pair in zip(grid, node.shape[2:], strict=True)]
    later = _vanishes(graph, stage, grid, starts[1]) if grid != [1, 1] else None
    others = [other.tiles for other in stages[1 : _spatial(stages)]] if later is None else []
    fewer = {"parallel.tiles": [grid, *others] if listed else grid}
    if later is None:
        return Change(fewer)
    return Change({**fewer, **_cut(graph, stages, stage, _layer_of(graph, later), False).keys})


def _vanishes(graph: Graph, stage: Stage, grid: list[int], first: int = 0) -> Node | None:
    """Returns the first node of a stage, from ``first`` on, whose map is too small for a grid."""
    for node in graph.nodes[max(first, stage.first) : stage.last]:
        if _is_map(stage, node) and node.shape is not None:
            rows, cols = node.shape[2:]
            if rows < grid[0] or cols < grid[1]:
                return node
    return None


def _is_map(stage: Stage, node: Node) -> bool:
    tiled = stage.layout[node.name] == TILED and node.name not in stage.factors
    return tiled and node.shape is not None and node.shape[0] > 0


def _spatial(stages: list[Stage]) -> int:
    return max((stage.index + 1 for stage in stages if stage.num_tiles > 1), default=0)


def _layer_of(graph: Graph, node: Node) -> int:
    return sum(start <= graph.position[node.name] for start in layer_starts(graph)) - 1
