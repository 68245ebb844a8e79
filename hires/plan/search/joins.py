"""Where would the tiles of a layout have to end, and which keys say so?

Tiles end where an operation has no rule, or where a map has fewer rows or columns than the grid.
Every advice changes as few keys as it can: directions, stages and tiles stay wherever they may.
"""

from __future__ import annotations

from hires.plan.graph import Graph, Node, describe
from hires.plan.partition import layer_starts, scaled
from hires.plan.plan import Finding, Stage
from hires.plan.rules import TILED


def no_rule(
    graph: Graph, stages: list[Stage], stage: Stage, nodes: list[Node], listed: bool
) -> Finding:
    """Explains that nodes of one kind cannot be tiled, and how to compute them after a join.

    Args:
        graph: the network.
        stages: where it is cut.
        stage: the one that holds the nodes.
        nodes: of one kind, in order.
        listed: whether ``parallel.tiles`` names a grid for each stage.
    """
    alike = f" and {len(nodes) - 1} more of its kind" if len(nodes) > 1 else ""
    has = "have" if alike else "has"
    who = f"{describe(nodes[0])}{alike} in stage {stage.index} {has}"
    if stage.shards > 1:
        text = f"{who} no rule for samples on several ranks; use parallel.local_dp=1"
        return Finding("error", "parallel.local_dp", text)
    if stage.index > 0:
        return Finding(
            "error",
            "parallel.tiles" if listed else "parallel.spatial_stages",
            f"{who} no tiling rule; {_tiled(stages, stage.index, listed)} joins the tiles before "
            f"that stage (it begins at {stage.first_layer})",
        )
    cut = _earlier_cut(graph, stages, nodes[0], listed)
    return Finding("error", "parallel.balance", f"{who} no tiling rule; {cut}")


def vanishing(graph: Graph, stages: list[Stage], listed: bool) -> list[Finding]:
    """Returns a warning for each stage's first value of which some tile holds nothing."""
    findings = []
    for stage in stages:
        node = _vanishes(graph, stage, stage.tiles)
        if node is None or node.shape is None:
            continue
        (rows, cols), size = stage.tiles, node.shape[2:]
        empty = rows * cols - min(rows, size[0]) * min(cols, size[1])
        text = (
            f"{describe(node)} makes a map of {size[0]}x{size[1]}, so {empty} of the "
            f"{rows}x{cols} tiles of stage {stage.index} hold nothing from there on and wait; "
            f"the result is exact, a larger image would use them, and so would "
            f"{_join_before(graph, stages, stage, node, listed)}"
        )
        findings.append(Finding("warning", "parallel.tiles", text))
    return findings


def far_halos(stage: Stage) -> list[Finding]:
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


def _vanishes(graph: Graph, stage: Stage, grid: list[int], first: int = 0) -> Node | None:
    """Returns the first node of a stage, from ``first`` on, whose map is too small for a grid."""
    for node in graph.nodes[max(first, stage.first) : stage.last]:
        if stage.layout[node.name] == TILED and node.shape is not None and node.shape[0] > 0:
            rows, cols = node.shape[2:]
            if rows < grid[0] or cols < grid[1]:
                return node
    return None


def _earlier_cut(graph: Graph, stages: list[Stage], node: Node, listed: bool) -> str:
    """Returns which cut would leave a node of stage 0 to a later, untiled stage."""
    layer = _layer_of(graph, node)
    if layer == 0:
        return "it belongs to the first layer, so this network cannot begin with tiles"
    name = graph.nodes[layer_starts(graph)[layer]].name
    keys = _ending(graph, stages, stages[0], layer, listed)
    return f"stage 1 can begin at layer {layer} ({name}): use {keys}"


def _join_before(graph: Graph, stages: list[Stage], stage: Stage, node: Node, listed: bool) -> str:
    """Returns how the tiles of a stage would join before a node, or fit it, as keys."""
    starts, layer = layer_starts(graph), _layer_of(graph, node)
    if starts[layer] > stage.first:
        name = graph.nodes[starts[layer]].name
        keys = _ending(graph, stages, stage, layer, listed)
        return f"a join before: end the stage at layer {layer} ({name}) with {keys}"
    if stage.index:
        return f"a join before: {_tiled(stages, stage.index, listed)}"
    return f"fewer tiles: {_fewer(graph, stages, listed)}"


def _fewer(graph: Graph, stages: list[Stage], listed: bool) -> str:
    """Returns the largest grid of which every tile holds pixels throughout the first layer.

    Where it is too large for what follows, the tiles join there.
    """
    stage, starts = stages[0], [*layer_starts(graph), len(graph.nodes)]
    grid = list(stage.tiles)
    for node in graph.nodes[: min(starts[1], stage.last)]:
        if stage.layout[node.name] == TILED and node.shape is not None and node.shape[0] > 0:
            grid = [max(1, min(pair)) for pair in zip(grid, node.shape[2:], strict=True)]
    later = _vanishes(graph, stage, grid, starts[1]) if grid != [1, 1] else None
    others = [other.tiles for other in stages[1 : _spatial(stages)]] if later is None else []
    words = f"parallel.tiles={_written([grid, *others] if listed else grid)}"
    if later is None:
        return words
    return f"{words} with {_ending(graph, stages, stage, _layer_of(graph, later), False)}"


def _ending(graph: Graph, stages: list[Stage], last: Stage, layer: int, listed: bool) -> str:
    """Returns the keys with which ``last`` is the last stage in tiles and ends before a layer.

    The stages before it stay as they are, and as many as there are follow it, or one.
    """
    starts = layer_starts(graph)
    counts = [sum(s.first <= start < s.last for start in starts) for s in stages]
    before = counts[: last.index]
    behind = scaled(counts[last.index + 1 :] or [1], len(starts) - layer)
    balance = [*before, layer - sum(before), *behind]
    keys = [f"parallel.stages={len(balance)}"] if len(balance) != len(stages) else []
    if _spatial(stages) != last.index + 1:
        keys.append(_tiled(stages, last.index + 1, listed))
    return " ".join([*keys, f"parallel.balance={_written(balance)}"])


def _tiled(stages: list[Stage], count: int, listed: bool) -> str:
    """Returns the keys with which only the first ``count`` stages are tiled.

    A list of grids says itself how many stages are, so it is shortened; the number is named beside
    it because it may have been given.
    """
    number = f"parallel.spatial_stages={count}"
    grids = [stage.tiles for stage in stages[:count]]
    return f"parallel.tiles={_written(grids)} {number}" if listed else number


def _spatial(stages: list[Stage]) -> int:
    """Returns how many stages there are up to the last one in tiles."""
    return max((stage.index + 1 for stage in stages if stage.num_tiles > 1), default=0)


def _layer_of(graph: Graph, node: Node) -> int:
    """Returns the index of the layer that a node belongs to."""
    return sum(start <= graph.position[node.name] for start in layer_starts(graph)) - 1


def _written(numbers: list[int] | list[list[int]]) -> str:
    """Returns a list as a user types it."""
    return str(numbers).replace(" ", "")
