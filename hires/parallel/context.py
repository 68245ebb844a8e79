"""Holds what operators need of their rank: its slot, its groups, its place in the step."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import torch

from hires.comm import Group
from hires.parallel.cursor import Cursor
from hires.plan.graph import Rect
from hires.plan.groups import tile_group
from hires.plan.layout import Box, held_by
from hires.plan.plan import Plan, Slot, Stage
from hires.plan.tiling import own_rect, split

TORCH_DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
}


@dataclass
class Context:
    """One slot of a rank: its place in the plan in one direction, and the rank's groups."""

    plan: Plan
    rank: int
    groups: dict[int, Group]
    """By index in ``plan.groups.groups``."""
    cursor: Cursor
    """The rank's place in the events of a step; the slots of a rank share it."""
    direction: int = 0
    exchanges: dict[int, Any] = field(default_factory=dict)
    """The slot's ``halo.Exchange`` by its position in ``Stage.comm``, made when first used."""
    recomputing: bool = False
    """Whether a microbatch is computed again, so that its statistics must not count twice."""

    @functools.cached_property
    def slot(self) -> Slot:
        """Replica, direction, stage and tile."""
        return self.plan.slot_of(self.rank, self.direction)

    @property
    def stage(self) -> Stage:
        """The stage that the slot holds."""
        return self.plan.stages[self.slot.stage]

    @property
    def tile(self) -> int:
        """The slot's tile of the stage, counted row by row, or its shard."""
        return self.slot.tile

    @property
    def replica(self) -> int:
        """The rank's replica."""
        return self.slot.replica

    @property
    def tiles(self) -> Group:
        """The tiles or shards of this stage, replica and direction."""
        return self.groups[tile_group(self.plan, self.rank, self.direction)]

    @property
    def tile_order(self) -> list[int]:
        """Tile or shard of each rank of :attr:`tiles`; the up direction counts backwards."""
        return [self.plan.slot_of(rank, self.direction).tile for rank in self.tiles.ranks]

    @property
    def dtype(self) -> torch.dtype:
        """Type in which activations travel."""
        return TORCH_DTYPES[self.plan.dtype]

    @property
    def samples(self) -> tuple[int, int]:
        """Samples of a microbatch that this slot holds, first and end."""
        return self.samples_of(self.tile)

    def samples_of(self, tile: int) -> tuple[int, int]:
        """Returns the samples of a microbatch that a tile or shard of the stage holds."""
        batch = self.plan.graph.input_shape[0]
        return split(batch, self.stage.shards, tile) if self.stage.shards > 1 else (0, batch)

    def own(self, size: list[int], tile: int | None = None) -> Rect:
        """Returns the rectangle of an H x W map that this slot's tile (or another) owns."""
        if self.stage.num_tiles == 1:
            return 0, size[0], 0, size[1]
        return own_rect(size, self.stage.tiles, self.tile if tile is None else tile)

    def extent(self, value: str, tile: int | None = None) -> Rect:
        """Returns the rectangle of a tiled value that this slot's tile (or another) computes."""
        index = self.tile if tile is None else tile
        if value in self.stage.extents:
            r0, r1, c0, c1 = self.stage.extents[value][index]
            return r0, r1, c0, c1
        return self.own(self.plan.graph.shape(value)[2:], index)

    def held(self, value: str) -> Box:
        """Returns the part of a value that this slot holds."""
        key = "held", self.stage.index, value
        boxes = self.plan.remember(key, lambda: held_by(self.plan.graph, self.stage, value))
        return boxes[self.tile]
