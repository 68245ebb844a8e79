"""Steps are timed alike for all rows, and ratios are taken within rounds."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from hires.bench import race as stopwatch
from hires.bench.race import Runner, Samples, noise_of, race, spread
from hires.comm import Group

ALONE = Group([0], 0, {})


@pytest.fixture
def seen(monkeypatch):
    """What happens, in order; a clock that ticks once whenever it is read."""
    happened, clock = [], iter(range(1000))
    monkeypatch.setattr(stopwatch, "barrier", lambda: happened.append("barrier") or next(clock))
    watch = SimpleNamespace(perf_counter=lambda: float(next(clock)), process_time=lambda: 0.5)
    monkeypatch.setattr(stopwatch, "time", watch)
    return happened


def recorder(name, seen):
    """Returns a row that notes what happens to it."""
    runner = Runner()
    for what in ("before_step", "step", "after_step"):
        setattr(runner, what, lambda what=what: seen.append(f"{what} {name}"))
    return runner


def test_only_the_step_lies_between_barrier_and_clean_up(seen):
    [samples] = race({"a": recorder("a", seen)}, 1, 0, ALONE)
    assert seen == ["before_step a", "barrier", "step a", "after_step a"]
    assert samples["a"] == Samples([[1.0]], [0.0])


def test_every_round_runs_all_rows_once_in_an_order_of_its_own_after_the_warmup(seen):
    *_, samples = race({name: recorder(name, seen) for name in "abcdef"}, 4, 2, ALONE)
    steps = [word[-1] for word in seen if word.startswith("step")]
    rounds = ["".join(steps[i : i + 6]) for i in range(0, 36, 6)]
    assert all(sorted(order) == [*"abcdef"] for order in rounds)
    assert len(set(rounds)) > 1
    assert all(len(s.turns_s) == len(s.cpu_s) == 4 for s in samples.values())


def test_slowest_rank_is_the_sample_and_processor_times_add_up(seen, monkeypatch):
    stack = stopwatch.torch.stack
    monkeypatch.setattr(stopwatch, "all_gather_stacked", lambda t, group: stack([t, t + 2.0]))
    [samples] = race({"a": None, "b": recorder("b", seen)}, 1, 0, ALONE)
    assert samples["a"] == Samples([[2.0]], [2.0])
    assert samples["b"].turns_s == [[3.0]]
    quantiles = {"median": 50, "p10": 10, "p90": 90, "p99": 99, "count": 101}
    assert spread([float(n) for n in range(101)]) == quantiles


def test_turn_has_as_many_calls_as_fit_and_each_is_timed_behind_the_fence(seen):
    *_, samples = race({"a": recorder("a", seen)}, 2, 1, ALONE, turn_s=3.0)
    turn = ["before_step a", *["barrier", "step a"] * 3, "after_step a"]
    assert seen == ["before_step a", "barrier", "step a", "after_step a", *turn, *turn]
    assert samples["a"].turns_s == [[1.0] * 3] * 2
    assert samples["a"].rounds_s == [1.0, 1.0]
    assert noise_of([1.0, 2.0, 4.0]) == pytest.approx(0.7413)
