"""A calibration has samples of every class of operators, at one pace, and is kept as a whole."""

from __future__ import annotations

import dataclasses
import json
from types import SimpleNamespace

import pytest

from hires.bench import calibrate_machine as calibrate
from hires.bench.bench_main import run
from hires.bench.calibrate_machine import Chain, chain_config
from hires.bench.calibration_times import NodeTimes, typical
from hires.core.errors import RunError
from hires.plan.operators.operator_facts import BATCH_NORM, CONV, CONV_1X1, POINTWISE
from hires.plan.simulation.machine_calibration import Links, Sample, kept_file, load_calibration
from hires.plan.simulation.node_work import NodeWork, family_of
from tests.helpers.bench_jobs import forked
from tests.helpers.calibrations import CALIBRATION

TINY = {"image": 16, "batch": 2, "words": "c3:8 bn relu save c1:8/2 nearest add"}
WORK = NodeWork("conv2d", CONV, False, True, "float32", 1e6, 8.0, (1, 1, 1, 9, 1, 1))


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache of its own, and one small network."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("HIRES_CACHE", raising=False)
    monkeypatch.setattr(calibrate, "CHAINS", [TINY])
    monkeypatch.setattr(calibrate, "TILED", [0])
    monkeypatch.setattr(calibrate, "PACE", 0)
    return tmp_path


@pytest.mark.dist
def test_small_calibration_has_samples_of_each_pass_and_is_kept(cache, capsys, monkeypatch):
    monkeypatch.setattr(calibrate, "run_ranks", lambda *args: [*forked(*args)][-1])
    task = {"name": "calibrate", "command": "hires doctor --calibrate", "config": None}
    task |= {"seconds": 0.1, "timeout": 150, "out": "", "json": True}
    assert run(task, calibrate) == 0
    result = json.loads(capsys.readouterr().out)
    calibration = load_calibration()
    assert json.loads(json.dumps(calibration.to_dict())) == result["calibration"]
    assert result["kept"] == str(kept_file())
    samples = calibration.samples
    assert {s.work.family for s in samples} >= {CONV, CONV_1X1, BATCH_NORM, POINTWISE}
    assert {s.work.phase for s in samples} == {"inference", "forward", "backward"}
    assert {s.ranks for s in samples} >= {1, min(2, calibration.machine.cores)}
    assert any(s.work.shared for s in samples) == (calibration.machine.cores > 1)
    assert result["facts"][0].startswith("a core at its best: float32 ")


def test_calibration_that_fails_leaves_no_file(cache, monkeypatch):
    def fail(*_):
        raise RunError("rank 0 failed")

    monkeypatch.setattr(calibrate, "run_ranks", fail)
    with pytest.raises(RunError, match="rank 0 failed"):
        list(calibrate.measure({"config": None, "timeout": 1}))
    assert not list(cache.rglob("*.json"))


def test_chains_have_the_layers_that_they_describe():
    assert all(Chain(one["words"], 10).fc.out_features == 10 for one in calibrate.CHAINS)
    trained = calibrate.row_with_plan(chain_config(calibrate.CHAINS[0], "fp32", "train")).plan
    assert len({family_of(trained.graph, node) for node in trained.graph.nodes}) > 8


def test_what_follows_from_samples_is_of_the_ranks_that_were_timed():
    one = {"ranks": 1, "pass_s": 1e-3, "besides_s": 2e-3, "update_s": 0.5, "update_bytes": 1e9}
    one |= {"bytes_per_s": 8e9, "pace_step_s": 0.1}
    one["samples"] = [Sample(WORK._replace(back=True), 1, 1e-3)]
    links = Links(1e-4, 1e9, 1e-4, 1e9)
    made = calibrate.calibration_of([one, {**one, "ranks": 2, "bytes_per_s": 4e9}], links)
    assert made.flops_per_s == {"float32": pytest.approx(2e9)}
    assert (made.bytes_per_s, made.busy_bytes_per_s) == pytest.approx((8e9, 4e9))
    assert made.overheads.update_bytes_per_s == 2e9
    assert (made.pace_s, made.busy_pace_s) == (0.1, 0.1)


def test_samples_of_a_network_join_at_the_usual_pace_and_replace_their_own_alone():
    other = WORK._replace(num_bytes=16.0)
    samples = [Sample(WORK, 1, 1.0), Sample(other, 1, 7.0), Sample(WORK, 2, 9.0)]
    kept = dataclasses.replace(CALIBRATION, samples=samples, pace_s=0.1, busy_pace_s=0.2)
    alone = {"ranks": 1, "pace_step_s": 0.3, "samples": [Sample(WORK, 1, 6.0)]}
    busy = {"ranks": 2, "pace_step_s": 0.1, "samples": [Sample(WORK, 2, 6.0)]}
    for new, busy_s in (([alone], 9.0), ([alone, busy], 12.0)):  # those of busy cores stay
        joined = calibrate.with_network(kept, new)
        seconds = {(s.work, s.ranks): s.seconds for s in joined.samples}
        expected = {(WORK, 1): 2.0, (other, 1): 7.0, (WORK, 2): busy_s}
        assert seconds == pytest.approx(expected)
        assert (joined.time, joined.links) == (kept.time, kept.links)
        assert joined.network_time != kept.network_time


def test_own_network_is_measured_in_parts_of_its_batch_and_in_tiles():
    config = chain_config({**TINY, "batch": 6}, "fp32", "train")
    networks = calibrate.own_networks(dataclasses.replace(config, ranks=3))
    assert [timed.config.batch for timed in networks if timed.ranks == 1] == [6, 3, 1]
    timed = [(timed.config.batch, timed.config.parallel) for timed in networks if timed.ranks > 1]
    cuts = [(batch, parallel.tiles, parallel.halo.fuse) for batch, parallel in timed]
    whole = [(6, [rows, 1], fuse) for rows in (2, 3) for fuse in (1, 2)]
    assert cuts == [*whole, (3, [2, 1], 1), (3, [3, 1], 1)]


def test_nodes_are_timed_at_the_pace_of_their_own_round():
    recorder = SimpleNamespace(clock=None)
    times = NodeTimes(SimpleNamespace(engine=SimpleNamespace(recorder=recorder)))
    times.nodes["a", False] = [1.0, 3.0, 3.0]
    times.pace_s = [0.1, 0.2, 0.6]  # at the pace of the second round: 2, 3 and 1
    assert times.medians() == {("a", False): pytest.approx(2.0)}
    assert typical([9.0, 1.0, 2.0, 3.0, 50.0]) == 2.0  # the median of the faster half
