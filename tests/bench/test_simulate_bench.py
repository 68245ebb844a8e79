"""Does the benchmark compare what was measured with what the same plan would take?"""

from __future__ import annotations

import json

import pytest

from hires.bench import simulate_bench as bench
from hires.bench import thesis
from hires.bench.thesis import CALIBRATION_BATCH, PUBLISHED_IMG_PER_S, RATIOS
from hires.bench.thesis_memory import RATIOS as MEMORY_RATIOS
from hires.core.config.run_config import from_dict
from hires.core.ranks.timeline import HostClock, MarkedSpan, Recorder
from hires.nets.trace import trace_config
from hires.plan.partition import layer_starts
from hires.plan.simulation.costs import Roofline
from hires.plan.simulation.simulate import Link, Network, simulate
from tests.helpers.simulated import unit_costs
from tests.helpers.small_plans import LAYOUTS, plan_of

NETWORK = Network(Link(0.01, 1e6), Link(0.01, 1e6))


class StoppedClock(HostClock):
    """A clock on which every step begins at 0."""

    def now(self):
        return 0.0


@pytest.fixture
def run(tmp_path):
    """A run folder whose ranks did exactly what a simulation says."""
    plan = plan_of(**LAYOUTS["sp+pp"])
    (tmp_path / "plan.json").write_text(json.dumps(plan.to_dict()))
    (tmp_path / "a0").mkdir()
    for line in simulate(plan, unit_costs(plan), NETWORK).ranks:
        recorder = Recorder()
        recorder.clock = StoppedClock()
        recorder.begin_step()
        recorder.steps[-1].spans.extend(MarkedSpan(*span[:5]) for span in line.spans)
        recorder.write(tmp_path / "a0", line.rank)
    return tmp_path


def test_run_that_went_as_simulated_has_no_error(run):
    found = bench.compare(run, NETWORK)
    assert found["ranks"] == 6
    assert found["error"] == pytest.approx(0, abs=1e-5)  # times are written to a tenth of a us
    assert found["measured_s"] > 1
    assert found["messages"] == "links"


def test_slower_links_than_measured_show_as_an_error(run):
    assert bench.compare(run, Network(Link(1.0), Link(1.0)))["error"] > 0.1


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--only", "run"], "--only run is unknown; choose from runs,thesis,memory"),
        (["--from", "a", "--only", "runs", "--timeout", "0"], "--timeout 0 must be above 0"),
    ],
)
def test_bad_options_are_refused(words, text, capsys):
    assert bench.BENCHMARK.main(words) == 2
    assert text in capsys.readouterr().err


def test_overrides_do_not_go_with_finished_runs(capsys):
    assert bench.BENCHMARK.main(["image=64", "--from", "somewhere"]) == 2
    assert "leave one of the two out" in capsys.readouterr().err


def test_rows_cite_the_thesis_and_the_published_ratios_are_its_own():
    published = {row["where"]: row.get("published") for row in RATIOS}
    # Section 3.5.2, section 3.5.3, and the end of section 2.5.
    assert (published["Fig. 3.13"], published["Fig. 3.14"]) == (1.5, 2.4)
    assert (published["Fig. 3.15"], published["Fig. 3.16"]) == (2.5, 2.0)
    assert {row["published"] for row in RATIOS if row["where"] == "Fig. 2.11"} == {1.8, 2.0}


def test_every_published_ratio_of_the_half_precisions_has_a_row():
    def published(rows, half):
        return {(row["where"], row["published"]) for row in rows if row["precision"] == half}

    speed = [row for row in RATIOS if row.get("base_precision") == "fp32"]
    # Sections 2.5.2, 2.5.3 and 2.6.
    figures = ("Fig. 2.4", "Fig. 2.8", "Fig. 2.9")
    assert published(speed, "bf16") == {*zip(figures, (1.45, 1.6, 1.65), strict=True)}
    fp16 = {*zip((*figures, "sec. 2.6"), (1.54, 1.9, 1.55, 1.58), strict=True)}
    assert published(speed, "fp16") == fp16
    figures = ("Fig. 2.5", "Fig. 2.6", "Fig. 2.7")
    for half, ratios in (("fp16", (1.77, 1.57, 1.57)), ("bf16", (1.47, 1.4, 1.4))):
        assert published(MEMORY_RATIOS, half) == {*zip(figures, ratios, strict=True)}
    for row in speed:
        assert row["precision"].upper() in row["what"]


@pytest.mark.slow
def test_device_infers_as_fast_as_the_thesis_measured():
    for precision, wanted in PUBLISHED_IMG_PER_S.items():
        plan = thesis.calibration_plan(precision)
        costs = Roofline(plan, thesis.device(precision))
        assert CALIBRATION_BATCH / simulate(plan, costs).step_s == pytest.approx(wanted, rel=1e-6)


def test_every_row_states_its_reading():
    for row in RATIOS:
        assert row["reading"]
        for hypothesis in row.get("hypotheses", ()):
            assert set(hypothesis) - {"says"}, "a hypothesis predicts something else than its row"
            assert hypothesis["says"]


@pytest.mark.slow
def test_default_cut_of_mpi4dl_is_by_modules():
    # 38 modules in 5 stages, 24 in 2: int(38 / 5) and 24 / 2 each, and the rest for the last.
    for network, stages, expected in (("resnet", 5, [7, 7, 7, 7, 10]), ("amoebanet", 2, [12, 12])):
        config = from_dict({"model": thesis.NETWORKS[network], "image": 256, "batch": 1})
        graph = trace_config(config)
        starts, cuts = layer_starts(graph), thesis.equal_modules(graph, stages)
        assert sum(cuts) == len(starts)
        modules, found = [thesis.module_of(graph, start) for start in starts], []
        for size in cuts:
            found.append(len(set(modules[:size])))
            modules = modules[size:]
        assert found == expected


@pytest.mark.slow
def test_all_rows_are_predicted_and_written(tmp_path):
    assert bench.BENCHMARK.main(["--only", "thesis", "--out", str(tmp_path / "simulate")]) == 0
    found = json.loads((tmp_path / "simulate" / "simulate.json").read_text())
    assert len(found["thesis"]) == len(RATIOS)
    gpus = {row["layout"]["gpus"] for row in found["thesis"]}
    assert (min(gpus), max(gpus)) == (1, 128)
    for row in found["thesis"]:
        readings = [row, *row["hypotheses"]]
        best = min(map(thesis.factor_off, readings))
        assert best <= thesis.BOUND, f"{row['where']}: no reading predicts {row['published']}"
    # More than an A100 can do in fp32 (19.5), less than in TF32 (156): the right network.
    assert 19.5e12 < found["devices"]["fp32"]["flops_per_s"] < 156e12
    text = (tmp_path / "simulate" / "README.md").read_text()
    assert "hires bench simulate --only thesis" in text
    assert bench.BENCHMARK.text(found).count("an answer") >= 4
