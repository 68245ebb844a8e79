"""Steps are timed alike for all rows, and ratios are taken within rounds.

A row that is wrong, was not compared, or kept more cores busy than it has threads has no ratio.
"""

from __future__ import annotations

import pytest

from hires.bench import race as stopwatch
from hires.bench.bench_rows import BenchRow
from hires.bench.bench_table import measured_rows, row_not_run, row_table
from hires.bench.race import Runner, Samples, race, ratios, spread
from hires.comm import Group
from tests.helpers.layouts import config_of

ALONE = Group([0], 0, {})
RIGHT = {"check": {"value": 1e-7, "exact": 1e-13, "ok": True}}
WRONG = {"check": {"value": 1e-7, "exact": 0.5, "ok": False}}


class Recorder(Runner):
    """Notes what happens to it."""

    def __init__(self, name, seen):
        self.name, self.seen = name, seen

    def before_step(self):
        self.seen.append(f"before {self.name}")

    def step(self):
        self.seen.append(f"step {self.name}")

    def after_step(self):
        self.seen.append(f"after {self.name}")


@pytest.fixture
def seen(monkeypatch):
    """What happens, in order; a clock that ticks once whenever it is read."""
    happened, clock = [], iter(range(1000))
    monkeypatch.setattr(stopwatch, "barrier", lambda: happened.append("barrier"))
    monkeypatch.setattr(stopwatch, "_now", lambda runner: float(next(clock)))
    return happened


def test_spread_names_its_quantiles():
    samples = spread([float(n) for n in range(11)])
    assert samples == {"median": 5, "p10": 1, "p90": 9, "count": 11}


def test_ratio_is_taken_within_a_round():
    # In the second round the machine was twice as slow for both: the ratio does not see it.
    ratio = ratios([4.0, 8.0, 4.0], [2.0, 4.0, 2.0])
    assert [ratio[key] for key in ("median", "p10", "p90")] == [2, 2, 2]


def test_only_the_step_lies_between_barrier_and_clean_up(seen):
    [samples] = race({"a": Recorder("a", seen)}, 1, 0, ALONE)
    assert seen == ["before a", "barrier", "step a", "after a"]
    assert samples["a"].step_s == [1.0]
    assert samples["a"].cpu_s[0] >= 0


def test_every_round_runs_all_rows_once_in_an_order_of_its_own_after_the_warmup(seen):
    *_, samples = race({name: Recorder(name, seen) for name in "abcdef"}, 4, 2, ALONE)
    steps = [word[-1] for word in seen if word.startswith("step")]
    rounds = ["".join(steps[i : i + 6]) for i in range(0, 36, 6)]
    assert all(sorted(order) == [*"abcdef"] for order in rounds)
    assert len(set(rounds)) > 1
    assert all(len(s.step_s) == len(s.cpu_s) == 4 for s in samples.values())


def test_slowest_rank_is_the_sample_and_processor_times_add_up(seen, monkeypatch):
    def of_two_ranks(table, group):
        return stopwatch.torch.stack([table, table + 2.0])

    monkeypatch.setattr(stopwatch, "all_gather_stacked", of_two_ranks)
    [samples] = race({"a": None, "b": Recorder("b", seen)}, 1, 0, ALONE)
    assert samples["a"] == Samples([2.0], [2.0])
    assert samples["b"].step_s == [3.0]


def table_of(facts, cpu_s=1.0, **more):
    single = BenchRow("single", config_of(batch=2, device="cpu"), ranks=1)
    tiles = BenchRow("tiles", config_of(batch=4, device="cpu"), ranks=2, beside=("torch",), **more)
    torch = BenchRow("torch", config_of(batch=4, device="cpu"), ranks=2, peer="module")
    samples = {
        "single": Samples([4.0, 8.0, 4.0], [1.0] * 3),
        "tiles": Samples([2.0, 4.0, 2.0], [cpu_s] * 3),
        "torch": Samples([3.0, 6.0, 3.0], [1.0] * 3),
    }
    facts = {"single": RIGHT, "torch": RIGHT, **facts}
    return {row["name"]: row for row in measured_rows([single, tiles, torch], samples, facts)}


def test_speed_up_counts_images_within_each_round():
    rows = table_of({"tiles": RIGHT})
    assert rows["tiles"]["speedup"] == {"median": 4.0, "p10": 4.0, "p90": 4.0, "count": 3}
    assert rows["tiles"]["over_best"]["median"] == 1.5
    assert rows["tiles"]["best"] == "torch"
    assert rows["tiles"]["images_per_s"] == 2.0


@pytest.mark.parametrize(
    ("facts", "cpu_s", "why"),
    [
        (WRONG, 1.0, "it computes something else"),
        ({}, 1.0, "it was not compared"),
        ({**RIGHT, "wrong": "kernels of another type than int8"}, 1.0, "kernels of another type"),
        (RIGHT, 9.0, "cores busy"),
    ],
)
def test_wrong_row_is_red_and_has_no_ratio(facts, cpu_s, why):
    rows = table_of({"tiles": facts}, cpu_s)
    assert not rows["tiles"]["ok"]
    assert "speedup" not in rows["tiles"]
    assert "over_best" not in rows["tiles"]
    cells = {row["row"]: row for row in row_table("t", [*rows.values()]).rows}
    assert why in cells["tiles"]["what"]
    assert cells["tiles"]["what"].startswith("WRONG")


def test_nothing_is_compared_with_a_wrong_baseline_or_library():
    assert "speedup" not in table_of({"tiles": RIGHT, "single": WRONG})["tiles"]
    assert "over_best" not in table_of({"tiles": RIGHT, "torch": WRONG})["tiles"]


def test_row_that_cannot_run_states_the_reason():
    row = BenchRow("ddp", config_of(device="simulated"), peer="ddp")
    assert "no messages of device=simulated" in row.lacks
    cells = row_table("t", [row_not_run(row, row.lacks)]).rows[0]
    assert cells["what"].startswith("not run: torch has no messages")
