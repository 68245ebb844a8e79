"""Schedules, drawn: one line a stage (or a rank, in two directions), one column a unit of time."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hires.core.schedules import SCHEDULES, Pipeline, forward_only, timeline

ONE_WAY = [name for name in SCHEDULES if SCHEDULES[name].directions == 1]
BOTH_WAYS = [name for name in SCHEDULES if name not in ONE_WAY]
any_size = {"num_stages": st.integers(1, 6), "num_microbatches": st.integers(1, 9)}


def pipeline(
    num_stages: int, num_microbatches: int, passes: int = 1, directions: int = 1, tiles: int = 1
) -> Pipeline:
    """Returns a pipeline whose first stage has so many tiles and the others one rank each."""
    first = [0, *itertools.accumulate([tiles] + [1] * (num_stages - 1))]
    down = tuple(tuple(range(a, b)) for a, b in itertools.pairwise(first))
    up = tuple(tuple(first[-1] - 1 - rank for rank in ranks) for ranks in down)
    return Pipeline((down, up)[:directions], num_microbatches, passes)


DRAWN: dict[str, tuple[str, tuple[int, ...], list[str]]] = {
    "gpipe": ("gpipe", (2, 3), ["F0 F1 F2 .  .  B0 B1 B2", ".  F0 F1 F2 B0 B1 B2 ."]),
    "one stage": ("gpipe", (1, 2), ["F0 F1 B0 B1"]),
    "1f1b": (
        "1f1b", (3, 4),
        ["F0 F1 F2 .  .  B0 F3 B1 .  B2 .  B3",
         ".  F0 F1 .  B0 F2 B1 F3 B2 .  B3 .",
         ".  .  F0 B0 F1 B1 F2 B2 F3 B3 .  ."],
    ),
    "1f1b of fewer microbatches than stages": (
        "1f1b", (3, 1), ["F0 .  .  .  .  B0", ".  F0 .  .  B0 .", ".  .  F0 B0 .  ."],
    ),
    # One line a rank: rank 2 holds stage 2 of down and stage 0 of up, so it goes on at once.
    "gems": (
        "gems", (3, 1, 2, 2),
        ["F0 .  .  .  .  B0 F1 B1 .  .",
         ".  F0 .  .  B0 F1 .  .  B1 .",
         ".  .  F0 B0 F1 .  .  .  .  B1"],
    ),
    "gems_1f1b has no bubble": (
        "gems_1f1b", (2, 2, 2, 2), ["F0 F2 B2 B0 F1 F3 B3 B1", "F2 F0 B0 B2 F3 F1 B1 B3"],
    ),
    # Tiles on ranks 0 to 3 down and 4 to 1 up: ranks 1, 2 and 3 belong to both.
    "gems of four tiles": (
        "gems", (2, 1, 2, 2, 4),
        ["F0 .  .  B0 .  F1 B1 .", *["F0 .  .  B0 F1 .  .  B1"] * 3, ".  F0 B0 .  F1 .  .  B1"],
    ),
    # Rank 0 is free for F1 at once, and rank 1, which shares its first task with it, is not.
    "gems_1f1b of two tiles": (
        "gems_1f1b", (2, 1, 2, 2, 2),
        ["F0 .  .  B0 .  F1 B1 .", "F0 .  .  B0 F1 .  .  B1", ".  F0 B0 .  F1 .  .  B1"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", DRAWN)
def test_timeline(case):
    name, sizes, lines = DRAWN[case]
    assert timeline(pipeline(*sizes), SCHEDULES[name].order(pipeline(*sizes))) == lines


def test_timelines_of_inference_and_of_schedules_that_never_end():
    two = pipeline(2, 3)
    assert timeline(two, forward_only(two)) == ["F0 F1 F2 .", ".  F0 F1 F2"]
    # Stage 1 wants the backward pass of a microbatch before its forward pass.
    assert timeline(pipeline(2, 1), [["F0", "B0"], ["B0", "F0"]]) == ["F0", "."]
    assert timeline(pipeline(1, 1), [[]]) == [""]  # of an infeasible layout


def check_complete(made: Pipeline, name: str) -> None:
    """Checks that every pass of every slot runs once, and that all of them can run."""
    schedule = SCHEDULES[name].order(made)
    for rank, actions in enumerate(schedule):
        held = [task.action for task in made.tasks() if rank in made.ranks_of(task)]
        assert sorted(actions) == sorted(held)
        for kind in "FB":
            for way in range(len(made.ranks)):
                own = [int(a[1:]) for a in actions if a[0] == kind]
                ordered = [m for m in own if made.direction_of(m) == way]
                assert ordered == sorted(ordered)
    if len(made.ranks) == 2:
        for line, actions in zip(timeline(made, schedule), schedule, strict=True):
            assert [cell for cell in line.split() if cell != "."] == actions


@pytest.mark.parametrize("name", ONE_WAY)
@settings(deadline=None)
@given(**any_size)
def test_every_pass_runs_once_and_in_order(name, num_stages, num_microbatches):
    one_way = pipeline(num_stages, num_microbatches)
    check_complete(one_way, name)
    # The bubble is what the papers say, when every pass takes the same time.
    cells = [
        cell for line in timeline(one_way, SCHEDULES[name].order(one_way)) for cell in line.split()
    ]
    idle = (num_stages - 1) / (num_stages - 1 + num_microbatches)
    assert cells.count(".") / len(cells) == pytest.approx(idle)
    for rank, actions in enumerate(SCHEDULES["1f1b"].order(one_way)):
        assert in_flight(one_way, rank, actions)[0] <= num_stages - rank


@pytest.mark.parametrize("name", BOTH_WAYS)
@settings(deadline=None)
@given(
    num_stages=st.integers(1, 6),
    num_microbatches=st.integers(1, 4),
    pairs=st.integers(1, 3),
    tiles=st.integers(1, 5),
)
def test_every_pass_runs_once_and_in_order_both_ways(
    name, num_stages, num_microbatches, pairs, tiles
):
    check_complete(pipeline(num_stages, num_microbatches, 2 * pairs, 2, tiles), name)


def in_flight(made: Pipeline, rank: int, actions: list[str]) -> dict[int, int]:
    """Returns the most microbatches in flight on a rank, by direction."""
    now, most = {0: 0, 1: 0}, {0: 0, 1: 0}
    for action in actions:
        way = made.direction_of(int(action[1:]))
        now[way] += 1 if action[0] == "F" else -1
        most[way] = max(most[way], now[way])
    return most


@settings(deadline=None)
@given(num_stages=st.integers(2, 6), num_microbatches=st.integers(1, 4), pairs=st.integers(1, 3))
def test_gems_hold_few_microbatches(num_stages, num_microbatches, pairs):
    made = pipeline(num_stages, num_microbatches, 2 * pairs, 2)
    for rank, actions in enumerate(SCHEDULES["gems"].order(made)):
        assert max(in_flight(made, rank, actions).values()) <= num_microbatches
    for rank, actions in enumerate(SCHEDULES["gems_1f1b"].order(made)):
        most = in_flight(made, rank, actions)
        assert most[0] <= num_stages - rank
        assert most[1] <= rank + 1


OF_A_USER = """
from hires.core.schedules import schedule


