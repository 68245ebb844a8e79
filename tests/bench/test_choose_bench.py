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
from hires.plan.simulation.machine_calibration import DEFAULTS
from tests.helpers.calibrations import CALIBRATION


def option(name, step_s, replicas=1, stages=1, **keys):
    names = ("replicas", "stages", "tiles", "spatial_stages", "local_dp", "directions")
    values = {f"parallel.{one}": 1 for one in names}
    values |= {"parallel.replicas": replicas, "parallel.stages": stages, **keys}
    return {"overrides": name, "layout": name, "step_s": step_s, "keys": values}


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
    monkeypatch.setattr(bench, "calibration_or_defaults", lambda: CALIBRATION)
    options = bench.ChooseOptions(only="resnet18", images=1, ranks="2", calibrate=False)
    [result] = [*bench.measure(options)]
    assert not result["ok"]
    assert "it ran out of memory" in str(bench._tables(result))


def test_order_needs_two_layouts():
    with pytest.raises(ConfigError, match="an order needs 2"):
        bench.ChooseOptions(layouts=1)


def test_search_is_timed_cold_and_once_its_answer_is_kept(answers, monkeypatch):
    seconds = iter([0.0, 9.0, 10.0, 12.0])
    monkeypatch.setattr(bench, "time", SimpleNamespace(monotonic=lambda: next(seconds)))
    answer = json.dumps({"planned": 3, "considered": 40})
    monkeypatch.setattr(bench, "hires_output", lambda words, timeout_s: answer)
    row = bench.timed_search("many", "ranks=512 cluster=ours", 60.0)
    assert (row["first_s"], row["again_s"]) == (9.0, 2.0)
    assert row["command"] == "hires plan --choose ranks=512 cluster=ours"
    text = str(bench._tables({"rows": [], "searches": [row]}))
    assert "3 of 40" in text


def test_machine_without_a_calibration_is_refused(monkeypatch):
    monkeypatch.setattr(bench, "calibration_or_defaults", lambda: DEFAULTS)
    options = bench.ChooseOptions(only="resnet18", calibrate=False)
    with pytest.raises(ConfigError, match="run hires doctor --calibrate"):
        [*bench.measure(options)]


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
