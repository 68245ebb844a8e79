"""Computes a network band by band, from rows of the image to rows of the output.

The plan (:mod:`hires.plan.bands`) says which rows each node makes in each band, and which rows of
each map wait for the next one. What a node computes is what a tile computes:

    rows of a map     kept | new          a window reads both, everything else the new ones
                      4  5 | 6 7 8 9
    its reader             makes 5 6 7 8, and keeps 8 9

Numbers of the whole image are combined as those of tiles are: each band adds its own, and behind
the last one they are stacked in the place of what a message would have brought.
"""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from hires.parallel.band_context import BandContext, BandNumbers, UnfinishedError
from hires.parallel.compile_node import compile_node, fixed_arguments
from hires.parallel.context import Context, Packer
from hires.parallel.conversion_kernels import from_map, tile_of, to_map
from hires.parallel.fused_products import pack_weight
from hires.parallel.halo import new_map, part
from hires.parallel.image_kernels import Operator
from hires.parallel.stage import Segment, StageModule, overwriting, overwriting_nodes
from hires.parallel.stored_maps import StoredMap
from hires.plan.bands import (
    COLLECT,
    ROWS,
    STORE,
    SUM,
    BandPass,
    Bands,
    BandStep,
    bands_of,
    wanted_rows,
)
from hires.plan.factors import map_shape
from hires.plan.graph import INPUT, Node, Rect
from hires.plan.operators.operator_facts import facts_of, is_random
from hires.plan.regions import Region
from hires.plan.rules import CROP, dims_of, rule_in
from hires.plan.tiling import Interval

Emit = Callable[[Rect, Tensor], None]
"""Takes rows of the output, and which they are."""
_SHIFTED = ("window", "transposed", "shuffle")
"""Kinds of axes on which bands are alike that read alike."""
_MOST_KEPT = 8
"""Operators of a node that are kept for other bands."""


