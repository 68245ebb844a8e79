r"""Decides which values the tiles of a stage gather, and which they crop to tiles again.

A node without a rule for tiles is computed whole: its tiled inputs are gathered, and every tile
computes it alike. What follows stays whole until a tile can save work again. Both conversions are
nodes of their own, so a value lies in one way only and all that counts nodes counts them too:

    x -----------------------> conv          in tiles
     \-> x.gather0 -> permute -> linear      whole: every tile computes the same
                                  \-> linear.crop0 -> conv     in tiles again

    gather   forward: a tile gets the pixels that it lacks     backward: it keeps its own
    crop     forward: it keeps its own pixels     backward: it gets the gradients that it lacks

So the gradient of a whole value is complete on every tile, as everywhere (``plan.layout``).

A value that tiles compute whole may be cropped again where it has pixels. Which of its dims are
rows and columns follows from the rules for a single tile, which no border cuts (its label).

Shards of the samples do the same. There a whole value has on each shard the part of its gradient
that the shard's samples cause: it is the gather that has messages both ways, and a crop is free.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from hires.plan.factor_rules import MULTIPLIES, TILINGS, NoRule, OperandDims, TiledOperands, fit_of
from hires.plan.factors import (
    Dims,
    axes_of,
    cropped,
    divided,
    is_cut,
    is_map,
    map_dims,
    map_shape,
    order_of_map,
    pack,
    shape_of,
    unpack,
)
from hires.plan.graph import INPUT, Graph, Node, reads_of, renamed
from hires.plan.operators.formulas import Ref
from hires.plan.operators.operator_facts import facts_of
from hires.plan.plan import Stage
from hires.plan.rules import (
    CROP,
    GATHER,
    SHARDED,
    TILED,
    WHOLE,
    Rule,
    dims_of,
    rule_in,
    rule_of,
    rule_or_reason,
)

EXPAND = "expand.default"
PERMUTE = "permute.default"


class Converted(NamedTuple):
    """A network whose stages know how every value lies."""

    graph: Graph
    stages: list[Stage]
    refused: list[tuple[Stage, Node]]
    """Nodes that no rank can compute, and their stages."""
    reasons: dict[str, str]
    """Nodes that no rank can divide, and why."""


def convert(graph: Graph, stages: Sequence[Stage], gather: bool = True) -> Converted:
    """Decides how values lie on the ranks of stages; without ``gather`` nodes may be refused."""
    made = Converted(dataclasses.replace(graph, nodes=[]), [], [], {})
    result, laid, labels = made.graph, made.stages, labels_of(graph)
    for cut in stages:
        stage = dataclasses.replace(cut, layout={}, factors={})  # which the builder fills
        nodes, first = graph.nodes[cut.first : cut.last], len(result.nodes)
        builder = _Builder(graph, result, stage, labels, gather, made.reasons)
        for name in reads_of(nodes):
            builder.receive(name, laid)
        missing = [node for node in nodes if not builder.add(node)]
        laid.append(dataclasses.replace(stage, first=first, last=len(result.nodes)))
        made.refused.extend((laid[-1], node) for node in missing)
    return made._replace(graph=graph) if len(result.nodes) == len(graph.nodes) else made


class _Builder:
    """Appends the nodes of one stage to a network, each behind the conversions that it needs."""

    def __init__(
        self,
        graph: Graph,
        result: Graph,
        stage: Stage,
        labels: dict[str, Dims],
        gather: bool,
        reasons: dict[str, str],
    ) -> None:
        self.graph, self.result, self.stage, self.gather = graph, result, stage, gather
        self.reasons = reasons  # which it adds to
        self.labels = labels if stage.num_tiles > 1 else {}
        self.divided = SHARDED if stage.shards > 1 else TILED
        # Value -> the names under which it lies divided and whole.
        self.forms: dict[str, dict[str, str]] = {}
        self.crops: dict[tuple[Ref, Dims], str] = {}

    def receive(self, value: str, earlier: Sequence[Stage]) -> None:
        """Decides how a value that an earlier stage made arrives."""
        stage, how, dims = self.stage, WHOLE, self._would(value)
        maps = [map_shape(unpack(one.factors[value])) for one in earlier if value in one.factors]
        before = (one for one in earlier if one.layout.get(value) == TILED)
        if dims is not None and any(value not in one.factors for one in before):
            dims = map_dims(self.graph.shape(value), stage.tiles)  # it lies as an ordinary map
        if stage.shards > 1:
            batch = self.graph.input_shape[:1]
            batched = self.graph.shape(value)[:1] == batch and all(m[:1] == batch for m in maps)
            how = SHARDED if batched and value in self.graph.of_images else WHOLE
        elif dims is not None:
            how = TILED if all(one == map_shape(dims) for one in maps) else WHOLE
        self._lay(value, value, how, dims)

    def add(self, node: Node) -> bool:
        """Appends a node; False: no rank can compute it."""
        if self.stage.num_tiles > 1:
            forms = {v: form for v in node.inputs if (form := self.forms[v].get(TILED)) is not None}
            tiled = {v: dims_of(self.result, self.stage, form) for v, form in forms.items()}
            rule = rule_of(node, self.graph, tiled)
            if isinstance(rule, str) or (rule.kind == "whole" and node.name in self.paying):
                # With what tiles could crop; lists are cropped one by one.
                tensors = (v for v in node.inputs if not self.graph.is_list(v))
                lifted = {v: dims for v in tensors if (dims := self._would(v)) is not None} | tiled
                later = rule_of(node, self.graph, lifted)
                if isinstance(later, Rule) and later.result == TILED:
                    rule, tiled = later, lifted
            if isinstance(rule, Rule):
                self._add_ruled(node, rule, tiled)
                return True
            return self._add_on_map(node, tiled) or self._add_whole(node, rule)
        return self._add_undivided(node)

    def _add_undivided(self, node: Node) -> bool:
        forms = {value: self.forms[value] for value in node.inputs}
        names = {value: form.get(self.divided) or form[WHOLE] for value, form in forms.items()}
        candidate = renamed(node, names)
        rule = rule_or_reason(self.stage, candidate, self.result)
        if isinstance(rule, str):
            return self._add_whole(node, rule)
        shards = self.stage.shards > 1
        if shards and rule.kind == "whole":
            self._append_whole(candidate)
        else:
            self._append(candidate, SHARDED if shards else rule.result)
        return True

    def _add_ruled(self, node: Node, rule: Rule, tiled: dict[str, Dims]) -> None:
        fit = rule.fit or TiledOperands(None)
        if fit.gathered:
            self.reasons[node.name] = MULTIPLIES
        names: dict[str, str] = {}
        params: dict[str, str] = {}
        for value in node.inputs:
            if value in tiled and value not in fit.gathered:
                form = self.forms[value].get(TILED)
                names[value] = form or self._crop(("value", value), tiled[value])
                self.forms[value].setdefault(TILED, names[value])
            else:
                names[value] = self._whole(value)
        for ref, dims in fit.crops.items():
            made = params if ref[0] == "param" else names
            made[ref[1]] = self._crop(ref, dims, fit.dims)
        self._append(renamed(node, names, params), rule.result, fit.dims)

    def _add_on_map(self, node: Node, tiled: dict[str, Dims]) -> bool:
        """Appends a node that reads a window of rows and columns in other dims, on a moved map."""
        window = facts_of(node.kind).window
        order = order_of_map(next(iter(tiled.values()))) if len(tiled) == 1 else None
        if window is None or window.moved is None or order is None or node.shape is None:
            return False
        [value], first = tiled, next(iter(node.args))
        names = [self._unused(f"{one}.map{self.stage.index}") for one in (value, node.name)]
        args = {**node.args, **window.moved(node, order), first: {"value": names[0]}}
        source, made = (
            [shape[dim] for dim in order] for shape in (self.graph.shape(value), node.shape)
        )
        moved = dataclasses.replace(node, name=names[1], args=args, shape=made)
        if node.name == self.graph.output or window.axes(moved, source, self.graph) is None:
            return False
        back = sorted(range(4), key=order.__getitem__)
        self._append_permuted(names[0], self.forms[value][TILED], order, source)
        self._append_ruled(moved)
        self._append_permuted(node.name, names[1], back, node.shape)
        return True

    def _add_whole(self, node: Node, reason: str) -> bool:
        self.reasons[node.name] = reason
        missing = [value for value in node.inputs if WHOLE not in self.forms[value]]
        refused = bool(missing) and (self.graph.is_list(*missing) or not self.gather)
        if refused:
            # How its value would lie, so that what follows is judged as well.
            names = {value: next(iter(self.forms[value].values())) for value in node.inputs}
            how = self.divided if node.shape is None or len(node.shape) == 4 else WHOLE
            dims = None if node.shape is not None else self._would(node.name)
            self._append(renamed(node, names), how if dims or node.shape else WHOLE, dims)
            return False
        names = {value: self._whole(value) for value in node.inputs}
        self._append_whole(renamed(node, names))
        return True

    @functools.cached_property
    def paying(self) -> set[str]:
        """Nodes that are worth a crop: they multiply with weights, or lead to one that does."""
        last, found = self.stage.last, set[str]()
        nodes = self.graph.nodes[self.stage.first : last]
        for node in reversed(nodes):
            readers = [i for i in self.graph.consumers.get(node.name, []) if i < last]
            multiplies = facts_of(node.kind).multiplies is not None
            if multiplies or any(self.graph.nodes[index].name in found for index in readers):
                dims = {v: one for v in node.inputs if (one := self._would(v)) is not None}
                large = {
                    value: one
                    for value, one in dims.items()
                    if all(map(int.__ge__, map_shape(one)[2:], self.stage.tiles))
                }
                rule = rule_of(node, self.graph, large) if large else None
                if isinstance(rule, Rule) and rule.result == TILED:
                    found.add(node.name)
        return found

    def _would(self, value: str) -> Dims | None:
        """Returns the dims of a value if it lay in tiles; None: it has no pixels to share."""
        label = self.labels.get(value)
        if label is None:
            return None
        if value == INPUT or (is_plain(label) and map_shape(label)[2:] != [1, 1]):
            return map_dims(shape_of(label), self.stage.tiles)
        return divided(label, self.stage.tiles)

    def _whole(self, value: str) -> str:
        """Returns the name under which every tile holds all of a value."""
        forms = self.forms[value]
        if WHOLE not in forms:
            args, shape = {"input": {"value": forms[self.divided]}}, self.graph.shape(value)
            forms[WHOLE] = self._convert(f"{value}.gather", GATHER, args, shape)
        return forms[WHOLE]

    def _crop(self, ref: Ref, dims: Dims, made: Dims | None = None) -> str:
        """Returns the name of an operand's part in tiles, for a result of dims ``made``.

        An operand with rows alone is expanded to columns first, so that its tiles are a map.
        """
        expands = made is not None and len(axes_of(dims)) < len(axes_of(made))
        if made is not None and expands:
            dims = cropped(_expanded(shape_of(dims), made), made)
        key, shape = (ref, dims), shape_of(dims)
        if key not in self.crops:
            kind, name = ref
            source = {kind: name if kind == "param" else self._whole(name)}
            if expands:
                args = {"self": source, "size": shape, "implicit": False}
                source = {"value": self._convert(f"{name}.expand", EXPAND, args, shape)}
            args = {"input": source}
            self.crops[key] = self._convert(f"{name}.crop", CROP, args, shape, dims)
        return self.crops[key]

    def _append_permuted(self, name: str, value: str, order: list[int], shape: list[int]) -> None:
        args = {"self": {"value": value}, "dims": order}
        self._append_ruled(self._conversion(name, PERMUTE, args, shape))

    def _append_ruled(self, node: Node) -> None:
        rule = rule_in(self.stage, node, self.result)
        self._append(node, rule.result, None if rule.fit is None else rule.fit.dims)

    def _append_whole(self, node: Node) -> None:
        """Appends a node that every rank computes alike; shards then keep their own samples."""
        shape, samples = node.shape or [], self.graph.input_shape[:1]
        sampled = shape[:1] == samples and node.name in self.graph.of_images
        if self.stage.shards == 1 or not sampled:
            self._append(node, WHOLE)
            return
        # All that follows, later stages too, expects samples where a value has them.
        whole = self._unused(f"{node.name}.whole{self.stage.index}")
        self._append(dataclasses.replace(node, name=whole), WHOLE)
        self.reasons[whole] = self.reasons.get(node.name, "")
        args = {"input": {"value": whole}}
        self._append(self._conversion(node.name, CROP, args, shape), SHARDED)
        self.forms[node.name][WHOLE] = whole

    def _convert(
        self, name: str, op: str, args: dict[str, Any], shape: list[int], dims: Dims | None = None
    ) -> str:
        """Appends a node that brings a value into another form; returns its name."""
        node = self._conversion(self._unused(f"{name}{self.stage.index}"), op, args, shape)
        self._append(node, WHOLE if dims is None else TILED, dims)
        return node.name

    def _unused(self, name: str) -> str:
        taken, number = name, 1
        while name in self.result.by_name or name in self.graph.by_name:
            name, number = f"{taken}_{number}", number + 1
        return name

    def _conversion(self, name: str, op: str, args: dict[str, Any], shape: list[int]) -> Node:
        node = Node(name, op, args, shape, "float32")
        for value in node.inputs if node.inputs != [INPUT] else ():
            source = self.result.by_name[value]
            node.dtype, node.needs_grad = source.dtype, source.needs_grad
        for param in node.params:
            held = self.graph.params[param]
            node.dtype, node.needs_grad = held.dtype, held.trainable
        return node

    def _append(self, node: Node, how: str, dims: Dims | None = None) -> None:
        self.result.append(node)
        self._lay(node.name, node.name, how, dims)

    def _lay(self, value: str, name: str, how: str, dims: Dims | None) -> None:
        self.stage.layout[name] = how
        self.forms[value] = {how: name}
        is_map_shaped = dims is not None and is_map(dims) and not self.result.is_list(name)
        if how == TILED and dims is not None and not is_map_shaped:
            self.stage.factors[name] = pack(dims)


def _expanded(shape: list[int], made: Dims) -> list[int]:
    """Returns the shape of an operand with all rows and columns of a result."""
    first = next(place for place, dim in enumerate(made) if is_cut(dim))
    rank = max(len(shape), len(made) - first)
    own = [1] * (rank - len(shape)) + shape
    pairs = zip(own, made[len(made) - rank :], strict=True)
    return [math.prod(f.size for f in dim) if is_cut(dim) else size for size, dim in pairs]


ONE_TILE = (1, 1)
MOVES = {"regrouped", "permuted", "expanded", "repeated", "product", "indexed"}
"""Ways in which the dims of a result are others than those of its operands."""


def labels_of(graph: Graph) -> dict[str, Dims]:
    """Returns the dims of every value that depends on the images, on one tile."""
    labels = {INPUT: map_dims(graph.input_shape, ONE_TILE)}
    for node in graph.nodes:
        read = {name: labels[name] for name in node.inputs if name in labels}
        dims = _label(node, graph, read) if node.name in graph.of_images else None
        if dims is not None and "complex" not in (node.dtype or ""):  # those are a spectrum
            labels[node.name] = dims
    return labels


def is_plain(label: Dims) -> bool:
    """Whether a label is that of an ordinary map (n, C, H, W)."""
    return len(label) == 4 and label == map_dims(shape_of(label), ONE_TILE)


def _label(node: Node, graph: Graph, read: dict[str, Dims]) -> Dims | None:
    ways, shape = facts_of(node.kind).tiling, node.shape or []
    if len(shape) == 4 and MOVES.isdisjoint(ways) and all(map(is_plain, read.values())):
        return map_dims(shape, ONE_TILE)
    found = None
    for way in ways if read else ():
        with contextlib.suppress(NoRule):
            found = fit_of(way, OperandDims(node, graph, read)).dims if way in TILINGS else None
        if found is not None:
            break
    if found is None:  # one without a rule may still make as many numbers as it reads
        found = next((dims for dims in read.values() if shape_of(dims) == shape), None)
    return map_dims(shape, ONE_TILE) if found is None and len(shape) == 4 else found
