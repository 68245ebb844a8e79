"""Does a calibration find every class of operators of its networks, and keep it as a whole?"""

from __future__ import annotations

import dataclasses
import json
from types import SimpleNamespace

import pytest

from hires.bench import calibrate_bench as bench
from hires.bench import calibrated_networks as networks
from hires.bench.calibration_nets import Chain
from hires.bench.node_times import NodeTimes, typical
from hires.bench.pace import chain_config
from hires.core.errors import RunError
from hires.plan.operators.operator_families import BATCH_NORM, CONV, CONV_1X1, POINTWISE
from hires.plan.simulation.machine_calibration import Links, kept_file, load_calibration
from hires.plan.simulation.node_work import family_of
from tests.helpers.calibrations import CALIBRATION

TINY = {"image": 16, "batch": 2, "words": "c3:8 bn relu save c1:8/2 nearest add"}


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache of its own, two cores, and one small network."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("HIRES_CACHE", raising=False)
    monkeypatch.setattr(bench, "CHAINS", [TINY])
    monkeypatch.setattr(networks, "CHAINS", [TINY])
    monkeypatch.setattr(networks, "TILED", [0])
    return tmp_path


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.timeout(180)
def test_small_calibration_has_samples_of_each_pass_and_is_kept(cache, capsys):
    words = ["--seconds", "0.1", "--timeout", "150", "--json"]
    assert bench.BENCHMARK.main(words) == 0
    result = json.loads(capsys.readouterr().out)
    calibration = load_calibration()
    assert calibration is not None
    assert calibration.to_dict() == result["calibration"]
    assert result["kept"] == str(kept_file())
    samples = calibration.samples
    assert {s.work.family for s in samples} >= {CONV, CONV_1X1, BATCH_NORM, POINTWISE}
    assert {s.work.phase for s in samples} == {"inference", "forward", "backward"}
    busy = {1, min(2, calibration.machine.cores)}
    assert busy <= {s.ranks for s in samples}
    assert any(s.work.shared for s in samples) == (calibration.machine.cores > 1)
    assert "convolution" in bench.BENCHMARK.text(result)


def test_calibration_that_fails_leaves_no_file(cache, monkeypatch, capsys):
    def fail(*_):
        raise RunError("rank 0 failed")

    monkeypatch.setattr(bench, "stream_ranks", fail)
    monkeypatch.setattr(bench, "run_ranks", fail)
    assert bench.BENCHMARK.main([]) == RunError.exit_code
    assert not list(cache.rglob("*.json"))


def test_networks_name_the_layers_that_they_describe():
    chains = [Chain(one["words"], 10) for one in bench.CHAINS]
    assert all(chain.fc.out_features == 10 for chain in chains)
    # One in fp32, and one in bf16 where the CPU computes with it.
    trained = [timed.plan for timed in networks.usual_networks([0], 1).whole if timed.plan.training]
    assert len(trained) == len(networks._dtypes())
    for plan in trained:
        assert len({family_of(plan.graph, node) for node in plan.graph.nodes}) > 8


def test_what_follows_from_samples_is_of_the_ranks_that_were_timed():
    one = {"ranks": 1, "samples": [], "pass_s": 1e-3, "besides_s": 2e-3, "update_s": 0.5}
    one |= {"update_bytes": 1e9, "bytes_per_s": 8e9, "pace_step_s": 0.1}
    work = bench.NodeWork("conv2d", CONV, True, True, "float32", 1e6, 8.0, (1, 1, 1, 9, 1, 1))
    one["samples"] = [bench.Sample(work, 1, 1e-3)]
    made = bench.calibration_of([one, {**one, "ranks": 2, "bytes_per_s": 4e9}], LINKS)
    assert made.flops_per_s == {"float32": pytest.approx(2e9)}
    assert (made.bytes_per_s, made.busy_bytes_per_s) == pytest.approx((8e9, 4e9))
    assert made.overheads.update_bytes_per_s == 2e9
    assert (made.pace_s, made.busy_pace_s) == (0.1, 0.1)


def test_samples_of_a_slow_moment_are_those_of_the_usual_pace():
    work = bench.NodeWork("conv2d", CONV, False, True, "float32", 1e6, 8.0, (1, 1, 1, 9, 1, 1))
    other = work._replace(num_bytes=16.0)
    samples = [bench.Sample(work, 1, 1.0), bench.Sample(other, 1, 7.0)]
    kept = dataclasses.replace(CALIBRATION, samples=samples, pace_s=0.1, busy_pace_s=0.2)
    found = [
        {"ranks": 1, "pace_step_s": 0.3, "samples": [bench.Sample(work, 1, 6.0)]},
        {"ranks": 2, "pace_step_s": 0.1, "samples": [bench.Sample(work, 2, 6.0)]},
    ]
    made = bench.with_network(kept, found)
    seconds = {(one.work, one.ranks): one.seconds for one in made.samples}
    assert seconds == pytest.approx({(work, 1): 2.0, (work, 2): 12.0, (other, 1): 7.0})
    assert made.time == kept.time  # the rest of the machine is as old as before
    assert made.network_time != kept.network_time
    assert (made.links, made.pace_s) == (kept.links, kept.pace_s)


def test_own_network_is_measured_in_parts_of_its_batch_and_in_tiles():
    config = chain_config({**TINY, "batch": 6}, "fp32", "train")
    config = dataclasses.replace(config, ranks=3)
    own = networks.own_networks(config)
    assert [timed.config.batch for timed in own.whole] == [6, 3, 1]
    tiled = [(timed.config.batch, timed.config.parallel) for timed in own.tiled]
    found = [(batch, parallel.tiles, parallel.halo.fuse) for batch, parallel in tiled]
    whole = [(6, [rows, 1], fuse) for rows in (2, 3) for fuse in (1, 2)]
    assert found == [*whole, (3, [2, 1], 1), (3, [3, 1], 1)]


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.timeout(240)
def test_own_network_joins_a_calibration_that_exists(cache, capsys):
    assert bench.BENCHMARK.main(["--seconds", "0.1", "--timeout", "100", "--json"]) == 0
    capsys.readouterr()
    before = load_calibration()
    own = ["model=resnet18", "image=32", "batch=2", "ranks=2"]
    assert bench.BENCHMARK.main(["--seconds", "0.1", "--timeout", "120", "--json", *own]) == 0
    after = load_calibration()
    assert before.links == after.links
    assert {s.work for s in before.samples} < {s.work for s in after.samples}
    assert any(s.work.sizes[2] == 512 for s in after.samples if s.work.family == CONV)


def test_nodes_are_timed_at_the_pace_of_their_own_round():
    recorder = SimpleNamespace(clock=None)
    times = NodeTimes(SimpleNamespace(engine=SimpleNamespace(recorder=recorder)))
    times.nodes["a", False] = [1.0, 2.0, 3.0]
    assert times.medians() == {("a", False): 1.5}
    times.pace_s = [0.1, 0.2, 0.6]  # at the pace of the second round: 2, 2 and 1
    assert times.medians() == {("a", False): pytest.approx(2.0)}


def test_partners_compute_what_the_file_says(tmp_path):
    file = tmp_path / "turn"
    assert bench._number_in(file) is None
    file.write_text("")  # as it is while it is written
    assert bench._number_in(file) is None
    file.write_text("3")
    assert bench._number_in(file) == 3


def test_typical_time_is_the_median_of_the_faster_half():
    assert typical([9.0, 1.0, 2.0, 3.0, 50.0]) == 2.0


LINKS = Links(1e-4, 1e9, 1e-4, 1e9)