class BandModule(StageModule):
    """The nodes of a stage on a rank that computes them in bands; ``tensors`` as of StageModule."""

    def __init__(self, context: Context, tensors: dict[str, Tensor]) -> None:
        super().__init__(context, tensors)
        self.bands: Bands = bands_of(context.plan)
        self.emit: Emit | None = None
        """Takes the output, where it is a map."""
        self.progress: Callable[[float], None] | None = None
        """Takes behind each band the share of the work that is done."""
        self.most_bands: int | None = None
        """Of each pass, where only sizes count; None: all."""
        self._numbers = BandNumbers()
        self._slot, numbers = context, cast(Any, self._numbers)
        place = context.rank, context.groups, numbers
        self._context = BandContext(self.bands.plan, *place, device=context.device, slot=context)
        self._kept: dict[str, dict[Any, Operator]] = defaultdict(dict)
        nodes = [node for one in self.bands.passes for node in one.before]
        self._whole = {
            n.name: self.buffers.reader(n) or compile_node(n, self._context, self.tensors)
            for n in nodes
        }
        context.packers += self._context.packers
        self._context.packers.clear()
        for node in (step.node for one in self.bands.passes for step in one.steps):
            facts, weight = facts_of(node.kind), node.args.get("weight") or {}
            if facts.packs and not facts.quantized and "param" in weight:
                pack = functools.partial(self._pack, node)
                context.packers.append(Packer(weight["param"], pack))
        later = {*self.outputs, *self.bands.stored}
        self._over = {
            name
            for one in self.bands.passes
            for name in overwriting_nodes(
                [step.node for step in one.steps if step.how == ROWS], [*later], {}, set()
            )
        }
        for one in self.bands.passes:
            for (name, how), ends in one.ends.items():
                if how in (COLLECT, SUM):
                    self._numbers.wanted[name] = len(_intervals(ends))

    def _segments(self, context: Context, regions: Sequence[Region]) -> list[Segment]:
        return []  # nodes are compiled for each band

    def _pack(self, node: Node) -> Tensor | None:
        # A weight for all bands: the order that oneDNN prefers hardly depends on their rows.
        bands, args = self.bands, fixed_arguments(node, self.tensors)
        n, channels, rows, cols = map_shape(dims_of(bands.graph, bands.stage, node.inputs[0]))
        rows = -(-rows * bands.plan.band_rows // bands.graph.input_shape[2])
        like = args["weight"].new_empty(1, dtype=self._context.dtype)
        return pack_weight(like.expand(n, channels, rows, cols), args)

    def forward(self, inputs: Mapping[str, Any]) -> dict[str, Tensor]:
        """Returns the output, if it is no map; else ``emit`` gets its rows.

        ``inputs`` has an object for the images, which :class:`hires.engine.band_images.BandImages`
        is: rows of them on demand.
        """
        self._images, slot, own = inputs.get(INPUT), self._slot, self._context
        own.seed, own.step, own.microbatch = slot.seed, slot.step, slot.microbatch
        self._values: dict[str, Any] = {}
        self._maps: dict[str, tuple[Interval, Any]] = {}
        self._stored: dict[str, StoredMap] = {}
        self._gathered: dict[str, Tensor] = {}
        self._numbers.parts.clear()
        self._numbers.rehearses = self.most_bands is not None
        last = {name: n for n, one in enumerate(self.bands.passes) for name in _read_whole(one)}
        for number, one in enumerate(self.bands.passes):
            for node in one.before:
                # Of a map only the type counts here.
                blanks = {n: self._blank(n) for n in node.inputs if n not in self._values}
                self._values[node.name] = self._whole[node.name]({**self._values, **blanks})
            self._walk(one, number)
            for name in [n for n in self._values if last.get(n, -1) <= number]:
                if name not in self.outputs:
                    del self._values[name]
            ahead = {name for later in self.bands.passes[number + 1 :] for name in later.sources}
            for name in self._stored.keys() - ahead:
                del self._stored[name]
        [output] = self.outputs
        return {output: self._values[output]} if output in self._values else {}

    def _blank(self, name: str) -> Tensor:
        dtype = getattr(torch, self.bands.plan.dtype_of(name))
        return torch.empty(0, dtype=dtype, device=self._context.device)

    def _walk(self, one: BandPass, number: int) -> None:
        readers = {name: step for step in one.steps for name in step.reads}  # the last one
        count = self.bands.num_bands if one.steps else 0
        for band in range(min(count, self.most_bands or count)):
            for name in one.sources:
                made = one.rows(name, "", band)
                if made[0] < made[1]:
                    ahead = one.rows(name, "", band + 1) if band + 1 < count else None
                    self._append(name, made, self._source(name, made, ahead))
            for step in one.steps:
                made = one.rows(step.node.name, step.how, band)
                if made[0] < made[1]:
                    self._run(one, step, band, made)
                for name in step.reads:
                    if readers[name] is step:
                        self._trim(name, one.keeps[name][band])
            if self.progress is not None:
                self.progress((number + (band + 1) / count) / len(self.bands.walks))
        self._maps.clear()

    def _source(self, name: str, made: Interval, ahead: Interval | None) -> Tensor:
        if name == INPUT:
            assert self._images is not None
            return self._images.rows(made, ahead)  # type: ignore[no-any-return]
        dims = dims_of(self.bands.graph, self.bands.stage, name)
        return from_map(self._stored[name].read(made), dims, self._rect(name, made))

    def _run(self, one: BandPass, step: BandStep, band: int, made: Interval) -> None:
        node, graph, stage = step.node, self.bands.graph, self.bands.stage
        if step.how == STORE:
            self._gather(node.name, step.reads[0], made)
            return
        if node.kind == CROP:
            [source] = node.args.values()
            whole = self._values[source["value"]] if "value" in source else None
            whole = self.tensors[source["param"]] if whole is None else whole
            dims, rect = dims_of(graph, stage, node.name), self._rect(node.name, made)
            value: Any = tile_of(whole, dims, rect).clone(memory_format=torch.preserve_format)
        else:
            value = self._computed(one, step, band, made)
        if step.how == SUM and value is not None:
            self._values[node.name] = value
        if step.how != ROWS:
            return
        if node.name in self.outputs and self.emit is not None:
            self.emit(self._rect(node.name, made), value)
        if node.name in self.bands.stored:
            self._keep(node.name, made, value)
        if any(node.name in other.reads for other in one.steps):
            self._append(node.name, made, value)

    def _computed(self, one: BandPass, step: BandStep, band: int, made: Interval) -> Any:
        # The value of a node in a band; None: of a sum that other bands add to.
        node, graph, stage = step.node, self.bands.graph, self.bands.stage
        rule = rule_in(stage, node, graph)
        values, rects = dict(self._values), dict[str, Rect]()
        for name in step.reads:
            held, value = self._maps[name]
            if rule.axes is None or name != node.inputs[0]:
                wanted = wanted_rows(graph, stage, step, name, made)
                value, held = self._rows(name, held, value, wanted), wanted
            values[name], rects[name] = value, self._rect(name, held)
        if step.how != SUM:
            rects[node.name] = self._rect(node.name, made)
        context = self._context
        context.rects, context.source = rects, step.reads[0] if step.reads else node.name
        key: Any = None
        if rule.kind == "window":
            assert rule.axes is not None
            axis, (first, end, *_) = rule.axes[0], rects[node.inputs[0]]
            if axis.kind in _SHIFTED:  # at a border it reads beyond what is held
                key = made[1] - made[0], axis.reach(made)[0] - first, end - first
        elif rule.kind == "pointwise" and not is_random(node):
            key = made[1] - made[0]
        overwrites = node.name in self._over and all(
            one.keeps[name][band] >= self._maps[name][0][1] for name in _written(node)
        )
        run = self._kept[node.name].get((key, overwrites)) if key is not None else None
        if run is None:
            run = self._compiled(step, overwrites)
            if key is not None:
                if len(self._kept[node.name]) >= _MOST_KEPT:
                    self._kept[node.name].clear()
                self._kept[node.name][key, overwrites] = run
        self._numbers.collects = step.how == COLLECT
        try:
            return run(values)
        except UnfinishedError:
            return None

    def _compiled(self, step: BandStep, overwrites: bool) -> Operator:
        context, node = self._context, step.node
        if (
            step.how in (COLLECT, SUM)
            or rule_in(self.bands.stage, node, self.bands.graph).kind == "norm"
        ):
            context.bands = {step.reads[0]: self._bands_of(step)}
            context.exchanges.clear()
        if overwrites and facts_of(node.kind).in_place:
            return overwriting(node)
        run = compile_node(node, context, self.tensors, overwrites)
        for packer in context.packers:
            packer.pack()
        context.packers.clear()
        return run

    def _bands_of(self, step: BandStep) -> list[Rect]:
        # What each band has for the numbers of a node.
        ways = ((step.node.name, how) for how in (COLLECT, SUM))
        ends = next(one.ends[w] for w in ways for one in self.bands.passes if w in one.ends)
        return [self._rect(step.reads[0], rows) for rows in _intervals(ends)]

    def _rect(self, name: str, rows: Interval) -> Rect:
        shape = map_shape(dims_of(self.bands.graph, self.bands.stage, name))
        return *rows, 0, shape[3]

    def _rows(self, name: str, held: Interval, value: Any, wanted: Interval) -> Any:
        # Some of the rows that are held of a map; of the elements of a list.
        if held == wanted:
            return value
        if isinstance(value, (tuple, list)):
            return [self._rows(name, held, one, wanted) for one in value]
        if name not in self.bands.stage.factors:
            return value[:, :, wanted[0] - held[0] : wanted[1] - held[0]]
        dims = dims_of(self.bands.graph, self.bands.stage, name)
        whole, rect = self._rect(name, held), self._rect(name, wanted)
        return from_map(part(to_map(value, dims, whole), whole, rect), dims, rect)

    def _append(self, name: str, made: Interval, value: Any) -> None:
        if name not in self._maps:
            self._maps[name] = made, value
            return
        (first, _), kept = self._maps[name]
        self._maps[name] = (first, made[1]), self._joined(name, (first, made[0]), kept, made, value)

    def _joined(self, name: str, above: Interval, kept: Any, below: Interval, value: Any) -> Any:
        if isinstance(value, (tuple, list)):
            pairs = zip(kept, value, strict=True)
            return [self._joined(name, above, one, below, other) for one, other in pairs]
        dims = dims_of(self.bands.graph, self.bands.stage, name)
        rect = self._rect(name, (above[0], below[1]))
        if name not in self.bands.stage.factors:
            rows = above[1] - above[0]
            whole = new_map(value, (*value.shape[:2], rows + value.shape[2], value.shape[3]))
            whole[:, :, :rows], whole[:, :, rows:] = kept, value
            return whole
        maps = (
            to_map(kept, dims, self._rect(name, above)),
            to_map(value, dims, self._rect(name, below)),
        )
        return from_map(torch.cat(maps, 2), dims, rect)

    def _trim(self, name: str, first: int) -> None:
        # Only a copy of what waits stays: a view would keep all of the band.
        if name not in self._maps:
            return
        held, value = self._maps[name]
        if first >= held[1]:
            del self._maps[name]
        elif first > held[0]:
            rows = self._rows(name, held, value, (first, held[1]))
            several = isinstance(rows, list)
            copied = [one.clone() for one in rows] if several else rows.clone()
            self._maps[name] = (first, held[1]), copied

    def _keep(self, name: str, made: Interval, rows: Tensor) -> None:
        # Stores rows of a map for a later pass.
        dims = dims_of(self.bands.graph, self.bands.stage, name)
        as_map = to_map(rows, dims, self._rect(name, made))
        if name not in self._stored:
            shape, on_disk = tuple(map_shape(dims)), self.bands.plan.stores_on_disk
            self._stored[name] = StoredMap(as_map, shape, on_disk)
        self._stored[name].write(made, as_map)

    def _gather(self, name: str, value: str, made: Interval) -> None:
        # Rows of a map of which a node needs all.
        held, rows = self._maps[value]
        dims = dims_of(self.bands.graph, self.bands.stage, value)
        as_map = to_map(self._rows(value, held, rows, made), dims, self._rect(value, made))
        if name not in self._gathered:
            self._gathered[name] = new_map(as_map, tuple(map_shape(dims)))
        whole = self._gathered[name]
        whole[:, :, made[0] : made[1]] = as_map
        if made[1] == whole.shape[2] or self.most_bands is not None:
            rect = self._rect(value, (0, whole.shape[2]))
            self._values[name] = from_map(whole, dims, rect)
        if made[1] == whole.shape[2]:
            del self._gathered[name]


def _intervals(ends: list[int]) -> list[Interval]:
    return [pair for pair in itertools.pairwise([0, *ends]) if pair[0] < pair[1]]


def _read_whole(one: BandPass) -> set[str]:
    nodes = [*one.before, *(step.node for step in one.steps)]
    return {name for node in nodes for name in node.inputs}


def _written(node: Any) -> list[str]:
    facts = facts_of(node.kind)
    operand = node.args.get(facts.residual_arg) if facts.residual_arg else None
    return [operand["value"] if operand else node.inputs[0]]
