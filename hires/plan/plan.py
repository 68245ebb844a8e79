"""The plan: everything that is decided before a run, as data that is proved, stored and executed.

Replicas are equal, so stages, messages and schedules are stored once, in terms of (stage, tile);
``rank_of`` turns a slot into a rank. In two directions every rank has a slot in each.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

from hires.core.config.fields import build
from hires.core.errors import ConfigError, PlanError
from hires.core.schedules import Pipeline
from hires.plan.factors import map_shape, unpack
from hires.plan.graph import Graph, Node, Rect, plain
from hires.plan.tuning_table import TuningRule

SCHEMA = 6

P = ParamSpec("P")
S = TypeVar("S")
T = TypeVar("T")


class Slot(NamedTuple):
    """One rank's place in one direction, down (0) or up (1); tiles, or shards, row by row."""

    replica: int
    direction: int
    stage: int
    tile: int


@dataclass(frozen=True)
class Finding:
    """An error, warning or note of the verification."""

    severity: str
    """``error`` (nothing is started), ``warning`` or ``note``."""
    key: str
    text: str

    def __str__(self) -> str:
        return f"{self.text} [{self.key}]"


def errors_of(findings: Iterable[Finding]) -> str:
    """Returns the errors among findings in words; nothing if there is none."""
    return "; ".join(str(one) for one in findings if one.severity == "error")


class Box(NamedTuple):
    """A part of a value, or of its map."""

    n0: int
    """First of its samples."""
    n1: int
    """After the last one."""
    rect: Rect | None = None
    """Its pixels; None: all of them."""

    def shape(self, of: Sequence[int]) -> tuple[int, ...]:
        """Returns the shape of this part of a value, or map, of some shape."""
        if not of:  # a number, made from a parameter, has no samples
            return ()
        if self.rect is None:
            return self.n1 - self.n0, *of[1:]
        r0, r1, c0, c1 = self.rect
        return self.n1 - self.n0, of[1], r1 - r0, c1 - c0


class Transfer(NamedTuple):
    """A part of a value that one rank sends to another.

    Both are places among the ranks of their stage. A gradient takes the way back.
    """

    source: int
    target: int
    box: Box


@dataclass(frozen=True, eq=False)
class CommOp:
    """Communication inside a stage's forward pass, at one node."""

    node: str
    kind: str
    """``halo`` (pixels of ``value`` from other tiles), ``norm`` (statistics), ``reduce`` (sum
    over the image), ``share`` (none forward; the gradient of ``value`` is summed), ``gather`` (all
    pixels of ``value``), ``crop`` (none forward; the gradient of all pixels) or ``loss``."""
    value: str
    messages: list[Transfer] = field(default_factory=list)
    """``halo``, ``gather``, ``crop``: pixels of all samples."""
    elements: int = 0
    """Numbers that every tile contributes to a collective."""
    back: bool = False
    readers: list[str] = field(default_factory=list)
    """``halo``: the nodes that use these pixels, ``node`` first; their gradients travel together,
    when the backward pass comes to the first one. ``norm``: neighbours that share it."""

    @property
    def moves_pixels(self) -> bool:
        """Whether its messages are pixels of one tile for another; else it is a collective."""
        return self.kind in ("halo", "gather", "crop")

    @property
    def operation(self) -> str:
        """The collective that brings its numbers together."""
        return "all_reduce" if self.kind == "loss" else "all_gather"


@dataclass(frozen=True, eq=False)
class Edge:
    """A value that one stage makes and a later one reads."""

    value: str
    source: int
    target: int
    messages: list[Transfer]
    back: list[Transfer]
    """The same for the gradient, which goes target -> source; empty if there is none."""
    factors: list[list[list[Any]]] = field(default_factory=list)
    """Of its dims, as in ``Stage.factors``, where its map travels instead of itself."""

    def shape(self, graph: Graph) -> list[int]:
        """Returns the shape of the value, or of its map if that travels."""
        return map_shape(unpack(self.factors)) if self.factors else graph.shape(self.value)


@dataclass(frozen=True, eq=False)
class Stage:
    """A contiguous slice of the network."""

    index: int
    first: int
    last: int
    """Index after its last node."""
    tiles: list[int]
    """[rows, cols]."""
    first_rank: int
    """Rank of its tile 0 within a replica, in direction down."""
    shards: int = 1
    """Ranks that divide the samples of a microbatch instead of its pixels."""
    num_layers: int = 0
    first_layer: str = ""
    last_layer: str = ""
    flops: int = 0
    params: int = 0
    comm: list[CommOp] = field(default_factory=list)
    segments: list[int] = field(default_factory=list)
    """First nodes of the parts that are computed again in the backward pass, then ``last``; empty:
    everything is kept."""
    layout: dict[str, str] = field(default_factory=dict)
    """Value -> ``tiled``, ``sharded`` or ``whole`` for every value that the stage reads or
    makes."""
    extents: dict[str, list[list[int]]] = field(default_factory=dict)
    """Value -> [row0, row1, col0, col1] for each tile, where tiles compute more than they own."""
    factors: dict[str, list[list[list[Any]]]] = field(default_factory=dict)
    """Value -> [size, axis, parts] of the factors of each dim (``hires.plan.factors``), where a
    value in tiles is no map of (n, C, H, W)."""

    @property
    def num_tiles(self) -> int:
        """Tiles that an image is cut into."""
        return self.tiles[0] * self.tiles[1]

    @property
    def num_ranks(self) -> int:
        """Ranks of the stage in one replica and direction."""
        return self.num_tiles * self.shards


