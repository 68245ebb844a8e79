"""Are the right points put beside each other, and is the verdict on each the right one?"""

from __future__ import annotations

import json

import numpy as np
import pytest

from hires.core.errors import ConfigError
from hires.report.compare.comparison import compare_runs
from hires.report.compare.metrics import METRICS
from hires.report.compare.verdicts import Settings, parse_tolerance
from hires.report.read.runs import read_runs
from tests.helpers.compared_runs import compared_run, failed_run

RNG = np.random.default_rng(0)
SETTINGS = Settings(parse_tolerance("5%"))


def steps(factor=1.0, count=40):
    return list(factor * 0.5 * np.exp(0.02 * RNG.normal(size=count)))


def compare(a, b, *metrics, settings=SETTINGS):
    asked = [METRICS[name] for name in metrics or ("throughput",)]
    return compare_runs(("A", "B"), read_runs(a), read_runs(b), asked, settings)


def verdicts(made):
    return [(result.verdict, result.status) for result in made.results]


@pytest.fixture
def before(tmp_path):
    return compared_run(tmp_path, [steps()], campaign="before")


@pytest.mark.parametrize(
    ("factor", "throughput", "step_time"),
    [
        (1.1, ("slower", "worse"), ("slower", "worse")),
        (0.9, ("faster", "better"), ("faster", "better")),
        (1.0, ("no difference", "same"), ("no difference", "same")),
    ],
)
def test_speed(tmp_path, before, factor, throughput, step_time):
    after = compared_run(tmp_path, [steps(factor)], campaign="after")
    made = compare([before], [after], "throughput", "step_time")
    assert verdicts(made) == [throughput, step_time]
    assert made.is_worse == (factor == 1.1)
    assert made.results[1].ratio == pytest.approx(factor, rel=0.02)


def test_sides_with_other_batches_are_compared_per_image(tmp_path, before):
    # A step of 4 images was put beside one of 2, and called slower.
    after = compared_run(tmp_path, [steps(0.5)], campaign="after", batch=2)
    made = compare([before], [after], "throughput", "step_time")
    assert verdicts(made) == [("no difference", "same")] * 2
    assert made.results[1].metric.name == "step_time_per_image"
    assert made.results[1].a == pytest.approx(0.5 / 4, rel=0.02)
    assert any("per image" in note for note in made.notes)


def test_memory_and_loss_of_other_batches_are_not_comparable(tmp_path, before):
    # The memory of a batch of 4 was called worse than that of 2, with exit code 4.
    after = compared_run(tmp_path, [steps()], peaks=[200 << 20], campaign="after", batch=8)
    made = compare([before], [after], "memory", "loss")
    assert verdicts(made) == [("not comparable", "unknown")] * 2
    assert not made.is_worse
    assert not made.is_decided
    assert "other batches" in made.results[0].sentence()


def test_run_of_another_batch_that_fails_is_worse(tmp_path, before):
    after = failed_run(tmp_path, campaign="after", batch=8)
    assert compare([before], [after], "memory").is_worse


def made_from(run, source):
    """Gives a run the digest of its network's source."""
    for path in (run / "record.json", run / "a0" / "record.json"):
        path.write_text(json.dumps({**json.loads(path.read_text()), "inputs": {"network": source}}))
    return run


def test_runs_before_and_after_an_edit_of_the_network_are_pairs(tmp_path):
    sides = []
    for campaign, sources in (("before", "ab"), ("after", "cd")):
        runs = [compared_run(tmp_path, [steps()], campaign=campaign, batch=n) for n in (4, 8)]
        sides.append([made_from(run, one) for run, one in zip(runs, sources, strict=True)])
    made = compare(*sides)
    assert len(made.results) == 2
    assert ("model.source", "a, b", "c, d") in [(d.what, d.a, d.b) for d in made.config]


def test_runs_of_two_sources_on_one_side_are_two_points(tmp_path, before):
    runs = [compared_run(tmp_path, [steps()], campaign=name) for name in ("one", "two")]
    made_from(before, "a")
    made = compare([before], [made_from(run, one) for run, one in zip(runs, "ab", strict=True)])
    assert len(made.results) == 1
    assert any("only in B" in note for note in made.notes)


def test_sides_with_other_images_are_not_compared(tmp_path, before):
    after = compared_run(tmp_path, [steps()], campaign="after", image=96)
    with pytest.raises(ConfigError, match=r"differ: image \(\[224,224\] in A, \[96,96\] in B\)"):
        compare([before], [after])


