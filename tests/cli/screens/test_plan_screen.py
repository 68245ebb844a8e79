"""A plan is drawn as it is: placement, memory, messages, findings and proof, on any screen."""

from __future__ import annotations

from hires.cli.screens.show_plan import (
    bar,
    memory_lines,
    placement_lines,
)
from hires.core.units import MIB
from hires.plan.memory import RankMemory


def facts(replicas: int, *tiles: list[int]) -> dict:
    """The placement of stages with these tile grids, ranks in order."""
    placement = []
    for replica in range(replicas):
        for stage, (rows, cols) in enumerate(tiles):
            for tile in range(rows * cols):
                where = list(divmod(tile, cols)) if rows * cols > 1 else None
                slot = {"rank": len(placement), "replica": replica, "stage": stage, "tile": where}
                placement.append({**slot, "direction": "down", "shard": None})
    stages = [{"index": i, "tiles": list(grid), "shards": 1} for i, grid in enumerate(tiles)]
    return {"placement": placement, "stages": stages, "world": len(placement)}


def test_tiles_stand_as_they_cut_the_image_and_stages_side_by_side():
    assert placement_lines(facts(1, [1, 1])) == ["stage 0", "[ 0 ]"]
    assert placement_lines(facts(1, [2, 3])) == ["stage 0", "[ 0 1 2 ]", "[ 3 4 5 ]"]
    assert placement_lines(facts(2, [2, 2], [2, 2], [1, 1])) == [
        "replica 0",
        "stage 0   stage 1   stage 2",
        "[ 0 1 ]   [ 4 5 ]   [ 8 ]",
        "[ 2 3 ]   [ 6 7 ]",
        "replica 1",
        "stage 0     stage 1     stage 2",
        "[  9 10 ]   [ 13 14 ]   [ 17 ]",
        "[ 11 12 ]   [ 15 16 ]",
    ]
    assert placement_lines(facts(100, [1, 2]))[-1] == (
        "and 99 more replicas, alike, each 2 ranks further"
    )


SMALL = RankMemory(MIB, MIB, MIB, 4 * MIB, MIB).to_dict()


LARGE = RankMemory(2 * MIB, 0, 2 * MIB, 11 * MIB, MIB).to_dict()


def test_memory_is_a_bar_of_its_parts():
    assert bar(SMALL, 16 * MIB) == "[PPGOAAAAAABB............]"
    assert bar(LARGE, 16 * MIB) == "[PPPOOOAAAAAAAAAAAAAAAABB]"
    assert bar(LARGE, 8 * MIB).endswith("A>]")  # beyond the limit
    assert len(bar(LARGE, 8 * MIB)) == 26
    assert memory_lines([]) == []
    head, first, second, names, scale = memory_lines([LARGE, LARGE, SMALL])
    assert head.split() == ["rank", "peak", *"PGOAB"]
    assert max(map(len, (head, first, second, names))) <= 80
    assert first.split()[0] == "0-1"  # equal neighbours share a line
    assert first.split()[-6:] == ["16.0", "2.0", "0.0", "2.0", "11.0", "1.0"]
    assert scale == "MiB, predicted; a full bar is 16.0 MiB"
    limited = memory_lines([SMALL], limit=32 * MIB)
    assert limited[-1] == "MiB, predicted; a full bar is memory.limit, 32.0 MiB"
    assert limited[1].count(".....") == 3
