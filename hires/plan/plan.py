"""What is decided before anything starts? The plan: plain data that is proved, stored and executed.

Replicas are equal, so stages, messages and schedules are stored once, in terms of (stage, tile);
``rank_of`` turns a slot into a rank.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from hires.core.errors import PlanError
from hires.plan.graph import Graph, Node

SCHEMA = 1


@dataclass
class Finding:
    """One thing that verification has to say."""

    severity: str
    """``error`` (nothing is started), ``warning`` or ``note``."""
    key: str
    """The config key to change."""
    text: str


@dataclass
class CommOp:
    """Communication inside a stage's forward pass, at one node."""

    node: str
    """The node that needs it."""
    kind: str
    """``halo`` (pixels of ``value`` from other tiles), ``norm`` (batch statistics), ``reduce`` (sum
    over the image), ``share`` (none forward; the gradient of ``value`` is summed) or ``loss``."""
    value: str
    """The value that the node reads."""
    messages: list[list[int]] = field(default_factory=list)
    """``halo``: [source tile, target tile, row0, row1, col0, col1]."""
    elements: int = 0
    """Numbers that every tile contributes to a collective."""
    back: bool = False
    """Whether the gradient travels too."""
    readers: list[str] = field(default_factory=list)
    """``halo``: the nodes that use these pixels, ``node`` first; their gradients travel together,
    when the backward pass comes to the first one."""


@dataclass
class Edge:
    """A value that one stage makes and a later one reads."""

    value: str
    source: int
    target: int
    whole: bool
    """Whether every tile of the source holds the complete value."""
    messages: list[list[int]]
    """[source tile, target tile, row0, row1, col0, col1]; the rectangle is unused if ``whole``."""
    back: list[list[int]]
    """The same for the gradient: [source tile, target tile, ...] with the gradient going target ->
    source; empty if there is none."""


@dataclass
class Stage:
    """A contiguous slice of the network."""

    index: int
    first: int
    """Index of its first node."""
    last: int
    """Index after its last node."""
    tiles: list[int]
    """[rows, cols]."""
    first_rank: int
    """Rank of its tile 0 within a replica."""
    num_layers: int = 0
    first_layer: str = ""
    last_layer: str = ""
    flops: int = 0
    params: int = 0
    comm: list[CommOp] = field(default_factory=list)
    layout: dict[str, str] = field(default_factory=dict)
    """Value -> ``tiled`` or ``whole`` for every value that the stage reads or makes."""
    held: dict[str, list[list[int]]] = field(default_factory=dict)
    """Value -> [row0, row1, col0, col1] for each tile, where tiles hold more than they own."""

    @property
    def num_tiles(self) -> int:
        """Ranks of the stage in one replica."""
        return self.tiles[0] * self.tiles[1]


@dataclass
class Plan:
    """Everything that decides a step."""

    graph: Graph
    stages: list[Stage]
    edges: list[Edge]
    num_replicas: int
    num_microbatches: int
    training: bool
    dtype: str
    """Type of activations in messages: ``float32``, ``bfloat16`` or ``float64``."""
    schedule: list[list[str]]
    """Actions of each stage in order, as ``F0``."""
    halo_overlap: str = "auto"
    """Whether a tile's interior is computed while its halo travels: ``auto``, ``on``, ``off``."""
    findings: list[Finding] = field(default_factory=list)
    verdict: str = ""
    totals: dict[str, Any] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether nothing forbids to start."""
        return all(finding.severity != "error" for finding in self.findings)

    @property
    def ranks_per_replica(self) -> int:
        """Ranks of one replica."""
        return sum(stage.num_tiles for stage in self.stages)

    @property
    def world(self) -> int:
        """All ranks."""
        return self.num_replicas * self.ranks_per_replica

    @property
    def pieces(self) -> int:
        """Microbatches of all replicas, over which the loss is averaged."""
        return self.num_replicas * self.num_microbatches

    def rank_of(self, replica: int, stage: int, tile: int) -> int:
        """Returns the rank that holds a slot."""
        return replica * self.ranks_per_replica + self.stages[stage].first_rank + tile

    def slot_of(self, rank: int) -> tuple[int, int, int]:
        """Returns (replica, stage, tile) of a rank."""
        replica, local = divmod(rank, self.ranks_per_replica)
        for stage in reversed(self.stages):
            if local >= stage.first_rank:
                return replica, stage.index, local - stage.first_rank
        raise AssertionError("rank 0 belongs to stage 0")

    def nodes(self, stage: int) -> list[Node]:
        """Returns the nodes of a stage in order."""
        return self.graph.nodes[self.stages[stage].first : self.stages[stage].last]

    def timeline(self) -> list[str]:
        """Returns one line a stage: its actions over time, ``.`` for idle."""
        from hires.plan.schedule import timeline

        return timeline(self.schedule)

    def require_ok(self) -> None:
        """Raises PlanError with all errors if there are any."""
        errors = [f"{f.text} [{f.key}]" for f in self.findings if f.severity == "error"]
        if errors:
            raise PlanError("; ".join(errors))

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values for ``plan.json``."""
        values: dict[str, Any] = {"schema": SCHEMA, "world": self.world}
        values["placement"] = self._placement()
        values["batch_per_microbatch"] = self.graph.input_shape[0]
        values.update({f.name: getattr(self, f.name) for f in dataclasses.fields(self)})
        for key in ("stages", "edges", "findings"):
            values[key] = [dataclasses.asdict(item) for item in values[key]]
        values["graph"] = self.graph.to_dict()
        return values

    @staticmethod
    def from_dict(values: dict[str, Any]) -> Plan:
        """Returns the plan that :meth:`to_dict` described.

        Raises:
            PlanError: the file was written by another version of the schema.
        """
        if values.get("schema") != SCHEMA:
            raise PlanError(
                f"plan.json has schema {values.get('schema')!r}, this hires reads {SCHEMA}; "
                f"make the run again"
            )
        kept = {f.name: values[f.name] for f in dataclasses.fields(Plan)}
        kept["graph"] = Graph.from_dict(values["graph"])
        kept["stages"] = [_stage(item) for item in values["stages"]]
        kept["edges"] = [Edge(**item) for item in values["edges"]]
        kept["findings"] = [Finding(**item) for item in values["findings"]]
        return Plan(**kept)

    def _placement(self) -> list[dict[str, Any]]:
        """Returns the slot of every rank."""
        placed = []
        for rank in range(self.world):
            replica, stage, tile = self.slot_of(rank)
            cols = self.stages[stage].tiles[1]
            where = list(divmod(tile, cols)) if self.stages[stage].num_tiles > 1 else None
            placed.append({"rank": rank, "replica": replica, "stage": stage, "tile": where})
        return placed


def _stage(values: dict[str, Any]) -> Stage:
    """Returns a stage from plain values."""
    return Stage(**{**values, "comm": [CommOp(**op) for op in values["comm"]]})