def test_memory_of_whole_processes_is_told_apart(tmp_path, before):
    after = compared_run(tmp_path, [steps(), steps()], campaign="after")
    assert not any("whole" in note for note in compare([before], [after], "memory").notes)
    path = after / "record.json"  # of its latest attempt
    record = json.loads(path.read_text())
    record["memory"][1]["source"] = "rss"
    path.write_text(json.dumps(record))
    told = [note for note in compare([before], [after], "memory").notes if "whole" in note]
    assert len(told) == 1
    assert told[0].startswith("the memory of 1 of 3 attempts is that of whole processes")
    assert "measure.warmup=2" in told[0]
    assert not any("whole" in note for note in compare([before], [after]).notes)


def test_memory_and_loss_of_one_run_each_are_judged_by_the_tolerance_alone(tmp_path, before):
    after = compared_run(tmp_path, [steps()], peaks=[110 << 20], losses=[1.8], campaign="after")
    made = compare([before], [after], "memory", "loss")
    assert verdicts(made) == [("more", "worse"), ("lower", "better")]
    assert made.results[0].interval is None
    assert "no interval" in made.results[0].why


def test_equal_runs_are_called_different_in_at_most_5_of_100_seeds(tmp_path):
    different = 0
    for seed in range(100):
        rng = np.random.default_rng([1, seed])
        a, b = (
            [compared_run(tmp_path / f"{seed}{side}", [list(np.exp(0.05 * rng.normal(size=30)))])]
            for side in "ab"
        )
        made = compare(a, b, settings=Settings(parse_tolerance("0%"), resamples=300))
        different += made.results[0].status in ("better", "worse")
    assert different <= 5


def test_regression_smaller_than_the_tolerance_is_none(tmp_path, before):
    after = compared_run(tmp_path, [steps(1.03, 400)], campaign="after")
    assert verdicts(compare([before], [after])) == [("no difference", "same")]
    tight = Settings(parse_tolerance("-1%,+50%"))
    assert verdicts(compare([before], [after], settings=tight)) == [("slower", "worse")]


def test_points_are_paired_by_config_and_the_rest_is_told(tmp_path):
    def campaign(name, *batches):
        return [compared_run(tmp_path, [steps()], campaign=name, batch=n) for n in batches]

    made = compare(campaign("a", 1, 2, 4), campaign("b", 4, 2, 8))
    assert [result.point.rpartition(" ")[2] for result in made.results] == ["batch=2", "batch=4"]
    assert made.notes[:2] == [
        "only in A: resnet50 224x224 single fp32 batch=1",
        "only in B: resnet50 224x224 single fp32 batch=8",
    ]


def test_keys_that_tell_the_sides_apart_keep_no_pair_apart(tmp_path):
    a = [compared_run(tmp_path, [steps()], campaign="a", batch=n) for n in (2, 4)]
    precision = {"precision": {"name": "bf16"}}
    b = [compared_run(tmp_path, [steps(0.5)], campaign="b", batch=n, **precision) for n in (2, 4)]
    made = compare(a, b)
    assert [result.point for result in made.results] == [
        "resnet50 224x224 single fp32->bf16 batch=2",
        "resnet50 224x224 single fp32->bf16 batch=4",
    ]
    assert [(d.what, d.a, d.b) for d in made.config] == [("precision.name", "fp32", "bf16")]
    assert made.overall[0].verdict == "faster"


def test_seeds_of_a_point_are_its_repeats(tmp_path):
    def seeds(name, factor, values):
        return [
            compared_run(tmp_path, [steps(factor)], campaign=name, seed=seed) for seed in values
        ]

    a = seeds("a", 1, (0, 1, 2))
    [result] = compare(a, seeds("b", 1.1, (0, 1, 2))).results
    assert (result.why, result.repeats, result.status) == ("3 pairs of seeds", (3, 3), "worse")
    [result] = compare(a, seeds("c", 1.1, (3, 4, 5))).results
    assert (result.why, result.status) == ("3 and 3 repeats", "worse")


def test_seed_that_one_side_lacks_counts_nowhere(tmp_path):
    # The ratio was of the shared seeds and the columns of all: B looked slower and was faster.
    a = [
        compared_run(tmp_path, [steps(factor)], campaign="a", seed=seed)
        for seed, factor in enumerate((0.1, 1.25, 1.25))
    ]
    b = [compared_run(tmp_path, [steps()], campaign="b", seed=seed) for seed in (1, 2)]
    made = compare(a, b)
    [result] = made.results
    assert result.repeats == (2, 2)
    assert result.ratio == pytest.approx(1.25, rel=0.02)
    assert result.b / result.a == pytest.approx(result.ratio)
    told = "seed 0 left out, because only one side has it: resnet50 224x224 single fp32"
    assert told in made.notes


