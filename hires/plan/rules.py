"""Decides how the tiles, or the shards, of a stage compute a node together.

The table of operators (``hires.plan.operators``) names the ways in which an operator can be
computed; here is the condition that a node must meet for each, and the rule that follows.

    rule        a tile needs                             its value lies
    pointwise   its own pixels                           in tiles
    window      a window of its neighbours' pixels       in tiles
    norm        statistics of the whole image            in tiles
    reduce      numbers of the whole image               whole, the same on every tile
    whole       whole inputs: every tile computes alike  whole
    constant    nothing: its input has the right type    whole
    gather      the pixels that it lacks of a value      whole
    crop        its own pixels of a whole value          in tiles

Values in tiles may have their rows and columns in any dims (:mod:`hires.plan.factors`); what
follows from that alone is in :mod:`hires.plan.factor_rules`.

Shards hold all pixels of some samples of a microbatch (``parallel.local_dp``), so they only add up
statistics of the microbatch.

Source:
    Shards: the join of Jain's spatial parallelism in the manner of LBANN (thesis, chapter 3).
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass

from hires.plan.factor_rules import (
    ACROSS,
    NO_SUCH_RULE,
    TILINGS,
    NoRule,
    OperandDims,
    TiledOperands,
    fit_of,
    naming,
    refuse,
    required,
    worked_dims,
    works_along,
)
from hires.plan.factors import (
    ROWS,
    Dim,
    Dims,
    Factor,
    as_map,
    is_cut,
    is_map,
    map_dims,
    shape_of,
    unpack,
    whole_dims,
)
from hires.plan.graph import Graph, Node
from hires.plan.operators.operator_facts import OPERATORS, facts_of, is_random
from hires.plan.operators.operator_table import updates_statistics
from hires.plan.plan import Stage
from hires.plan.tiling import Axes

TILED, WHOLE, SHARDED = "tiled", "whole", "sharded"
"""How a value lies on the ranks of a stage: each holds its rectangle, or all hold the same complete
value, or each holds some samples."""


GATHER, CROP = "gather_tiles", "crop_to_tile"
"""Kinds of the nodes with which ``hires.plan.conversions`` brings a value from one of these ways
into the other."""


@dataclass(frozen=True)
class Rule:
    """How the ranks of a stage compute one node together."""

    kind: str
    """``pointwise``, ``window``, ``norm``, ``reduce``, ``constant``, ``gather`` or ``crop``;
    ``whole`` if all inputs are whole."""
    axes: Axes | None = None
    """``window`` only: which pixels of the one input each output pixel depends on."""
    elements: int = 0
    """``norm`` and ``reduce``: numbers that the ranks add up."""
    fit: TiledOperands | None = None
    """What follows from the factors of dims, if the rule does."""

    @property
    def result(self) -> str:
        """How the value lies on the tiles."""
        return WHOLE if self.kind in ("reduce", "whole", "constant", "gather") else TILED


def rule_in(stage: Stage, node: Node, graph: Graph) -> Rule:
    """Returns the rule of a node of a stage whose layout is known, and for which it has one."""
    rule = rule_or_reason(stage, node, graph)
    assert isinstance(rule, Rule), f"{node.name} was planned without a rule: it {rule}"
    return rule


def rule_or_reason(stage: Stage, node: Node, graph: Graph) -> Rule | str:
    """Returns the rule of a node of a stage whose layout is known, or why there is none."""
    if stage.num_ranks == 1:
        return Rule("whole")
    if node.kind in (GATHER, CROP):
        return Rule("gather" if node.kind == GATHER else "crop")
    if stage.shards > 1:
        return _rule_of_samples(node, graph, stage)
    tiled = (name for name in node.inputs if stage.layout[name] == TILED)
    return rule_of(node, graph, {name: dims_of(graph, stage, name) for name in tiled})


def dims_of(graph: Graph, stage: Stage, value: str) -> Dims:
    """Returns the dims of a value that tiles divide, or shards by samples; of a list's elements."""
    held = stage.factors.get(value)
    if held is not None:
        return unpack(held)
    if stage.shards > 1:
        samples, *rest = graph.shape(value)
        return (Factor(samples, ROWS, stage.shards),), *whole_dims(rest)
    return map_dims(graph.shape(value), stage.tiles)


