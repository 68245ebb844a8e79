"""What must an operator know about the rank that it runs on?"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hires.comm import Group
from hires.plan.graph import Rect
from hires.plan.plan import CommOp, Plan, Stage
from hires.plan.program import Message, halo_messages, tile_group
from hires.plan.tiling import own_rect

TORCH_DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
}


@dataclass
class Context:
    """One rank's place in the plan, and the groups that it belongs to."""

    plan: Plan
    rank: int
    groups: dict[int, Group]
    """By index in ``plan.program.groups``."""

    @property
    def stage(self) -> Stage:
        """The stage that the rank holds."""
        return self.plan.stages[self.plan.slot_of(self.rank)[1]]

    @property
    def tile(self) -> int:
        """The rank's tile of the stage, counted row by row."""
        return self.plan.slot_of(self.rank)[2]

    @property
    def replica(self) -> int:
        """The rank's replica."""
        return self.plan.slot_of(self.rank)[0]

    @property
    def tiles(self) -> Group:
        """The tiles of this stage and replica."""
        return self.groups[tile_group(self.plan, self.rank)]

    @property
    def dtype(self) -> torch.dtype:
        """Type in which activations travel."""
        return TORCH_DTYPES[self.plan.dtype]

    def own(self, size: list[int], tile: int | None = None) -> Rect:
        """Returns the rectangle of an H x W map that this rank's tile (or another) owns."""
        return own_rect(size, self.stage.tiles, self.tile if tile is None else tile)

    def held(self, value: str, tile: int | None = None) -> Rect:
        """Returns the rectangle of a tiled value that this rank's tile (or another) holds."""
        index = self.tile if tile is None else tile
        if value in self.stage.held:
            r0, r1, c0, c1 = self.stage.held[value][index]
            return r0, r1, c0, c1
        return self.own(self.plan.graph.shape(value)[2:], index)

    def halo(self, op: CommOp, back: bool) -> tuple[list[Message], list[Message]]:
        """Returns the messages (sent, received) of an exchange, as the plan lists them."""
        return halo_messages(self.plan, self.rank, op, back)
