"""Does a search use the time that it has, and no more?"""

from __future__ import annotations

import dataclasses
import time
from types import SimpleNamespace

import pytest

from hires.plan.planner import make_plan
from hires.plan.search.choice import Choice
from hires.plan.search.choose import FUSING, LEAST_S, PLANNING
from tests.helpers.searches import LONG_S, chooser, graph_of
from tests.helpers.small_plans import config_of


@pytest.fixture
def now(monkeypatch):
    """The time, which stands still unless a test moves it."""
    now = [0.0]
    clock = SimpleNamespace(monotonic=lambda: now[0])
    for module in ("choose", "trials", "layout_search", "memory_rehearsal", "no_layout"):
        monkeypatch.setattr(f"hires.plan.search.{module}.time", clock)
    return now


@pytest.mark.parametrize(("before_s", "trials_s"), [(0.0, 20.0), (12.0, 8.0), (19.0, LEAST_S)])
def test_traces_before_a_search_count_as_its_time(now, monkeypatch, before_s, trials_s):
    def slow(config, graph):
        now[0] += 0.2
        return make_plan(config, graph)

    monkeypatch.setattr("hires.plan.search.trials.make_plan", slow)
    now[0] = 1000.0
    choice = chooser(config_of(), began_s=1000.0 - before_s, budget_s=20.0).choose(4)
    spent_s = now[0] - 1000.0
    assert choice.seconds == pytest.approx(spent_s + before_s)
    assert choice.ended_early
    assert PLANNING * trials_s - 0.5 <= spent_s <= FUSING * trials_s + 0.5


def test_traces_that_single_layouts_need_leave_the_time_for_trials_as_it_is(now):
    config = config_of()
    slow = chooser(config, budget_s=5.0)
    whole = max(1, config.batch)

    def traced(samples):
        now[0] += 0.0 if samples == whole else 60.0
        return graph_of(samples)

    slow.graph_of = traced
    choice = slow.choose(2)
    assert now[0] > 60
    assert choice.planned == chooser(config, budget_s=5.0).choose(2).planned
    assert choice.seconds == now[0]


def test_layout_that_would_take_longer_than_there_is_time_is_left():
    hour = chooser(config_of())
    hour._trials.s_per_action = 3600.0
    choice = hour.choose(4)
    assert choice.ended_early
    assert choice.planned  # those with the fewest actions
    pieces = {
        option.candidate.pieces // option.candidate.shape.replicas for option in choice.options
    }
    assert pieces == {1}


def test_layouts_are_only_counted_once_the_time_for_estimates_is_used():
    search = chooser(config_of())
    estimator = search._estimator(4)
    counted, looked_at = (Choice(4, "images_per_s", "") for _ in range(2))
    few = search._estimated(estimator, counted, 0.0)
    every = search._estimated(estimator, looked_at, time.monotonic() + LONG_S)
    assert len(few) < len(every)
    assert counted.considered == looked_at.considered == len(every)
    assert counted.ended_early


def test_search_without_time_still_answers():
    quick = dataclasses.replace(chooser(config_of()), budget_s=1e-9)
    choice = quick.choose(4)
    assert choice.ended_early
    assert choice.best.rehearsed
    assert choice.left > 0
