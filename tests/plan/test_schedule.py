"""Schedules, drawn: one line a stage, one column a unit of time."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hires.core import config
from hires.plan.schedule import SCHEDULES, bubble, forward_only, gpipe, timeline

one_forward_one_backward = SCHEDULES["1f1b"]
any_size = {"num_stages": st.integers(1, 6), "num_microbatches": st.integers(1, 9)}


def test_gpipe_timeline():
    assert timeline(gpipe(num_stages=2, num_microbatches=3)) == [
        "F0 F1 F2 .  .  B0 B1 B2",
        ".  F0 F1 F2 B0 B1 B2 .",
    ]


def test_one_forward_one_backward_timeline():
    assert timeline(one_forward_one_backward(3, 4)) == [
        "F0 F1 F2 .  .  B0 F3 B1 .  B2 .  B3",
        ".  F0 F1 .  B0 F2 B1 F3 B2 .  B3 .",
        ".  .  F0 B0 F1 B1 F2 B2 F3 B3 .  .",
    ]


def test_one_forward_one_backward_with_fewer_microbatches_than_stages():
    assert timeline(one_forward_one_backward(3, 1)) == [
        "F0 .  .  .  .  B0",
        ".  F0 .  .  B0 .",
        ".  .  F0 B0 .  .",
    ]


def test_inference_timeline():
    assert timeline(forward_only(2, 3)) == ["F0 F1 F2 .", ".  F0 F1 F2"]


def test_one_stage_is_never_idle():
    assert timeline(gpipe(1, 2)) == ["F0 F1 B0 B1"]
    assert bubble(gpipe(1, 2)) == 0


def test_wide_actions_keep_the_columns_aligned():
    lines = timeline(forward_only(2, 11))
    assert lines[1].index("F10") == lines[0].index("F10") + len("F10 ")


def test_actions_that_can_never_run_are_left_out():
    # Stage 1 wants the backward pass of a microbatch before its forward pass.
    assert timeline([["F0", "B0"], ["B0", "F0"]]) == ["F0", "."]


def test_no_schedule_at_all_is_no_bubble():
    # The plan of an infeasible layout; this divided by zero.
    assert timeline([[]]) == [""]
    assert bubble([[]]) == 0


@pytest.mark.parametrize("name", list(SCHEDULES))
@settings(deadline=None)
@given(**any_size)
def test_every_pass_runs_once_and_in_order(name, num_stages, num_microbatches):
    schedule = SCHEDULES[name](num_stages, num_microbatches)
    microbatches = range(num_microbatches)
    for actions, line in zip(schedule, timeline(schedule), strict=True):
        assert [a for a in actions if a[0] == "F"] == [f"F{m}" for m in microbatches]
        assert [a for a in actions if a[0] == "B"] == [f"B{m}" for m in microbatches]
        assert [cell for cell in line.split() if cell != "."] == actions


@settings(deadline=None)
@given(**any_size)
def test_one_forward_one_backward_holds_few_microbatches(num_stages, num_microbatches):
    for stage, actions in enumerate(one_forward_one_backward(num_stages, num_microbatches)):
        in_flight = 0
        for action in actions:
            in_flight += 1 if action[0] == "F" else -1
            assert 0 <= in_flight <= num_stages - stage


@pytest.mark.parametrize("name", list(SCHEDULES))
@settings(deadline=None)
@given(**any_size)
def test_bubble_is_what_the_papers_say(name, num_stages, num_microbatches):
    idle = bubble(SCHEDULES[name](num_stages, num_microbatches))
    assert idle == pytest.approx((num_stages - 1) / (num_stages - 1 + num_microbatches))


def test_config_and_plan_know_the_same_schedules():
    assert tuple(SCHEDULES) == config.SCHEDULES