def rule_of(node: Node, graph: Graph, tiled: dict[str, Dims]) -> Rule | str:
    """Returns the rule of a node that reads some values in tiles, or why tiles have none."""
    if not tiled:
        return Rule("whole")
    reasons = []
    for way in facts_of(node.kind).tiling:
        try:
            with naming(node):
                return _rule(way, node, graph, tiled)
        except NoRule as reason:
            reasons.append(str(reason))
    if graph.is_list(*tiled):
        return "reads a list of maps"
    if node.kind not in OPERATORS:
        return "no entry in the table of operators"
    random = is_random(node) and not facts_of(node.kind).positional
    return "draws random numbers for the whole value" if random else [*reasons, NO_SUCH_RULE][0]


def _rule(way: str, node: Node, graph: Graph, tiled: dict[str, Dims]) -> Rule:
    if way in _OF_MAPS:
        if not (_reads_first(node, tiled) and all(map(is_map, tiled.values()))):
            has_weight = node.args.get("weight") in [{"value": value} for value in tiled]
            refuse("its weight is a map" if has_weight else "its operands are no maps that align")
        return _OF_MAPS[way](node, graph, [*tiled])
    if way == "constant":
        return Rule("constant")
    if way == "reduction":
        return _reduction(node, graph, tiled)
    if way == "softmax":
        return _softmax(node, graph, tiled)
    fit = fit_of(way, OperandDims(node, graph, tiled))
    if fit.dims is None:
        return Rule("reduce", elements=node.num_elements, fit=fit)
    if is_map(fit.dims):
        return Rule("pointwise", fit=dataclasses.replace(fit, dims=as_map(fit.dims)))
    # The loss is computed from maps or whole values, and the output is stored as such.
    return Rule("pointwise", fit=fit) if node.name != graph.output else refuse(ACROSS)


def window_axes_of(node: Node, graph: Graph) -> Axes | None:
    """Returns which pixels of its input a node reads; None if it reads no window of an image."""
    window = facts_of(node.kind).window
    return None if window is None else window.axes(node, graph.shape(node.inputs[0]), graph)


def window_of(node: Node, value: str, rule: Rule) -> Axes | None:
    """Returns the axes through which a node reads a value; None: it lies like the result."""
    return rule.axes if value == node.inputs[0] else None


def _window(node: Node, graph: Graph, tiled: list[str]) -> Rule:
    axes = window_axes_of(node, graph)
    if axes is None and "pad" in node.args:
        mode = node.args.get("mode", "constant")
        refuse(f"{mode} padding" if mode != "constant" else "pads channels or samples")
    return Rule("window", required(axes, works_along(node)))


def _statistics(node: Node, graph: Graph, divided: list[str]) -> Rule:
    statistics = facts_of(node.kind).statistics
    assert statistics is not None, f"the entry of {node.kind} has no statistics"
    elements = statistics(node, graph.shape(divided[0]))
    elements = required(elements, "normalises other parts than channels and images")
    return Rule("norm", elements=elements) if elements else Rule("pointwise")


def _reduction(node: Node, graph: Graph, tiled: dict[str, Dims]) -> Rule:
    """It goes over rows, columns or both, alone or with other dims, or to one cell."""
    reduction = facts_of(node.kind).reduction
    assert reduction is not None, f"the entry of {node.kind} has no reduction"
    [factors, *_] = tiled.values()
    if "output_size" in node.args and not is_map(factors):
        refuse(f"pools to {node.args['output_size']} cells")
    along = reduced_dims(node, shape_of(factors)) if "dim" in node.args else ()
    if reduction(node) == 3 and any(f.axis is None for dim in along for f in factors[dim]):
        refuse(works_along(node))  # the place of the extreme is no row and column
    elements = reduction(node) * _num_results(node, graph, tiled)
    return Rule("reduce", elements=elements) if elements else refuse(works_along(node))


def _softmax(node: Node, graph: Graph, tiled: dict[str, Dims]) -> Rule:
    elements = _num_results(node, graph, tiled)
    [dims, *_] = tiled.values()
    dims = as_map(dims) if is_map(dims) else dims
    if node.name == graph.output and not is_map(dims):
        refuse(works_along(node))
    return Rule("norm", elements=elements, fit=TiledOperands(dims))


def _num_results(node: Node, graph: Graph, tiled: dict[str, Dims]) -> int:
    """Returns how many numbers a tile makes of its own pixels of one value."""
    [(value, factors), *others], first = tiled.items(), next(iter(node.args.values()))
    cells = node.args.get("output_size")
    why = works_along(node) if cells is None else f"pools to {cells} cells"
    if others or node.params or first != {"value": value}:
        refuse(why)
    if not _has_type(node, graph, value):
        refuse("sums in another type")
    dims, kept = reduced_dims(node, shape_of(factors)), kept_dim(node, factors)
    cut = {place for place, dim in enumerate(factors) if is_cut(dim)}
    if not cut & dims or len(cut - dims) > (kept is not None):
        refuse(why)
    left = ((place, size) for place, size in enumerate(shape_of(factors)) if place not in dims)
    return math.prod(most_of(factors[place]) if place == kept else size for place, size in left)


