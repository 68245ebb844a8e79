"""Plans an inference in bands of rows, so that an image need not fit into memory.

Bands are tiles that one rank computes one after the other, so that what follows from tiles
(:mod:`hires.plan.rules`) holds for bands. But bands need no halo: a node computes every row that it
can as soon as its inputs are known so far, and a value keeps its last rows for the next band. Two
convolutions of 3 rows, after bands of 4 rows of 12:

    image      | 0 1 2 3 | 4 5 6 7 | 8 9 10 11 |      keeps the last 2 rows for the next band
    conv1      | 0 1 2 | 3 4 5 6 | 7 8 9 10 11 |      keeps 2
    conv2      | 0 1 | 2 3 4 5 | 6 7 8 9 10 11 |      nothing is computed twice

Where a node needs the whole image first (a mean of all pixels, the statistics of a norm), the bands
begin again, in a second pass. Maps that both passes read are stored in between:

    pass 0     image -> conv -> relu -> mean, band by band            relu is stored
    between    mean -> linear -> sigmoid                              whole values
    pass 1     relu * sigmoid -> conv ..., band by band
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from hires.core.config.run_config import RunConfig
from hires.core.config.training_config import INFERENCE
from hires.core.units import listed, size
from hires.plan.conversions import convert
from hires.plan.event import BYTES
from hires.plan.factors import map_shape
from hires.plan.graph import INPUT, Graph, Node, Rect, describe
from hires.plan.plan import CommOp, Finding, Plan, Stage, derived
from hires.plan.rules import TILED, WHOLE, Rule, dims_of, rule_in, window_of
from hires.plan.tiling import CIRCULAR, TURNING, Axis, Interval

LEAST_ROWS = 16
"""Of a band, where ``parallel.band_rows=auto`` chooses them."""
SHOWN = 8
"""Names in a note."""
BAND_BYTES = 2**28
"""What the maps of one band may take, where ``parallel.band_rows=auto`` chooses its rows."""
ROWS, COLLECT, SUM, STORE = "rows", "collect", "sum", "store"
"""What a step makes of a band: rows of its map; numbers for the statistics of a norm, whose rows
come in the next pass; numbers of which the last band makes a whole value; rows of a whole map."""


@dataclass(frozen=True)
class BandStep:
    """What a node does in each band of a pass."""

    node: Node
    how: str
    reads: list[str]
    """The maps that it reads in bands."""
    rows: int
    """Of its map; of a whole value those of the first map that it reads."""


@dataclass
class BandPass:
    """One walk over the image from its first to its last row."""

    before: list[Node] = field(default_factory=list)
    """Nodes of whole values alone, which are computed before it."""
    steps: list[BandStep] = field(default_factory=list)
    sources: dict[str, int] = field(default_factory=dict)
    """Maps that it reads and does not make, the image and stored ones, and their rows."""
    ends: dict[tuple[str, str], list[int]] = field(default_factory=dict)
    """(value, how it is made; empty of sources) -> behind each band, how many rows are known."""
    keeps: dict[str, list[int]] = field(default_factory=dict)
    """Map -> behind each band, the first row that is still needed in this pass."""

    def rows(self, value: str, how: str, band: int) -> Interval:
        """Returns the rows of a map that a band makes."""
        ends = self.ends[value, how]
        return ends[band - 1] if band else 0, ends[band]


@dataclass(frozen=True, eq=False)
class Bands:
    """All passes of one stage, and what they keep."""

    plan: Plan
    """With conversions; its stage has two tiles, one above the other."""
    passes: list[BandPass]
    stored: set[str]
    """Maps that later passes read."""

    @property
    def graph(self) -> Graph:
        """The network, with what gathers maps and crops whole values."""
        return self.plan.graph

    @property
    def stage(self) -> Stage:
        """How its values lie in bands."""
        return self.plan.stages[0]

    @property
    def num_bands(self) -> int:
        """Bands of every pass."""
        return max((len(ends) for one in self.passes for ends in one.ends.values()), default=0)

    def rows_of(self, value: str) -> int:
        """Returns the rows of a value in bands."""
        return rows_of(self.graph, self.stage, value)

    @functools.cached_property
    def row_bytes(self) -> dict[str, int]:
        """Bytes of a row of each map."""
        sizes = {}
        for value, how in self.stage.layout.items():
            # Elements of a list are views, and taken at once.
            if how == TILED and not self.graph.is_list(value):
                samples, channels, _, cols = map_shape(dims_of(self.graph, self.stage, value))
                sizes[value] = _bytes([samples, channels, cols], self.plan.dtype_of(value))
        return sizes

    @functools.cached_property
    def kept_bytes(self) -> int:
        """Most bytes of the rows that wait for the next band."""
        most = 0
        for one in self.passes:
            made = {v: ends for (v, how), ends in one.ends.items() if how in ("", ROWS)}
            for band in range(self.num_bands):
                waiting = ((v, ends[band] - one.keeps[v][band]) for v, ends in made.items())
                most = max(most, sum(self.row_bytes.get(v, 0) * rows for v, rows in waiting))
        return most

    @functools.cached_property
    def stored_bytes(self) -> int:
        """Bytes of the maps that later passes read, and of those that are gathered."""
        gathered = {s.reads[0] for one in self.passes for s in one.steps if s.how == STORE}
        values = self.stored | gathered
        return sum(self.row_bytes.get(v, 0) * self.rows_of(v) for v in values)

    @property
    def walks(self) -> list[BandPass]:
        """The passes that go over the image: the last one may be of whole values alone."""
        return [one for one in self.passes if one.steps]

    @property
    def reasons(self) -> list[Node]:
        """The nodes because of which there are several walks, in order."""
        steps = (step for one in self.walks[:-1] for step in one.steps if step.how != ROWS)
        nodes, readers = self.graph.nodes, self.graph.consumers
        every = (
            [nodes[index] for index in readers.get(step.node.name, [])]
            if step.how == STORE
            else [step.node]
            for step in steps
        )
        return [*{node.name: node for some in every for node in some}.values()]

    @property
    def steady(self) -> int:
        """Bands behind which every node has made rows, and the next one is like those before."""
        firsts = (
            next((band for band, end in enumerate(ends) if end), 0)
            for one in self.passes
            for ends in one.ends.values()
        )
        return min(self.num_bands, max(firsts, default=0) + 3)


@derived
def bands_of(plan: Plan) -> Bands:
    """Returns the bands of a plan of one stage and one rank a replica."""
    [stage] = plan.stages
    two = dataclasses.replace(stage, tiles=[2, 1], comm=[], layout={}, factors={}, extents={})
    made = convert(plan.graph, [two])
    [stage], graph = made.stages, made.graph
    passes, stored = _passes(graph, stage)
    for one in passes:
        _schedule(graph, stage, one, graph.input_shape[2], plan.band_rows)
    norms = [
        CommOp(step.node.name, "norm", step.node.inputs[0])
        for one in passes
        for step in one.steps
        if step.how == COLLECT
    ]
    stage = dataclasses.replace(stage, comm=norms)
    banded = dataclasses.replace(plan, graph=graph, stages=[stage], halo_overlap="off")
    return Bands(banded, passes, stored)


def usual_band_rows(plan: Plan) -> int:
    """Returns the rows of a band whose maps take about BAND_BYTES, LEAST_ROWS or a multiple."""
    [stage] = plan.stages
    graph, height = plan.graph, plan.graph.input_shape[2]
    alive: dict[str, float] = {INPUT: _bytes(graph.input_shape, plan.dtype) / height}
    last = {name: node.name for node in graph.nodes for name in node.inputs}
    most = 0.0
    for node in graph.nodes[stage.first : stage.last]:
        alive[node.name] = _bytes(node.shape or [], plan.dtype_of(node.name)) / height
        most = max(most, sum(alive.values()))
        for name in node.inputs:
            if last[name] == node.name:
                alive.pop(name, None)
    return min(height, max(1, int(BAND_BYTES / max(most, 1)) // LEAST_ROWS) * LEAST_ROWS)


def rows_of(graph: Graph, stage: Stage, value: str) -> int:
    """Returns the rows of a value in bands; of a list's elements."""
    return map_shape(dims_of(graph, stage, value))[2]


