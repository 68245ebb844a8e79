"""Are few ranks rehearsed for many, each by one that holds at least as much?"""

from __future__ import annotations

from hires.core.config.run_config import from_dict
from hires.nets.trace import trace
from hires.plan import rank_kinds
from hires.plan.planner import make_plan
from hires.plan.rank_kinds import likeness, representatives
from tests.helpers.small_plans import Forked, plan_of


def test_equal_tiles_with_equal_neighbours_are_alike():
    config = from_dict({"image": [64, 16], "batch": 2, "parallel": {"tiles": [4, 1]}})
    plan = make_plan(config, trace(Forked(), [2, 3, 64, 16], training=True))
    assert plan.ok, plan.findings
    top, *inner, bottom = [likeness(plan, rank) for rank in range(4)]
    assert inner[0] == inner[1]
    assert inner[0] not in (top, bottom)
    uneven = plan_of(tiles=[2, 1])  # 13 rows
    assert likeness(uneven, 0) != likeness(uneven, 1)
    stages = plan_of(stages=3)
    assert len({likeness(stages, rank) for rank in range(3)}) == 3


def test_large_grid_is_stood_for_by_its_largest_tile():
    config = from_dict({"image": [64, 64], "batch": 2, "parallel": {"tiles": [5, 5]}})
    plan = make_plan(config, trace(Forked(), [2, 3, 64, 64], training=True))
    assert plan.ok, plan.findings
    [rank] = set(representatives(plan))
    row, column = divmod(rank, 5)
    assert 0 < row < 4  # it borrows on all sides
    assert 0 < column < 4


def test_few_kinds_stand_for_themselves():
    plan = plan_of(stages=3, tiles=[2, 1], spatial_stages=1)
    assert representatives(plan) == list(range(plan.ranks_per_replica))


def test_rehearsals_of_a_large_plan_are_bounded(monkeypatch):
    layout = {"tiles": [3, 1], "stages": 3, "spatial_stages": 1, "directions": 2}
    plan = plan_of(**layout, schedule="gems", microbatches=1)
    exact = representatives(plan)
    work = {rank: rank_kinds._work(plan, rank) for rank in exact}
    for limit in (sum(work.values()) - 1, 2 * max(work.values()), 1):
        monkeypatch.setattr(rank_kinds, "WORK", limit)
        chosen = representatives(plan)
        sizes = [sum(rank_kinds._size(plan, rank)) for rank in range(plan.ranks_per_replica)]
        assert len(set(chosen)) < len(set(exact))
        assert len(set(chosen)) == 1 or sum(work[rank] for rank in set(chosen)) <= limit
        # What is predicted for a rank is never that of one that holds less.
        assert all(sizes[leader] >= sizes[rank] for rank, leader in enumerate(chosen))
