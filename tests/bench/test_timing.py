"""Is every contestant timed alike, and is a ratio taken within a round?"""

from __future__ import annotations

import pytest

from hires.bench import timing
from hires.bench.timing import Runner, Samples, race, ratios, spread
from hires.comm import Group

ALONE = Group([0], 0, {})


class Recorder(Runner):
    def __init__(self, name, seen):
        self.name, self.seen = name, seen

    def prepare(self):
        self.seen.append(f"prepare {self.name}")

    def step(self):
        self.seen.append(f"step {self.name}")

    def tidy(self):
        self.seen.append(f"tidy {self.name}")


@pytest.fixture
def seen(monkeypatch):
    """What happens, in order; a clock that ticks once whenever it is read."""
    happened = []
    clock = iter(range(1000))
    monkeypatch.setattr(timing, "barrier", lambda: happened.append("barrier"))
    monkeypatch.setattr(timing, "_now", lambda runner: float(next(clock)))
    return happened


def test_spread_names_its_quantiles():
    found = spread([float(n) for n in range(11)])
    assert found == {"median": 5, "p10": 1, "p90": 9, "count": 11}


def test_ratio_is_taken_within_a_round():
    # In the second round the machine was twice as slow for both: the ratio does not see it.
    found = ratios([4.0, 8.0, 4.0], [2.0, 4.0, 2.0])
    assert [found[key] for key in ("median", "p10", "p90")] == [2, 2, 2]


def test_only_the_step_lies_between_barrier_and_tidying(seen):
    [samples] = race({"a": Recorder("a", seen)}, 1, 0, ALONE)
    assert seen == ["prepare a", "barrier", "step a", "tidy a"]
    assert samples["a"].step_s == [1.0]
    assert samples["a"].cpu_s[0] >= 0


@pytest.mark.slow
def test_every_round_runs_all_contestants_once_in_an_order_of_its_own(seen):
    runners = {name: Recorder(name, seen) for name in "abcdef"}
    assert len(list(race(runners, 6, 0, ALONE))) == 6
    steps = [word[-1] for word in seen if word.startswith("step")]
    rounds = ["".join(steps[i : i + 6]) for i in range(0, 36, 6)]
    assert all(sorted(order) == [*"abcdef"] for order in rounds)
    assert len(set(rounds)) > 1


@pytest.mark.slow
def test_warmup_is_not_counted(seen):
    *_, samples = race({"a": Recorder("a", seen)}, 2, 3, ALONE)
    assert seen.count("step a") == 5
    assert len(samples["a"].step_s) == len(samples["a"].cpu_s) == 2


def test_rank_that_is_not_in_waits_at_the_barrier_only(seen):
    *_, samples = race({"a": None}, 2, 0, ALONE)
    assert samples == {"a": Samples([0.0, 0.0], [0.0, 0.0])}
    assert seen == ["barrier", "barrier"]
