"""Steps are timed alike for all rows, and ratios are taken within rounds."""

from __future__ import annotations

import pytest

from hires.bench import race as stopwatch
from hires.bench.race import Runner, Samples, race, spread
from hires.comm import Group

ALONE = Group([0], 0, {})


@pytest.fixture
def seen(monkeypatch):
    """What happens, in order; a clock that ticks once whenever it is read."""
    happened, clock = [], iter(range(1000))
    monkeypatch.setattr(stopwatch, "barrier", lambda: happened.append("barrier"))
    monkeypatch.setattr(stopwatch, "_now", lambda runner: float(next(clock)))
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
    assert samples["a"].step_s == [1.0]
    assert samples["a"].cpu_s[0] >= 0


def test_every_round_runs_all_rows_once_in_an_order_of_its_own_after_the_warmup(seen):
    *_, samples = race({name: recorder(name, seen) for name in "abcdef"}, 4, 2, ALONE)
    steps = [word[-1] for word in seen if word.startswith("step")]
    rounds = ["".join(steps[i : i + 6]) for i in range(0, 36, 6)]
    assert all(sorted(order) == [*"abcdef"] for order in rounds)
    assert len(set(rounds)) > 1
    assert all(len(s.step_s) == len(s.cpu_s) == 4 for s in samples.values())


def test_slowest_rank_is_the_sample_and_processor_times_add_up(seen, monkeypatch):
    stack = stopwatch.torch.stack
    monkeypatch.setattr(stopwatch, "all_gather_stacked", lambda t, group: stack([t, t + 2.0]))
    [samples] = race({"a": None, "b": recorder("b", seen)}, 1, 0, ALONE)
    assert samples["a"] == Samples([2.0], [2.0])
    assert samples["b"].step_s == [3.0]
    assert spread([float(n) for n in range(11)]) == {"median": 5, "p10": 1, "p90": 9, "count": 11}
