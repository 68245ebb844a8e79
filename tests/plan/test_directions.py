"""Two mirrored directions on the same ranks, and the layouts that the thesis draws."""

from __future__ import annotations

from typing import Any

from hires.plan.groups import gradient_group, groups
from hires.plan.plan import Plan
from tests.helpers.small_plans import plan_of


def grids(plan: Plan, direction: int) -> list[list[int]]:
    """Returns the ranks of every stage in a direction, tile by tile."""
    return [
        [plan.rank_of(0, direction, stage.index, tile) for tile in range(stage.num_ranks)]
        for stage in plan.stages
    ]


def gems(**keys: Any) -> Plan:
    """Returns the plan of a layout in two directions."""
    return plan_of(**{"directions": 2, "schedule": "gems", **keys})


def test_figure_3_3_of_the_thesis_4_tiles_and_2_model_parts_in_both_directions():
    plan = gems(tiles=[2, 2], stages=2)
    assert plan.world == 5
    assert grids(plan, 0) == [[0, 1, 2, 3], [4]]  # model 1:  0 1 / 2 3  >  4
    assert grids(plan, 1) == [[4, 3, 2, 1], [0]]  # model 2:  4 3 / 2 1  >  0
    # The thesis forbids it: ranks 1 to 3 have tiles of both. One common order lets it run.
    assert plan.verdict.startswith("deadlock-free")
    [note] = [finding for finding in plan.findings if "both directions" in finding.text]
    assert note.severity == "note"
    assert note.text.startswith("ranks 1, 2, 3 hold tiles of both directions")
    assert "parallel.stages=5 would keep them apart" in note.text


def test_figure_3_4_of_the_thesis_4_tiles_and_5_model_parts_in_both_directions():
    plan = gems(tiles=[2, 2], stages=5)
    assert plan.world == 8
    assert grids(plan, 0) == [[0, 1, 2, 3], [4], [5], [6], [7]]
    assert grids(plan, 1) == [[7, 6, 5, 4], [3], [2], [1], [0]]
    assert plan.verdict.startswith("deadlock-free")
    assert not [finding for finding in plan.findings if "both directions" in finding.text]


def test_middle_rank_of_an_odd_number_of_stages_is_once_in_its_gradient_group():
    plan = gems(stages=3)
    assert [groups(plan)[gradient_group(plan, stage)] for stage in range(3)] == [
        [0, 2],
        [1],
        [0, 2],
    ]


def test_up_and_down_take_turns_microbatch_by_microbatch():
    plan = gems(stages=2, pairs=2, microbatches=2)
    assert [plan.direction_of(f"F{m}") for m in range(8)] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert plan.microbatches_of(1) == [2, 3, 6, 7]
    assert plan.pieces == 8


def test_one_rank_cannot_hold_two_directions():
    plan = gems(stages=1)
    [error] = [finding for finding in plan.findings if finding.severity == "error"]
    assert error.key == "parallel.directions"
    assert "use parallel.stages=2, or parallel.directions=1" in error.text


def test_local_dp_that_does_not_divide_a_microbatch_says_what_would():
    plan = plan_of(batch=6, tiles=[2, 1], stages=2, local_dp=4)
    [error] = [finding for finding in plan.findings if finding.severity == "error"]
    assert error.key == "parallel.local_dp"
    assert "use parallel.local_dp=3 or batch=8" in error.text