def kept_dim(node: Node, factors: Dims) -> int | None:
    """Returns the dim that tiles cut and that a reduction of the other one leaves."""
    dims = reduced_dims(node, shape_of(factors))
    kept = [d for d, dim in enumerate(factors) if is_cut(dim) and d not in dims and len(dim) == 1]
    return kept[0] if len(kept) == 1 else None


def most_of(dim: Dim) -> int:
    """Returns the rows, or columns, of the tile that has most of them."""
    [factor] = dim
    return -(-factor.size // factor.parts)


def reduced_dims(node: Node, shape: list[int]) -> set[int]:
    """Returns the dims of a map over which a node reduces it; a pool to one cell, over pixels."""
    if "output_size" in node.args:
        return {2, 3} if node.args["output_size"] in (1, [1], [1, 1]) else set()
    return {*worked_dims(node, len(shape))}


def _has_type(node: Node, graph: Graph, value: str) -> bool:
    """Whether a value is of real numbers, or quantised, and is not summed in another type."""
    if facts_of(node.kind).quantized:
        return True
    dtype = (graph.by_name[value].dtype or "") if value in graph.by_name else "float"
    return "float" in dtype and node.args.get("dtype") in (None, {"dtype": dtype})


_OF_MAPS: dict[str, Callable[[Node, Graph, list[str]], Rule]] = {
    "window": _window,
    "statistics": _statistics,
}
"""Ways of the table for nodes that read one map (n, C, H, W) and no other: (node, network, values
that it reads in tiles) -> rule; NoRule: not so. The other ways follow from factors."""


def _rule_of_samples(node: Node, graph: Graph, stage: Stage) -> Rule | str:
    """Returns the rule of a node on shards: that of tiles of which dim 0 has the rows."""
    divided = [name for name in node.inputs if stage.layout[name] == SHARDED]
    ways = facts_of(node.kind).tiling
    if not divided or ways == ("constant",):
        return Rule("whole")  # made from parameters alone; its gradient is summed as theirs are
    if ways == ("element",):
        return Rule("pointwise")
    if not graph.is_list(*divided):
        read = {name: dims_of(graph, stage, name) for name in divided}
        for way in ways:
            with contextlib.suppress(NoRule):
                return _way_of_samples(way, node, graph, read)
    random = is_random(node) and not facts_of(node.kind).positional
    return "draws random numbers for the whole value" if random else "works across the samples"


def _way_of_samples(way: str, node: Node, graph: Graph, read: dict[str, Dims]) -> Rule:
    if way == "statistics" and node.kind == "batch_norm":
        return _statistics(node, graph, [*read])
    if way in _OF_MAPS and _keeps_samples(way, node, graph, read):
        return Rule("pointwise")
    fit = fit_of(way, OperandDims(node, graph, read)) if way in TILINGS else TiledOperands(None)
    if fit.dims and not (fit.crops or fit.gathered):
        first, *others = fit.dims
        if first == next(iter(read.values()))[0] and not any(map(is_cut, others)):
            return Rule("pointwise", fit=fit)
    return refuse("works across the samples")


def _keeps_samples(way: str, node: Node, graph: Graph, read: dict[str, Dims]) -> bool:
    """Whether a window, or a norm by statistics, is one of each sample of the values alone."""
    rank, argument = len(graph.shape(node.inputs[0])), facts_of(node.kind).argument
    pads, normalised = node.args.get("pad", []), node.args.get("normalized_shape", [])
    moves = any(pads[2 * (rank - 1) :]) or len(normalised) == rank  # pads begin with the last dim
    if argument.startswith("dim") and argument in node.args:
        moves = 0 in worked_dims(node, rank)
    fits = rank >= (4 if way == "window" else 2) and (node.shape or [0])[0] == graph.input_shape[0]
    return fits and not moves and not updates_statistics(node) and _reads_first(node, read)


def _reads_first(node: Node, divided: dict[str, Dims]) -> bool:
    """Whether divided values are the first argument and that beside it; others are weights."""
    (_, first), *others = node.args.items()
    read = {key: arg["value"] for key, arg in others if isinstance(arg, dict) and "value" in arg}
    maps = [read.pop(facts_of(node.kind).residual_arg, None), (first or {}).get("value")]
    alone = read.keys() <= {"weight", "bias"} and divided.keys().isdisjoint(read.values())
    return alone and divided.keys() == {*maps} - {None}
