"""Does the benchmark of choices compare what it says, and is its arithmetic right?"""

from __future__ import annotations

import dataclasses
import json
from types import SimpleNamespace

import pytest

from hires.bench import choose_bench as bench
from hires.bench.calibrated_networks import Timed
from hires.bench.pace import chain_config
from hires.core.errors import ConfigError, RunError
from hires.plan.search.candidates import Candidate, LayoutShape
from tests.helpers.calibrations import CALIBRATION


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


def test_pace_of_each_round_is_taken_out_of_the_steps():
    pace_s = [0.1, 0.2, 0.1, 0.4]
    steps_s = [[1.0, 2.0, 1.0, 4.0], [3.0, 6.0, 3.0, 12.0]]
    assert bench.at_one_pace(steps_s, pace_s, 0.1) == pytest.approx([1.0, 3.0])
    pace_s[1] = 7.0  # one disturbed round does not matter
    steps_s[1][2] = 99.0
    assert bench.at_one_pace(steps_s, pace_s, 0.1) == pytest.approx([1.0, 3.0])


@pytest.fixture
def answers(monkeypatch):
    """A choice of three layouts of 10, 20 and 30 ms, and steps on a machine half as fast."""
    asked = []

    def hires(words, timeout_s):
        asked.append([*words])
        options = [option(f"s{n}", 0.01 * n, stages=n) for n in (1, 2, 3)]
        return json.dumps({"options": options, "source": "a test", "seconds": 1.0})

    def steps(job, ranks, timeout_s, entrants, paced, *_):
        yield [[0.022, 0.022], [0.020, 0.020], [0.060, 0.060]], [0.2, 0.2]

    calibration = dataclasses.replace(CALIBRATION, pace_s=0.05, busy_pace_s=0.1)
    monkeypatch.setattr(bench, "hires_output", hires)
    monkeypatch.setattr(bench, "stream_ranks", steps)
    monkeypatch.setattr(bench, "composed", lambda *_: None)
    monkeypatch.setattr(bench, "_entrant", lambda *_: Timed(None, None))
    machine = SimpleNamespace(step_time=lambda _: SimpleNamespace(step_s=0.022))
    monkeypatch.setattr(bench, "machine_of", lambda *_: machine)
    monkeypatch.setattr(bench, "calibration_or_defaults", lambda: calibration)
    return asked


def test_errors_order_and_right_choices(answers):
    options = bench.ChooseOptions(only="resnet18", images=1, ranks="2", calibrate=False)
    [result] = [*bench.measure(options)]
    [row] = result["rows"]
    assert row["pace"] == pytest.approx(2.0)
    assert row["behind"] == pytest.approx(0.1)
    assert row["tau"] == pytest.approx(1 / 3)
    assert row["tau_of_halves"] == 1.0
    assert result["mean_error_of_halves"] == pytest.approx(0.0)
    assert result["right"] == 0
    assert result["cases"] == 1
    # At the calibration's pace 10 beside 11, 20 beside 10, 30 beside 30.
    assert result["mean_error"] == pytest.approx((1 / 11 + 1 + 0) / 3)
    assert result["mean_error_as_measured"] == pytest.approx((12 / 22 + 0 + 30 / 60) / 3)
    assert result["mean_error_of_generic"] == pytest.approx((1 + 1.2 + 8 / 30) / 3)
    assert answers[0][:3] == ["plan", "--choose", "ranks=2"]
    text = str(bench._tables(result))
    assert "within 5%" in text


def test_run_that_fails_is_a_row_with_its_reason(monkeypatch):
    def fails(words, timeout_s):
        raise RunError("it ran out of memory")

    monkeypatch.setattr(bench, "hires_output", fails)
    options = bench.ChooseOptions(only="resnet18", images=1, ranks="2", calibrate=False)
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


def test_layout_of_a_choice_is_planned_with_its_keys():
    config = chain_config({"image": 16, "batch": 4, "words": "c3:8 bn relu"}, "fp32", "train")
    shape = LayoutShape(2, 1, 1, (2, 1), 1, 1)
    keys = Candidate(shape, 1, 1, "gpipe", fuse=2).change.keys
    timed = bench._entrant(config, keys)
    assert timed.plan.world == 4
    assert timed.config.parallel.halo.fuse == 2
    assert timed.plan.graph.input_shape[0] == 2


def test_defaults_of_the_options_are_allowed(capsys):
    assert bench.BENCHMARK.main(["--only", "nothing"]) == ConfigError.exit_code
    assert "names none of" in capsys.readouterr().err
