"""Does a calibration find every class of operators of its networks, and keep it as a whole?"""

from __future__ import annotations

import json

import pytest

from hires.bench import calibrate_bench as bench
from hires.bench.calibration_nets import Chain
from hires.bench.node_times import typical
from hires.core.errors import RunError
from hires.plan.operators.operator_families import BATCH_NORM, CONV, CONV_1X1, POINTWISE
from hires.plan.simulation.machine_calibration import Links, kept_file, load_calibration
from hires.plan.simulation.node_work import family_of

TINY = {"image": 16, "batch": 2, "words": "c3:8 bn relu save c1:8/2 nearest add"}


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache of its own, two cores, and one small network."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("HIRES_CACHE", raising=False)
    monkeypatch.setattr(bench, "CHAINS", [TINY])
    monkeypatch.setattr(bench, "TILED", [0])
    return tmp_path


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
    assert bench.BENCHMARK.main([]) == RunError.exit_code
    assert not list(cache.rglob("*.json"))


def test_networks_name_the_layers_that_they_describe():
    chains = [Chain(one["words"], 10) for one in bench.CHAINS]
    assert all(chain.fc.out_features == 10 for chain in chains)
    [timed] = [t for t in bench._planned([0], 1)[0] if t.plan.training]
    families = {family_of(timed.plan.graph, node) for node in timed.plan.graph.nodes}
    assert len(families) > 8


def test_what_follows_from_samples_is_of_the_ranks_that_were_timed():
    one = {"ranks": 1, "samples": [], "pass_s": 1e-3, "besides_s": 2e-3, "update_s": 0.5}
    one |= {"update_bytes": 1e9, "bytes_per_s": 8e9}
    work = bench.NodeWork("conv2d", CONV, True, True, "float32", 1e6, 8.0, (1, 1, 1, 9, 1, 1))
    one["samples"] = [bench.Sample(work, 1, 1e-3)]
    made = bench.calibration_of([one, {**one, "ranks": 2, "bytes_per_s": 4e9}], LINKS)
    assert made.flops_per_s == {"float32": pytest.approx(2e9)}
    assert (made.bytes_per_s, made.busy_bytes_per_s) == pytest.approx((8e9, 4e9))
    assert made.overheads.update_bytes_per_s == 2e9


def test_typical_time_is_the_median_of_the_faster_half():
    assert typical([9.0, 1.0, 2.0, 3.0, 50.0]) == 2.0


LINKS = Links(1e-4, 1e9, 1e-4, 1e9)
