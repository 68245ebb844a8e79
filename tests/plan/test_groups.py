"""The groups of ranks, written out."""

from __future__ import annotations

from hires.plan.groups import (
    gradient_group,
    groups,
    held_stages,
    num_holders,
    num_tile_groups,
    tile_group,
)
from tests.helpers.small_plans import plan_of


def test_all_ranks_name_the_groups_alike():
    plan = plan_of(tiles=[2, 1], stages=2, replicas=2)
    assert groups(plan) == [
        *([0, 1], [2], [3, 4], [5]),  # the tiles of each replica and stage
        *([0, 1, 3, 4], [2, 5]),  # all that hold a stage
    ]
    for rank in range(plan.world):
        assert rank in groups(plan)[tile_group(plan, rank)]
        [stage] = held_stages(plan, rank)
        assert rank in groups(plan)[gradient_group(plan, stage)]
    assert [tile_group(plan, rank) for rank in range(6)] == [0, 0, 1, 2, 2, 3]
    assert [gradient_group(plan, stage) for stage in range(2)] == [4, 5]


def test_directions_have_tile_groups_of_their_own_and_share_the_gradient_groups():
    plan = plan_of(tiles=[2, 1], stages=2, directions=2, schedule="gems")
    assert groups(plan) == [
        *([0, 1], [2], [1, 2], [0]),  # down, then up: the mirror image
        *([0, 1, 2], [0, 2]),
    ]
    assert num_tile_groups(plan) == 4
    assert [tile_group(plan, 0, direction) for direction in range(2)] == [0, 3]
    assert [held_stages(plan, rank) for rank in range(3)] == [[0, 1], [0], [0, 1]]
    assert [num_holders(plan, stage) for stage in range(2)] == [3, 2]