@dataclass(frozen=True, eq=False)
class Plan:
    """What decides a step, as ``plan.json`` holds it; what follows from it is kept beside it."""

    graph: Graph
    stages: list[Stage]
    edges: list[Edge]
    num_replicas: int
    num_microbatches: int  # of one model pass
    training: bool
    dtype: str  # of activations: float64, float32, float16 or bfloat16
    schedule: list[list[str]]
    """Actions of each rank of a replica in order, as ``F0``; microbatches count on over passes."""
    num_directions: int = 1
    num_pairs: int = 1
    resident: int = 1  # ranks that one process executes in turn (:mod:`hires.parallel.residents`)
    halo_overlap: str = "auto"
    band_rows: int = 0
    """Rows of the image that are computed at a time (``plan.bands``); 0: all."""
    stores_on_disk: bool = False
    """Whether maps that several walks over bands read lie in temporary files in between."""
    device: str = "cpu"
    backend: str = "gloo"
    """Carries every message without a route of its own."""
    num_nodes: int = 1
    """Machines over which the ranks are spread evenly, consecutive ranks together."""
    routes: list[TuningRule] = field(default_factory=list)
    """How messages travel: the first rule that holds one decides (``plan.message_routes``)."""
    table: dict[str, Any] = field(default_factory=dict)
    """The tuning table that these come from: its name, digest and granularity."""
    gradients: str = "together"
    """When gradients are summed, and in which messages (``plan.updates``)."""
    outstanding: int = 2
    """Sums of gradients under way at once, where their order is free; 0: there is no bound."""
    codecs: dict[str, str] = field(default_factory=dict)
    """By kind of message the codec that makes it smaller; it decodes to fp32 or better."""
    shards_optimizer: bool = False
    """Whether each holder of a stage updates a part of its parameters (``plan.updates``)."""
    optimizer_states: int = 1
    """Numbers that the optimiser keeps for each parameter."""
    scatters: bool = False
    """Whether it gets the sums of that part alone (``plan.updates``)."""
    scales_loss: bool = False
    clips_gradients: bool = False
    findings: list[Finding] = field(default_factory=list)
    verdict: str = ""
    totals: dict[str, Any] = field(default_factory=dict)
    memory: list[dict[str, int]] = field(default_factory=list)
    """Predicted :class:`~hires.plan.memory.RankMemory` of each rank of a replica, if any."""
    validation: Plan | None = None
    """Of the evaluations of a training, on the same ranks; None: it has none."""

    @property
    def ok(self) -> bool:
        """Whether nothing forbids to start."""
        return not self.errors

    @functools.cached_property
    def ranks_per_replica(self) -> int:
        """Ranks of one replica."""
        return sum(stage.num_ranks for stage in self.stages)

    @property
    def world(self) -> int:
        """All ranks."""
        return self.num_replicas * self.ranks_per_replica

    @property
    def total_microbatches(self) -> int:
        """Microbatches of one replica in one step, over all model passes."""
        return self.num_directions * self.num_pairs * self.num_microbatches

    @property
    def pieces(self) -> int:
        """Microbatches of all replicas, over which the loss is averaged."""
        return self.num_replicas * self.total_microbatches

    @property
    def num_processes(self) -> int:
        """Processes that execute the ranks."""
        return -(-self.world // self.resident)

    def rank_of(self, replica: int, direction: int, stage: int, tile: int) -> int:
        """Returns the rank that holds a slot; up is down in the opposite order of ranks."""
        local, count = self.stages[stage].first_rank + tile, self.ranks_per_replica
        return replica * count + (count - 1 - local if direction else local)

    def slot_of(self, rank: int, direction: int = 0) -> Slot:
        """Returns the slot that a rank holds in a direction."""
        replica, local = divmod(rank, self.ranks_per_replica)
        local = self.ranks_per_replica - 1 - local if direction else local
        stage = bisect.bisect_right(self.stages, local, key=lambda one: one.first_rank) - 1
        return Slot(replica, direction, stage, local - self.stages[stage].first_rank)

    def slots_of(self, rank: int) -> list[Slot]:
        """Returns the slots that a rank holds, one a direction."""
        return [self.slot_of(rank, direction) for direction in range(self.num_directions)]

    def direction_of(self, action: str) -> int:
        """Returns the direction of an action."""
        return int(action[1:]) // self.num_microbatches % self.num_directions

    def actions_of(self, rank: int) -> list[str]:
        """Returns what a rank does in one step, in order."""
        return self.schedule[rank % self.ranks_per_replica]

    def microbatches_of(self, direction: int) -> list[int]:
        """Returns the microbatches that run in a direction, in order."""
        every = range(self.total_microbatches)
        return [m for m in every if self.direction_of(f"F{m}") == direction]

    def nodes(self, stage: int) -> list[Node]:
        """Returns the nodes of a stage in order."""
        return self.graph.nodes[self.stages[stage].first : self.stages[stage].last]

    def dtype_of(self, value: str) -> str:
        """Returns the type in which ranks hold a value: masks and indices keep their own."""
        own = getattr(self.graph.by_name.get(value), "dtype", None)
        return self.dtype if own is None or "float" in own else own

    @property
    def pipeline(self) -> Pipeline:
        """What the schedule was made for."""

        def ranks_of(direction: int, stage: Stage) -> tuple[int, ...]:
            return tuple(self.rank_of(0, direction, stage.index, t) for t in range(stage.num_ranks))

        ways = range(self.num_directions)
        ranks = tuple(tuple(ranks_of(way, stage) for stage in self.stages) for way in ways)
        return Pipeline(ranks, self.num_microbatches, len(ways) * self.num_pairs, self.training)

    def __getstate__(self) -> dict[str, Any]:
        """Returns what a pickle holds: no derived facts, which name objects of this process."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def with_results(self, **results: Any) -> Plan:
        """Returns the plan with other findings, totals, memory and the like, which decide nothing.

        What was derived from its decisions still holds.
        """
        plan = dataclasses.replace(self, **results)
        plan.__dict__["_derived"] = self.__dict__.setdefault("_derived", {})
        return plan

    def with_findings(self, *findings: Finding) -> Plan:
        """Returns the plan with more findings."""
        return self.with_results(findings=[*self.findings, *findings])

    @property
    def errors(self) -> str:
        """Its errors in words; nothing if there is none."""
        return errors_of(self.findings)

    def require_ok(self) -> None:
        """Raises PlanError with all errors if there are any."""
        if self.errors:
            raise PlanError(self.errors)

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values for ``plan.json``, with the slots of every rank."""
        placement = []
        for rank in range(self.world):
            for replica, direction, index, tile in self.slots_of(rank):
                stage, way = self.stages[index], ("down", "up")[direction]
                place = [*divmod(tile, stage.tiles[1])] if stage.num_tiles > 1 else None
                entry = {"rank": rank, "replica": replica, "direction": way, "stage": index}
                shard = tile if stage.shards > 1 else None
                placement.append({**entry, "tile": place, "shard": shard})
        own = {"schema": SCHEMA, "world": self.num_processes, "placement": placement}
        return {**own, "batch_per_microbatch": self.graph.input_shape[0], **plain(self)}

    @staticmethod
    def from_dict(values: dict[str, Any]) -> Plan:
        """Returns the plan that was described so; PlanError: of another schema, or damaged."""
        if values.get("schema") != SCHEMA:
            raise PlanError(
                f"plan.json has schema {values.get('schema')!r}, this hires reads {SCHEMA}; "
                f"make the run again"
            )
        try:
            kept = {field.name: values[field.name] for field in dataclasses.fields(Plan)}
            kept["graph"] = Graph.from_dict(values["graph"])
            kept["stages"] = [
                Stage(**{**stage, "comm": [_with_messages(CommOp, op) for op in stage["comm"]]})
                for stage in values["stages"]
            ]
            kept["edges"] = [_with_messages(Edge, edge, "back") for edge in values["edges"]]
            kept["findings"] = [Finding(**item) for item in values["findings"]]
            if (other := values.get("validation")) is not None:
                kept["validation"] = Plan.from_dict({"schema": SCHEMA, **other})
            kept["routes"] = [build(TuningRule, rule) for rule in values["routes"]]
            if any(problem for rule in kept["routes"] for problem in rule.problems()):
                raise ConfigError("routes")
            return Plan(**kept)
        except (AttributeError, ConfigError, IndexError, KeyError, TypeError, ValueError) as error:
            why = f"{type(error).__name__}: {str(error)[:200]}"
            raise PlanError(f"plan.json is damaged ({why}); make the run again") from None


def _with_messages(kind: Callable[..., T], values: dict[str, Any], *others: str) -> T:
    def read(source: int, target: int, box: list[Any]) -> Transfer:
        n0, n1, rect = box
        return Transfer(source, target, Box(n0, n1, rect and (*rect,)))

    keys = "messages", *others
    return kind(**values | {key: [read(*row) for row in values[key]] for key in keys})


def derived(function: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """Returns a function whose results its first argument, as a plan, keeps by the others."""

    @functools.wraps(function)
    def kept(source: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        results = source.__dict__.setdefault("_derived", {})
        key = function, *args, *kwargs.values()
        if key not in results:
            results[key] = function(source, *args, **kwargs)
        return results[key]  # type: ignore[no-any-return]

    return kept
