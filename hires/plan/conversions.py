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

Shards of the samples do the same. There a whole value has on each shard the part of its gradient
that the shard's samples cause: it is the gather that has messages both ways, and a crop is free.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from hires.plan.graph import INPUT, Graph, Node
from hires.plan.operators.operator_facts import draws_apart, facts_of
from hires.plan.plan import Stage
from hires.plan.rules import CROP, GATHER, SHARDED, TILED, WHOLE, rule_in, rule_of

EXPAND = "expand.default"

Refused = list[tuple[Stage, Node]]


def convert(graph: Graph, stages: list[Stage], gather: bool = True) -> tuple[Graph, Refused]:
    """Fills in how every value lies on the ranks of each stage.

    Returns the network with the conversions that this takes, which may move the bounds of the
    stages, and the nodes that no rank can compute; without ``gather`` also those computed whole.
    """
    result = Graph([], graph.output, graph.input_shape, graph.params)
    refused: Refused = []
    bounds = [0]
    for stage in stages:
        nodes = graph.nodes[stage.first : stage.last]
        stage.layout = {name: _incoming(graph, stage, name) for name in _reads(nodes)}
        builder = _Builder(graph, result, stage, gather)
        refused += [(stage, node) for node in nodes if not builder.add(node)]
        bounds.append(len(result.nodes))
    if len(result.nodes) == len(graph.nodes):
        return graph, refused
    for stage, first, last in zip(stages, bounds, bounds[1:], strict=False):
        stage.first, stage.last = first, last
    return result, refused


def _reads(nodes: list[Node]) -> list[str]:
    made = {node.name for node in nodes}
    read = dict.fromkeys(name for node in nodes for name in node.inputs)
    return [name for name in read if name not in made]


def _incoming(graph: Graph, stage: Stage, value: str) -> str:
    """Returns how a value that an earlier stage made arrives."""
    if stage.shards > 1:
        batched = graph.shape(value)[:1] == graph.input_shape[:1]
        return SHARDED if batched and value in graph.of_images else WHOLE
    return TILED if stage.num_tiles > 1 and is_map(graph, value) else WHOLE


def is_map(graph: Graph, value: str) -> bool:
    """Whether a value is made of the images and has pixels for tiles to share.

    Complex numbers are a spectrum.
    """
    if value == INPUT:
        return True
    shape = graph.by_name[value].shape or []
    if "complex" in (graph.by_name[value].dtype or ""):
        return False
    return len(shape) == 4 and shape[2] * shape[3] > 1 and value in graph.of_images