def test_steps_that_are_no_numbers_are_steps_that_count(tmp_path, before):
    after = compared_run(tmp_path, [steps()], campaign="after")
    for path in (after / "record.json", after / "a0" / "record.json"):
        values = json.loads(path.read_text())
        values["throughput"]["discarded"].append({"step": [0]})
        values["samples"][3]["step"] = [3]
        path.write_text(json.dumps(values))
    assert verdicts(compare([before], [after])) == [("no difference", "same")]


def test_attempts_of_other_code_are_no_repeats(tmp_path):
    a = compared_run(tmp_path, [steps(), steps(), steps()], campaign="a")
    old = a / "a0" / "record.json"
    values = json.loads(old.read_text())
    values["provenance"]["git"] = "another"
    old.write_text(json.dumps(values))
    b = compared_run(tmp_path, [steps(), steps()], campaign="b")
    made = compare([a], [b])
    assert made.results[0].repeats == (2, 2)
    assert any("1 complete attempts of another commit" in note for note in made.notes)


def test_point_that_fails_now_is_worse_and_one_that_failed_before_is_not(tmp_path, before):
    failed = failed_run(tmp_path, campaign="after")
    made = compare([before], [failed])
    assert verdicts(made) == [("failed", "worse")]
    assert made.results[0].why == "B: rank 0 was killed"
    assert made.overall[0].status == "worse"
    made = compare([failed], [before])
    assert verdicts(made) == [("unknown", "unknown")]
    assert not made.is_worse


def test_loss_that_is_no_number_any_more_is_worse(tmp_path, before):
    after = compared_run(tmp_path, [steps()], losses=[None], campaign="after")
    assert verdicts(compare([before], [after], "loss")) == [("higher", "worse")]
    assert verdicts(compare([after], [before], "loss")) == [("unknown", "unknown")]


def test_one_worse_point_makes_all_worse(tmp_path):
    def campaign(name, *factors):
        return [
            compared_run(tmp_path, [steps(factor)], campaign=name, batch=n + 1)
            for n, factor in enumerate(factors)
        ]

    made = compare(campaign("a", 1, 1, 1, 1), campaign("b", 0.8, 1.2, 1, 1))
    assert [result.status for result in made.results] == ["better", "worse", "same", "same"]
    [overall] = made.overall
    assert (overall.status, overall.why) == ("worse", "1 of 4 points are worse")
    assert overall.ratio == pytest.approx(1.01, abs=0.02)


def test_nothing_in_common_is_an_error(tmp_path):
    a = [compared_run(tmp_path, [steps()], campaign="a", batch=n) for n in (1, 2)]
    b = [compared_run(tmp_path, [steps()], campaign="b", batch=n) for n in (3, 4)]
    with pytest.raises(ConfigError, match=r"several keys at once: batch \(1, 2 in A, 3, 4 in B\)"):
        compare(a, b)


def test_run_without_a_config_keeps_no_others_apart(tmp_path, before):
    # Its missing keys counted as second values of a side, so no run had a partner.
    torn = compared_run(tmp_path, [steps()], campaign="after", seed=7)
    (torn / "config.yaml").write_text("[")
    after = compared_run(tmp_path, [steps()], campaign="after")
    made = compare([before], [torn, after])
    assert verdicts(made) == [("no difference", "same")]
    assert any("config.yaml" in note for note in made.notes)
    with pytest.raises(ConfigError, match=r"no config\.yaml of B can be read"):
        compare([before], [torn])


def test_hostile_record_is_unknown(tmp_path, before):
    after = compared_run(tmp_path, [steps()], campaign="after")
    for path in (after / "record.json", after / "a0" / "record.json"):
        values = json.loads(path.read_text())
        values |= {"samples": [{"step": [], "step_s": "x"}, 7, {"step_s": -1}], "memory": "none"}
        values |= {"loss": [], "provenance": 3}
        path.write_text(json.dumps(values))
    made = compare([before], [after], *METRICS)
    assert {result.status for result in made.results} == {"unknown"}
    json.dumps(made.to_dict(), allow_nan=False)


@pytest.mark.parametrize("said", ["5", "x%", "-5%", "5%,5%", "+5%,-5%", "-200%,5%", "", "1%,2%,3%"])
def test_tolerance_that_is_none(said):
    with pytest.raises(ConfigError, match="write 5%"):
        parse_tolerance(said)


def test_throughput_of_an_even_number_of_steps_is_that_of_the_median_step(tmp_path):
    # compare had 232 img/s, the mean of two rates, where the median step of 18 ms is 111 img/s.
    run = compared_run(tmp_path, [[0.005, 0.031]], campaign="even", batch=2)
    [found] = read_runs([run])
    [attempt] = found.repeats
    rates = METRICS["throughput"].values(attempt.record)
    assert np.median(rates) == pytest.approx(2 / 0.018)
    assert attempt.record["throughput"]["img_per_s"]["median"] == pytest.approx(2 / 0.018)
