"""Does the benchmark of choices compare what it says, and is its arithmetic right?"""

from __future__ import annotations

import json

import pytest

from hires.bench import choose_bench as bench
from hires.core.errors import ConfigError, RunError


def option(name, step_s, replicas=1, stages=1, **keys):
    names = ("replicas", "stages", "tiles", "spatial_stages", "local_dp", "directions")
    values = {f"parallel.{one}": 1 for one in names}
    values |= {"parallel.replicas": replicas, "parallel.stages": stages, **keys}
    return {"overrides": name, "layout": name, "step_s": step_s, "keys": values}


@pytest.mark.parametrize(
    ("pairs", "tau"),
    [
        ([(1, 10), (2, 20), (3, 30)], 1.0),
        ([(1, 30), (2, 20), (3, 10)], -1.0),
        ([(1, 10), (2, 30), (3, 20)], 1 / 3),
        ([(1, 10), (1, 20)], 0.0),
        ([(1, 10)], 1.0),
    ],
)
def test_kendalls_tau(pairs, tau):
    assert bench.kendall_tau(pairs) == pytest.approx(tau)


def test_layouts_are_the_best_of_each_shape_spread_from_fastest_to_slowest():
    options = [option(f"s{n}", n, stages=n) for n in range(1, 8)]
    options.insert(1, option("again", 1.5, stages=1))
    found = [one["overrides"] for one in bench.of_different_shapes(options, 3)]
    assert found == ["s1", "s4", "s7"]
    assert len(bench.of_different_shapes(options, 20)) == 7


@pytest.fixture
def answers(monkeypatch):
    """What `hires` prints: a choice of three layouts, and runs of which the second is fastest."""
    measured = {1: 0.011, 2: 0.010, 3: 0.030}
    asked = []

    def hires(words, timeout_s):
        asked.append([*words])
        if words[0] == "plan":
            options = [option(f"s{n}", 0.01 * n, stages=n) for n in (1, 2, 3)]
            return json.dumps({"options": options, "source": "a test", "seconds": 1.0})
        [stages] = [int(w.partition("=")[2]) for w in words if w.startswith("parallel.stages=")]
        return json.dumps({"throughput": {"step_s": {"median": measured[stages]}}})

    monkeypatch.setattr(bench, "_hires", hires)
    return asked


def test_errors_order_and_right_choices(answers):
    options = bench.ChooseOptions(only="resnet18", images=1, ranks="2")
    [result] = [*bench.measure(options)]
    [row] = result["rows"]
    assert row["behind"] == pytest.approx(0.1)
    assert row["tau"] == pytest.approx(1 / 3)
    assert result["right"] == 0
    assert result["cases"] == 1
    # 10 beside 11, 20 beside 10, 30 beside 30
    assert result["mean_error"] == pytest.approx((1 / 11 + 1 + 0) / 3)
    assert answers[0][:3] == ["plan", "--choose", "ranks=2"]
    assert len(answers) == 4
    text = str(bench._tables(result))
    assert "within 5%" in text


def test_run_that_fails_is_a_row_with_its_reason(monkeypatch):
    def fails(words, timeout_s):
        raise RunError("it ran out of memory")

    monkeypatch.setattr(bench, "_hires", fails)
    options = bench.ChooseOptions(only="resnet18", images=1, ranks="2")
    [result] = [*bench.measure(options)]
    assert not result["ok"]
    assert "it ran out of memory" in str(bench._tables(result))


def test_wrong_options_are_refused():
    with pytest.raises(ConfigError, match="names none of"):
        [*bench.cases_of(bench.ChooseOptions(only="nothing"))]
    with pytest.raises(ConfigError, match="give numbers"):
        [*bench.cases_of(bench.ChooseOptions(ranks="two"))]
    with pytest.raises(ConfigError, match="an order needs 2"):
        bench.ChooseOptions(layouts=1)


def test_keys_are_written_as_hydra_reads_them():
    words = bench._words({"model": "unet", "a": True, "b": [1, 2], "c": {"x": [1], "y": "z"}})
    assert words == ["model=unet", "a=true", "b=[1, 2]", "c={x: [1], y: z}"]