class _Builder:
    """Appends the nodes of one stage to a network, each behind the conversions that it needs."""

    def __init__(self, graph: Graph, result: Graph, stage: Stage, gather: bool) -> None:
        self.graph, self.result, self.stage, self.gather = graph, result, stage, gather
        self.divided = SHARDED if stage.shards > 1 else TILED
        # Value -> the names under which it lies divided and whole.
        self.forms = {value: {how: value} for value, how in stage.layout.items()}

    def add(self, node: Node) -> bool:
        """Appends a node; False: no rank can compute it."""
        forms = {value: self.forms[value] for value in node.inputs}
        names = {value: form.get(self.divided) or form[WHOLE] for value, form in forms.items()}
        candidate = _renamed(node, names)
        rule = rule_in(self.stage, candidate, self.result)
        if rule is not None and not (rule.kind == "whole" and self._pays(node)):
            shards = self.stage.shards > 1
            if shards and rule.kind == "whole":
                self._append_whole(candidate)
            else:
                self._append(candidate, SHARDED if shards else rule.result)
            return True
        if self.stage.num_tiles > 1 and not draws_apart(node) and self._add_cropped(node):
            return True
        missing = [value for value, form in forms.items() if WHOLE not in form]
        if self._is_refused(node, missing):
            # How its value would lie, so that what follows is judged as well.
            image = node.shape is None or len(node.shape) == 4
            self._append(candidate, self.divided if missing and image else WHOLE)
            return False
        for value in missing:
            name, args = f"{value}.gather{self.stage.index}", {"input": {"value": value}}
            self.forms[value][WHOLE] = self._convert(name, GATHER, args, self.graph.shape(value))
        whole = {value: self.forms[value][WHOLE] for value in node.inputs}
        self._append_whole(_renamed(node, whole))
        return True

    @functools.cached_property
    def paying(self) -> set[str]:
        """Nodes that are worth a crop: they multiply with weights, or lead to one that does.

        So a small map stays whole on its way from a pool to a classifier.
        """
        last, found = self.stage.last, set[str]()
        nodes = self.graph.nodes[self.stage.first : last]
        layout = {v: self._would_lie(v) for node in nodes for v in (node.name, *node.inputs)}
        for node in reversed(nodes):
            readers = [i for i in self.graph.consumers.get(node.name, []) if i < last]
            multiplies = facts_of(node.kind).multiplies is not None
            if multiplies or any(self.graph.nodes[index].name in found for index in readers):
                rule = rule_of(node, self.graph, layout)
                if rule is not None and rule.result == TILED:
                    found.add(node.name)
        return found

    def _pays(self, node: Node) -> bool:
        maps = any(is_map(self.graph, value) for value in node.inputs)
        return self.stage.num_tiles > 1 and maps and node.name in self.paying

    def _would_lie(self, value: str) -> str:
        if value != INPUT and self.graph.by_name[value].shape is None:
            return TILED
        if not is_map(self.graph, value):
            return WHOLE
        rows_and_cols = zip(self.graph.shape(value)[2:], self.stage.tiles, strict=True)
        return TILED if all(size >= parts for size, parts in rows_and_cols) else WHOLE

    def _is_refused(self, node: Node, missing: list[str]) -> bool:
        if draws_apart(node):
            return True
        lists = any(self.graph.by_name[v].shape is None for v in missing if v != INPUT)
        return bool(missing) and (lists or not self.gather)

    def _add_cropped(self, node: Node) -> bool:
        """Appends a node with its whole operands cropped to tiles, if that gives it a rule."""
        before, forms = len(self.result.nodes), {v: dict(self.forms[v]) for v in node.inputs}
        names = {value: self._cropped(value, node) for value in node.inputs}
        params = {param: self._cropped_param(param, node) for param in node.params}
        candidate = _renamed(node, names, {p: name for p, name in params.items() if name})
        tiled = any(self.stage.layout[name] == TILED for name in candidate.inputs)
        rule = rule_of(candidate, self.result, self.stage.layout) if tiled else None
        if rule is not None and rule.result == TILED:
            self._append(candidate, TILED)
            return True
        self.forms |= forms
        for undone in self.result.nodes[before:]:
            del self.result.by_name[undone.name], self.stage.layout[undone.name]
        del self.result.nodes[before:]
        return False

    def _cropped(self, value: str, node: Node) -> str:
        """Returns the name of an operand in tiles if it has pixels, else its own."""
        forms = self.forms[value]
        if TILED in forms or (value != INPUT and self.graph.by_name[value].shape is None):
            return forms.get(TILED) or forms[WHOLE]
        shape, source = self.graph.shape(value), {"value": forms[WHOLE]}
        size = map_size(shape, node)
        if size is not None and shape[-2:] != size:
            return self._expand_and_crop(value, source, shape, size)
        if size is not None or is_map(self.graph, value):
            forms[TILED] = self._crop(value, source, shape)
        return forms.get(TILED) or forms[WHOLE]

    def _cropped_param(self, param: str, node: Node) -> str | None:
        """Returns the name of a parameter's part in tiles if it has pixels, else None."""
        shape, source = self.graph.params[param].shape, {"param": param}
        size = map_size(shape, node)
        if size is None or shape[-2:] == size:
            return None if size is None else self._crop(param, source, shape)
        return self._expand_and_crop(param, source, shape, size)

    def _expand_and_crop(
        self, value: str, source: dict[str, str], shape: list[int], size: list[int]
    ) -> str:
        expanded = [*shape[:-2], *size]
        args = {"self": source, "size": expanded, "implicit": False}
        made = self._convert(f"{value}.expand{self.stage.index}", EXPAND, args, expanded)
        return self._crop(value, {"value": made}, expanded)

    def _crop(self, value: str, source: dict[str, str], shape: list[int]) -> str:
        name = f"{value}.crop{self.stage.index}"
        return self._convert(name, CROP, {"input": source}, [1] * (4 - len(shape)) + shape)

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
        args = {"input": {"value": whole}}
        self._append(self._conversion(node.name, CROP, args, shape), SHARDED)
        self.forms[node.name][WHOLE] = whole

    def _convert(self, name: str, op: str, args: dict[str, Any], shape: list[int]) -> str:
        """Appends a node that brings a value into another form; returns its name."""
        node = self._conversion(self._unused(name), op, args, shape)
        self._append(node, WHOLE if op in (GATHER, EXPAND) else TILED)
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

    def _append(self, node: Node, how: str) -> None:
        self.result.append(node)
        self.stage.layout[node.name] = how
        self.forms[node.name] = {how: node.name}


def map_size(shape: list[int], node: Node) -> list[int] | None:
    """Returns rows and columns of a node's map if an operand of this shape has any of them.

    Only operands of what computes every number alone are broadcast to the map.
    """
    size, made = shape[-2:], node.shape or []
    if len(made) != 4 or len(shape) > 4 or all(length == 1 for length in size):
        return None
    facts = facts_of(node.kind)
    if "pointwise" not in facts.tiling or facts.vectors:
        return made[2:] if size == made[2:] and len(shape) == 4 else None
    fits = all(length in (1, of) for length, of in zip(size[::-1], made[::-1], strict=False))
    return made[2:] if fits else None


def _renamed(node: Node, values: dict[str, str], params: dict[str, str] | None = None) -> Node:
    """Returns a node that reads its values under other names, and some parameters as values."""
    params = params or {}
    if not params and all(value == name for value, name in values.items()):
        return node

    def rename(arg: Any) -> Any:
        if isinstance(arg, list):
            return [rename(item) for item in arg]
        if isinstance(arg, dict) and list(arg) == ["value"]:
            return {"value": values[arg["value"]]}
        if isinstance(arg, dict) and arg.get("param") in params:
            return {"value": params[arg["param"]]}
        return arg

    return dataclasses.replace(node, args={key: rename(arg) for key, arg in node.args.items()})
