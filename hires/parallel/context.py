"""Holds what operators need of their rank: its slot, its groups, its place in the step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hires.comm import Group
from hires.parallel.cursor import Cursor
from hires.plan.factors import map_shape
from hires.plan.graph import Rect
from hires.plan.groups import tile_group
from hires.plan.layout import held_by
from hires.plan.plan import Box, Plan, Stage, derived
from hires.plan.rules import dims_of
from hires.plan.tiling import own_rect, split


class Packer(NamedTuple):
    """A node that can keep its weight in the order in which its kernel reads it."""

    weight: str
    """The name of the weight, which the node no longer reads if it keeps it."""
    pack: Callable[[], Tensor | None]
    """Returns what it keeps; None: nothing."""


@dataclass
class Context:
    """One slot of a rank: its place in the plan in one direction, and the rank's groups."""

    plan: Plan
    rank: int
    groups: dict[int, Group]  # by index in ``plan.groups.groups``
    cursor: Cursor  # the rank's place in the events of a step; the slots of a rank share it
    direction: int = 0
    exchanges: dict[int, Any] = field(default_factory=dict)
    """The slot's ``halo.Exchange`` by its position in ``Stage.comm``, made when first used."""
    packers: list[Packer] = field(default_factory=list)
    """What nodes do once the slot's tensors have their values."""
    recomputing: bool = False
    """Whether a microbatch is computed again, so that its statistics must not count twice."""
    device: torch.device = field(default_factory=torch.get_default_device)
    """Where the slot's tensors lie: what it makes without an operand is made there."""
    seed: int = 0
    step: int = 0
    microbatch: int = 0
    """What is computed now, of the replica's; with seed and step, random numbers follow from it."""
    band: Rect | None = None
    """Of an output that comes in bands, the rows that have come now."""

    def __post_init__(self) -> None:
        slot = self.plan.slot_of(self.rank, self.direction)
        self.stage = self.plan.stages[slot.stage]
        self.replica = slot.replica
        self.tile = slot.tile  # the slot's tile of the stage, counted row by row, or its shard
        self.tiles = self.groups[tile_group(self.plan, self.rank, self.direction)]
        """The ranks of all tiles or shards of this stage, replica and direction."""
        self.dtype: torch.dtype = getattr(torch, self.plan.dtype)
        """Type of activations, to which autocast lowers products."""

    @property
    def samples(self) -> tuple[int, int]:
        """Samples of a microbatch that this slot holds, first and end."""
        batch, shards = self.plan.graph.input_shape[0], self.stage.shards
        return split(batch, shards, self.tile) if shards > 1 else (0, batch)

    @property
    def first_sample(self) -> int:
        """The microbatch's first sample in the batch of the step, which all replicas make up."""
        return self.place * self.plan.graph.input_shape[0]

    @property
    def place(self) -> int:
        """The microbatch's place in the step of one process, which takes replica by replica."""
        return self.replica * self.plan.total_microbatches + self.microbatch

    def own(self, size: list[int]) -> Rect:
        """Returns the rectangle of an H x W map that this slot's tile owns."""
        return own_rect(size, self.stage.tiles, self.tile if self.stage.num_tiles > 1 else 0)

    def extent(self, value: str) -> Rect:
        """Returns what the tile computes; more than its own if one halo serves several layers."""
        if value in self.stage.extents:
            r0, r1, c0, c1 = self.stage.extents[value][self.tile]
            return r0, r1, c0, c1
        return self.own_of(value)

    def own_of(self, value: str) -> Rect:
        """Returns the rectangle that this slot's tile owns of the map of a value in tiles."""
        return self.own(map_shape(dims_of(self.plan.graph, self.stage, value))[2:])

    def held(self, value: str, edge: int = -1) -> Box:
        """Returns the part of a value that this slot holds; of its map, as it crosses an edge."""
        return self.boxes(value, edge)[self.tile]

    def boxes(self, value: str, edge: int = -1) -> list[Box]:
        """Returns the part of it that each tile or shard of the stage holds."""
        return _held_by(self.plan, self.stage, value, edge)

    @property
    def tile_order(self) -> list[int]:
        """The tile or shard of each rank of the stage: gathers stack in the order of ranks.

        The up direction has its tiles in reverse order of them.
        """
        return [self.plan.slot_of(rank, self.direction).tile for rank in self.tiles.ranks]


@derived
def _held_by(plan: Plan, stage: Stage, value: str, edge: int) -> list[Box]:
    return held_by(plan.graph, stage, value, plan.edges[edge].factors if edge >= 0 else None)
