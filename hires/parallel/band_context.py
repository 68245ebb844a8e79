"""Lets operators take one band of rows for a tile, and bands for the tiles of an image."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hires.parallel.context import Context
from hires.plan.graph import Rect
from hires.plan.plan import Box


class UnfinishedError(Exception):
    """Not all bands have added their numbers."""


class BandNumbers:
    """Takes the place of the messages of tiles: what each band has for a node."""

    def __init__(self) -> None:
        self.parts: dict[str, list[Tensor]] = defaultdict(list)
        self.wanted: dict[str, int] = {}
        """How many bands have some."""
        self.collects = False
        self.rehearses = False
        """Whether only sizes count: then the first part stands for all."""

    def gather(self, tensor: Tensor, node: str, back: bool = False) -> Tensor:
        """Returns what all bands had, stacked; UnfinishedError: some have not come."""
        parts = self.parts[node]
        if len(parts) < self.wanted[node]:
            parts += [tensor.clone()] * (self.wanted[node] if self.rehearses else 1)
        if self.collects or len(parts) < self.wanted[node]:
            raise UnfinishedError
        return torch.stack(parts)


@dataclass
class BandContext(Context):
    """A slot whose tile is what a node computes now."""

    rects: dict[str, Rect] = field(default_factory=dict)
    """What is held of each map that the node reads, and what it makes."""
    source: str = ""
    """The first map that it reads."""
    bands: Mapping[str, list[Rect]] = field(default_factory=dict)
    """What each band holds of a map."""
    slot: Context | None = None
    """The one that computes in bands: its plan has one tile."""

    def __post_init__(self) -> None:
        assert self.slot is not None
        self.stage, self.tile = self.plan.stages[0], 0
        self.replica, self.tiles, self.dtype = self.slot.replica, self.slot.tiles, self.slot.dtype

    def own(self, size: list[int]) -> Rect:
        """Returns what the band has of the map that the node reads."""
        return self.rects[self.source]

    def own_of(self, value: str) -> Rect:
        """Returns the rectangle that the band has of a map."""
        return self.rects[value]

    def extent(self, value: str) -> Rect:
        """Returns the same."""
        return self.rects[value]

    def boxes(self, value: str, edge: int = -1) -> list[Box]:
        """Returns what each band holds of a map."""
        return [Box(0, self.plan.graph.input_shape[0], rect) for rect in self.bands[value]]

    @property
    def tile_order(self) -> list[int]:
        """All bands that hold some."""
        return [*range(len(self.bands[self.source]))]