@schedule("one_by_one")
def one_by_one(pipeline):
    '''One microbatch after the other.'''
    actions = [f"{kind}{m}" for m in range(pipeline.total) for kind in "FB"]
    return [[*actions] for _ in range(pipeline.num_ranks)]


from hires.cli.choices import config_keys
from hires.core.schedules import timeline
from hires.plan.search.candidates import LayoutShape, orders
from tests.helpers.small_plans import config_of, plan_of

plan = plan_of(stages=2, microbatches=2, schedule="one_by_one")
assert plan.verdict.startswith("deadlock-free"), plan.findings
lines = timeline(plan.pipeline, plan.schedule)
assert lines == ["F0 .  .  B0 F1 .  .  B1", ".  F0 B0 .  .  F1 B1 ."]
listed = orders(config_of(batch=2), LayoutShape(1, 2, 0, (1, 1), 1, 1))
assert "one_by_one" in {one.schedule for one in listed}
plan = plan_of(stages=2, directions=2, schedule="one_by_one")
assert "parallel.schedule=one_by_one is for 1 direction;" in plan.findings[0].text
assert "`one_by_one`: One microbatch after" in config_keys()["parallel.schedule"].meaning
"""


def test_schedule_is_one_function_from_which_all_else_follows(python):
    answer = python("-c", OF_A_USER)
    assert answer.code == 0, answer.err
