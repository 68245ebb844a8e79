"""Declares ``parallel.*``: the keys of a layout, with every default."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from hires.core.config.fields import Section, value
from hires.core.schedules import SCHEDULES, usual_schedule

OBJECTIVES = ("images_per_s", "memory", "image")
"""By which ``parallel=auto`` chooses."""
AUTO = "auto"
"""The name of a layout that is still to be chosen."""


@dataclass
class HaloConfig(Section, key="parallel.halo"):
    """``parallel.halo.*``: how tiles borrow the pixels around them."""

    fuse: int = value(1, 1)
    """Most windowed layers that one exchange serves: with more, halos are wider and fewer, and
    pixels near a cut are computed on both sides of it."""
    overlap: str = value("auto", choices=("auto", "on", "off"))
    """Whether a convolution computes the interior of its tile while the halo travels: ``on``,
    ``off``, or ``auto`` (where the border is small beside the interior, and halos do not come
    through shared memory)."""


WORDS: dict[str, tuple[str, dict[str, Any]]] = {
    "sp": ("tiles of every image", {"tiles": [2, 1]}),
    "lp": ("stages one after the other", {"stages": 2}),
    "pp": ("a pipeline of stages", {"stages": 2, "microbatches": 4}),
    "gems": ("a mirrored copy of it all", {"stages": 2, "directions": 2}),
    "local_dp": ("samples divided behind the tiles", {"local_dp": 2}),
    "dp": ("replicas that share the batch", {"replicas": 2}),
    "stream": ("bands of rows one after the other", {"band_rows": AUTO}),
}
"""Words of the names of layouts, in order: what each means, and the keys that it sets."""


def _layouts() -> dict[str, str]:
    """Returns the names that words make, each with what it means."""
    names = {"single": "One process"}
    names[AUTO] = "The layout that `hires plan --choose` lists first for `ranks`, by predictions"
    for picked in itertools.product((False, True), repeat=len(WORDS)):
        words = {word for word, is_in in zip(WORDS, picked, strict=True) if is_in}
        if "stream" in words and not words <= {"stream", "dp"}:
            continue
        is_divided = "sp" in words and bool(words & {"lp", "pp", "gems"}) and "dp" not in words
        is_doubled = {"lp", "pp"} <= words or {"sp", "lp", "gems"} <= words
        if is_doubled or ("local_dp" in words and not is_divided and len(words) > 1) or not words:
            continue
        meanings = [WORDS[word][0] for word in WORDS if word in words]
        text = " and ".join(filter(None, [", ".join(meanings[:-1]), meanings[-1]]))
        names["+".join(word for word in WORDS if word in words)] = text[0].upper() + text[1:]
    return names


def layout_keys(name: str) -> dict[str, Any]:
    """Returns the keys that a choice of ``parallel`` sets: those of its words, put together."""
    keys: dict[str, Any] = {"name": name}
    words = [word for word in name.split("+") if word in WORDS]
    for word in words:
        keys |= WORDS[word][1]
    if "sp" in words and "stages" in keys:
        keys["spatial_stages"] = 1
        keys |= {"stages": 3} if "gems" in words and "local_dp" not in words else {}
    return keys | ({"schedule": usual_schedule(2, "pp" in words)} if "gems" in words else {})


@dataclass
class ParallelConfig(Section, key="parallel", choices=_layouts(), choice_keys=layout_keys):
    """``parallel=NAME``: the layout."""

    name: str = "single"
    """Label in tables and folder names; it follows from the other keys unless you choose a word.
    ``auto`` chooses a layout of ``ranks`` ranks by predictions, as ``hires plan --choose`` lists
    them; keys that are given beside it stay."""
    objective: str = value(OBJECTIVES[0], choices=OBJECTIVES)
    """``parallel=auto``: the most ``images_per_s``, the least ``memory`` of the fullest rank, or
    the largest ``image`` that fits, in the proportions of ``image``."""
    replicas: int = value(1, 1)
    """Data-parallel copies of everything; the batch is divided among them."""
    stages: int = value(1, 1)
    """Contiguous slices of the network, each on ranks of its own."""
    tiles: Any = value([1, 1], high=1024)
    """[rows, cols] of the grid that cuts every image in the spatial stages, or one such pair for
    each, as [[2,2],[1,2]]."""
    spatial_stages: int = value(0, 0)
    """The first so many stages are tiled; 0: as many as ``tiles`` has grids of several tiles."""
    resident: int = value(1, 1)
    """Ranks of the layout, as tiles, that one process trains in turn, each until it has to wait: an
    image in more tiles than there are processes, whose batch norms still are those of all of it. It
    divides the ranks of a replica; then the run has so many fewer processes."""
    local_dp: int = value(1, 1)
    """Ranks of every stage behind the tiles; they divide the samples of each microbatch."""
    microbatches: int = value(1, 1)
    """Pieces into which every model pass cuts its share of the batch, one after the other."""
    directions: int = value(1, 1, 2)
    """2 runs a mirrored copy of the pipeline on the same ranks in the opposite order (GEMS)."""
    pairs: int = value(1, 1)
    """Model passes per step of each direction; the batch is spread over all of them."""
    schedule: str = value(
        usual_schedule(), choices={name: SCHEDULES[name].summary for name in SCHEDULES}
    )
    """Order of the passes of a pipeline."""
    balance: list[int] | None = value(low=1)
    """Layers per stage, one number a stage; unset: balanced by estimated FLOPs."""
    gather: str = value("auto", choices=("auto", "never"))
    """Whether an operator that tiles cannot divide is computed whole on each of them, from gathered
    pixels (``auto``), or refused (``never``)."""
    band_rows: Any = value(tasks=("infer", "evaluate", "predict"))
    """Rows of the image that a network computes at a time, from its first layer to its last, so
    that memory grows with the width of images alone: a number, or ``auto``, by the size of their
    maps; unset: all of them at once."""
    halo: HaloConfig = field(default_factory=HaloConfig)

    def _problems(self) -> Iterator[str]:
        yield from self._wrong_tiles()
        if self.name == AUTO and self.resident > 1:
            yield (
                f"parallel.resident={self.resident} divides the ranks of a layout that is given; "
                f"use parallel=sp with parallel.tiles, or leave parallel.resident out"
            )
        rows = self.band_rows
        if rows is not None and rows != AUTO and (type(rows) is not int or rows < 1):
            yield (
                f"parallel.band_rows={rows} must be a whole number above 0, as 64, or auto; "
                f"parallel.band_rows=null computes all rows at once"
            )
        if self.balance is not None and len(self.balance) != self.stages and self.name != AUTO:
            yield (
                f"parallel.balance={self.balance} must hold one positive number for each of the "
                f"{self.stages} stages; parallel.balance=null shares the layers out by their FLOPs"
            )

    @property
    def listed(self) -> bool:
        """Whether ``tiles`` holds a grid for each spatial stage, not one for all."""
        return isinstance(self.tiles[0], list)

    @property
    def grids(self) -> list[list[int]]:
        """[rows, cols] of every stage."""
        spatial = self.tiles if self.listed else [self.tiles] * self.spatial_stages
        return [list(grid) for grid in spatial] + [[1, 1]] * (self.stages - len(spatial))

    @property
    def shards(self) -> list[int]:
        """Ranks of every stage that divide the samples of a microbatch."""
        return [1] * self.spatial_stages + [self.local_dp] * (self.stages - self.spatial_stages)

    @property
    def places(self) -> list[tuple[list[int], int]]:
        """The grid and the shards of every stage."""
        return [*zip(self.grids, self.shards, strict=True)]

    @property
    def ranks_per_replica(self) -> int:
        """Ranks of one replica."""
        return sum(rows * cols * shards for (rows, cols), shards in self.places)

    @property
    def num_ranks(self) -> int:
        """Ranks of the layout."""
        return self.replicas * self.ranks_per_replica

    @property
    def num_processes(self) -> int:
        """Processes that execute them, each ``resident``; the launcher calls these ranks."""
        return -(-self.num_ranks // self.resident)

    @property
    def passes(self) -> int:
        """Model passes per step of one replica."""
        return self.directions * self.pairs

    @property
    def pieces(self) -> int:
        """Microbatches of the whole world in one step."""
        return self.replicas * self.passes * self.microbatches

    @property
    def label(self) -> str:
        """Its name in ``WORDS``, as ``sp+pp``; one with other words stays."""
        given = self.name.split("+")
        mirrored = self.directions > 1
        piped = SCHEDULES[self.schedule].overlaps if mirrored else self.microbatches > 1
        holds = {
            "sp": any(grid != [1, 1] for grid in self.grids),
            "lp": self.stages > 1 and not piped and (not mirrored or "lp" in given),
            "pp": piped and self.stages > 1,
            "gems": mirrored,
            "local_dp": self.local_dp > 1,
            "dp": self.replicas > 1,
            "stream": self.band_rows is not None,
        }
        if not {*given} <= {"single", *holds}:
            return self.name
        return "+".join(word for word, held in holds.items() if held) or "single"

    def _wrong_tiles(self) -> Iterator[str]:
        many = isinstance(self.tiles, list) and any(isinstance(grid, list) for grid in self.tiles)
        grids = self.tiles if many else [self.tiles]
        if not all(
            isinstance(grid, list)
            and len(grid) == 2
            and all(type(n) is int and n > 0 for n in grid)
            for grid in grids
        ):
            yield (
                f"parallel.tiles={self.tiles} must be [rows, cols], each at least 1, as [2,2], or "
                f"one such pair for each spatial stage, as [[2,2],[1,2]]"
            )
            return
        # Several grids say how many stages are tiled; the words say one.
        few = self.spatial_stages in (0, 1) if many else self.spatial_stages == 0
        if few and (many or grids[0] != [1, 1]):
            self.spatial_stages = len(grids)
        if self.spatial_stages > self.stages and self.name != AUTO:  # whose stages are open
            spatial = f"parallel.spatial_stages={self.spatial_stages}"
            given = f"the number of grids in parallel.tiles={self.tiles}" if many else spatial
            yield (
                f"{given} is more than parallel.stages={self.stages}; use at most {self.stages}, "
                f"or parallel.stages={self.spatial_stages}"
            )
        elif many and len(grids) != self.spatial_stages:
            yield (
                f"parallel.tiles={self.tiles} holds {len(grids)} grids for "
                f"parallel.spatial_stages={self.spatial_stages}; give one grid for each"
            )