def _bytes(shape: Iterable[int], dtype: str) -> int:
    return math.prod(shape) * BYTES[dtype]


def _passes(graph: Graph, stage: Stage) -> tuple[list[BandPass], set[str]]:
    # The pass in which a map is made, or before which a whole value is there.
    place: dict[str, int] = {INPUT: 0}
    passes: dict[int, BandPass] = defaultdict(BandPass)
    stored = set[str]()

    def add(step: BandStep, number: int) -> None:
        passes[number].steps.append(step)
        for name in step.reads:
            if name == INPUT or place[name] < number:
                passes[number].sources[name] = rows_of(graph, stage, name)
            if name != INPUT and place[name] < number:
                stored.add(name)

    for node in graph.nodes[stage.first : stage.last]:
        rule = rule_in(stage, node, graph)
        reads = [name for name in node.inputs if stage.layout[name] == TILED]
        first = max((place[name] for name in node.inputs), default=0)
        if rule.kind in ("whole", "constant"):
            place[node.name] = first
            passes[first].before.append(node)
            continue
        place[node.name] = first + (rule.kind not in ("pointwise", "window", "crop"))
        rows = rows_of(graph, stage, node.name if rule.result == TILED else reads[0])
        if rule.result == WHOLE:
            add(BandStep(node, STORE if rule.kind == "gather" else SUM, reads, rows), first)
            continue
        if rule.kind == "norm":
            add(BandStep(node, COLLECT, reads, rows), first)
        add(BandStep(node, ROWS, reads, rows), place[node.name])
    count = max([*passes, *place.values()], default=0) + 1
    return [passes[number] for number in range(count)], stored


