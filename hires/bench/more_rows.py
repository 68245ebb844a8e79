"""Which rows show two directions, halos and recomputation beside doing without them?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hires.bench.contestants import Contestant, Lines

BOTH = {"directions": 2, "schedule": "gems"}
FILLED = {"directions": 2, "schedule": "gems_1f1b"}
TRAIN: dict[str, Any] = {"training_only": True}
"""Two directions share out the backward passes; forward passes alone need no mirror."""


def mirrored(lines: Lines) -> list[Contestant]:
    """Returns two stages in one and in two directions."""
    half = max(1, lines.microbatches // 2)
    return [
        lines.ours("lp", "two stages, one after the other", {"stages": 2}),
        lines.ours("gems", "two stages and their mirror, in turn", {"stages": 2, **BOTH}, **TRAIN),
        lines.ours(
            "gems_1f1b",
            f"two stages and their mirror at once, 2 x {half} microbatches",
            {"stages": 2, "microbatches": half, **FILLED},
            **TRAIN,
        ),
    ]


def halos(lines: Lines) -> list[Contestant]:
    """Returns two tiles with and without overlap, and with fused halos."""
    rows = []
    for name, what, halo in (
        ("overlap on", "interior computed while halos travel", {"overlap": "on"}),
        ("overlap off", "halos first, then the computation", {"overlap": "off"}),
        ("fuse 2", "one exchange for two windowed layers", {"fuse": 2}),
        ("fuse 3", "one exchange for three windowed layers", {"fuse": 3}),
    ):
        layout = {"tiles": [2, 1], "halo": lines.halo(**halo)}
        rows.append(lines.ours(name, f"tiles 2x1, {what}", layout))
    return rows


def recomputed(lines: Lines) -> list[Contestant]:
    """Returns one process and two tiles that compute again what they did not keep."""
    rows = []
    layouts: tuple[tuple[str, dict[str, Any]], ...] = (("single", {}), ("tiles", {"tiles": [2, 1]}))
    for name, layout in layouts:
        for checkpoint in ("stage", "block"):
            what = f"{name}, each {checkpoint} computed again in the backward pass"
            title = f"{checkpoint} again, {name}"
            rows.append(lines.ours(title, what, layout, checkpoint, training_only=True))
    return rows


def tiled_and_mirrored(lines: Lines) -> list[Contestant]:
    """Returns two tiles and a join, on three ranks, in one and in two directions."""
    half = max(1, lines.microbatches // 2)
    tiles = {"tiles": [2, 1], "stages": 2}
    return [
        lines.ours("sp+lp", "two tiles, then a stage of one rank", tiles),
        lines.ours("sp+gems", "the same and its mirror, in turn", {**tiles, **BOTH}, **TRAIN),
        lines.ours(
            "sp+pp",
            f"two tiles, then a stage, {lines.microbatches} microbatches, 1f1b",
            {**tiles, "microbatches": lines.microbatches, "schedule": "1f1b"},
        ),
        lines.ours(
            "sp+pp+gems",
            f"two tiles, a stage and their mirror at once, 2 x {half} microbatches",
            {**tiles, "microbatches": half, **FILLED},
            **TRAIN,
        ),
    ]