def _schedule(graph: Graph, stage: Stage, one: BandPass, height: int, band_rows: int) -> None:
    # How many rows are known behind each band, from the first node to the last; then which of them
    # are needed again.
    reached = [min(height, end) for end in range(band_rows, height + band_rows, band_rows)]

    def paced(rows: int) -> list[int]:
        return [-(-rows * end // height) for end in reached]

    ends: dict[str, list[int]] = {}
    for name, rows in one.sources.items():
        ends[name] = one.ends[name, ""] = paced(rows)
    firsts: dict[str, list[list[int]]] = defaultdict(list)
    for step in one.steps:
        rule = rule_in(stage, step.node, graph)
        ways = {name: _way(graph, stage, step, rule, name) for name in step.reads}
        reached_by = [[known(end) for end in ends[name]] for name, (known, _) in ways.items()]
        made = [min(each) for each in zip(*reached_by, strict=True)] or paced(step.rows)
        one.ends[step.node.name, step.how] = made
        if step.how == ROWS:
            ends[step.node.name] = made
        for name, (_, first) in ways.items():
            rows = rows_of(graph, stage, name)
            needed = [rows if end >= step.rows else first(end) for end in made]
            firsts[name].append([min(pair) for pair in zip(needed, ends[name], strict=True)])
    for name, known in ends.items():
        readers = firsts.get(name)
        one.keeps[name] = [min(rows) for rows in zip(*readers, strict=True)] if readers else known


Way = tuple[Callable[[int], int], Callable[[int], int]]
"""Rows of an input that are known -> those of the node; and the first row of the input that its
rows from one on need."""


def _way(graph: Graph, stage: Stage, step: BandStep, rule: Rule, name: str) -> Way:
    axes = window_of(step.node, name, rule)
    if axes is not None:
        return functools.partial(_known, axes[0]), functools.partial(_first, axes[0])
    rows, out = rows_of(graph, stage, name), step.rows
    return lambda end: end * out // rows, lambda first: first * rows // out


def wanted_rows(graph: Graph, stage: Stage, step: BandStep, name: str, made: Interval) -> Interval:
    """Returns the rows of an input that lie where a node makes some."""
    rows, out = rows_of(graph, stage, name), step.rows
    return made[0] * rows // out, made[1] * rows // out


def _known(axis: Axis, end: int) -> int:
    if end >= axis.size_in:
        return axis.size_out
    if axis.kind in (CIRCULAR, TURNING):
        return bisect.bisect_right(_turning(axis)[0], end)
    return bisect.bisect_right(range(axis.size_out), end, key=lambda o: axis.need((o, o + 1))[1])


def _first(axis: Axis, made: int) -> int:
    if axis.kind in (CIRCULAR, TURNING):
        return _turning(axis)[1][made]
    return axis.need((made, made + 1))[0]


@functools.lru_cache(maxsize=2**6)
def _turning(axis: Axis) -> tuple[list[int], list[int]]:
    # Of rows whose needs do not follow their order: the last one of all before, the first of all
    # behind.
    needs = [axis.need((row, row + 1)) for row in range(axis.size_out)]
    ends = [*itertools.accumulate((end for _, end in needs), max)]
    firsts = [*itertools.accumulate((first for first, _ in reversed(needs)), min)]
    return ends, firsts[::-1]


def rect_of(graph: Graph, stage: Stage, value: str, rows: Interval) -> Rect:
    """Returns some rows of the map of a value in bands, with all their columns."""
    return *rows, 0, map_shape(dims_of(graph, stage, value))[3]


def check_bands(config: RunConfig, graph: Graph) -> Iterator[Finding]:
    """Yields what forbids to compute images in bands of rows."""
    parallel, task = config.parallel, config.task.name
    keys = {"tiles": [1, 1], "stages": 1, "local_dp": 1, "directions": 1}
    others = [
        f"parallel.{k}={getattr(parallel, k)}" for k in keys if getattr(parallel, k) != keys[k]
    ]
    why = ""
    if parallel.band_rows is None:
        return
    if task not in INFERENCE:
        why = f"are for inference, and task={task} is none; leave them out, or use parallel=sp"
    elif others:
        why = f"are computed on one rank, all layers, not with {others[0]}; leave that out, or use "
        why += "parallel=stream+dp for several images at once"
    elif config.engine.compile != "off":
        why = f"are not compiled; leave engine.compile={config.engine.compile} out"
    elif task == "evaluate" and len(graph.shape(graph.output)) == 4:
        why = "make maps row by row, and an evaluation needs them whole; use task=predict, or tiles"
    if why:
        head = f"bands of rows (parallel.band_rows={parallel.band_rows})"
        yield Finding("error", "parallel.band_rows", f"{head} {why}")


def note_on_bands(bands: Bands) -> Finding:
    """Returns what an inference in bands keeps, and which layers need the whole image first."""
    rows, count = bands.plan.band_rows, bands.num_bands
    what = f"{count} bands of {rows} row{'s' * (rows > 1)}; {size(bands.kept_bytes)} of rows wait"
    text = f"images are computed in {what} for the next band"
    if count < 2:
        text = f"all {rows} rows of an image are one band"
    if bands.reasons:
        text += (
            f", and {len(bands.walks)} passes go over the image, since "
            f"{listed([describe(node) for node in bands.reasons], SHOWN)} need"
            f"{'s' * (len(bands.reasons) == 1)} all of it: {size(bands.stored_bytes)} of maps are "
            f"stored between them"
        )
    return Finding("note", "parallel.band_rows", text)
