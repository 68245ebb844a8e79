"""The right points are compared, with other runs or with references, and the verdict is right."""

from __future__ import annotations

import numpy as np
import pytest
import yaml

from hires.core.errors import ConfigError
from hires.report.compare import comparison
from hires.report.compare.comparison import compare_references, compare_runs
from hires.report.compare.verdicts import METRICS, Settings, Tolerance, parse_tolerance
from hires.report.runs import read_runs
from tests.helpers import report_runs
from tests.helpers.compared_runs import compared_run, failed_run

RNG = np.random.default_rng(0)
SETTINGS = Settings(parse_tolerance("5%"))
SAME, SLOWER = ("no difference", "same"), ("slower", "worse")


def steps(factor=1.0, count=40):
    return list(factor * 0.5 * np.exp(0.02 * RNG.normal(size=count)))


def compare(a, b, *metrics, settings=SETTINGS):
    asked = [METRICS[name] for name in metrics or ("throughput",)]
    return compare_runs(("A", "B"), read_runs(a), read_runs(b), asked, settings)


def verdicts(made):
    return [(result.verdict, result.status) for result in made.results]


@pytest.fixture
def campaign(tmp_path):
    """Returns a function that makes the runs of a campaign, of some factors of a step's time."""

    def make(name, factors, key="batch", **keys):
        return [
            compared_run(tmp_path, [steps(factor)], campaign=name, **keys, **{key: value})
            for value, factor in factors.items()
        ]

    return make


@pytest.fixture
def before(tmp_path):
    return compared_run(tmp_path, [steps()], campaign="before")


@pytest.mark.parametrize(
    ("factor", "verdict"), [(1.1, SLOWER), (0.9, ("faster", "better")), (1.0, SAME)]
)
def test_speed_is_judged(tmp_path, before, factor, verdict):
    after = compared_run(tmp_path, [steps(factor)], campaign="after")
    made = compare([before], [after], "throughput", "step_time")
    assert verdicts(made) == [verdict] * 2
    assert made.is_worse == (factor == 1.1)
    assert made.results[1].ratio == pytest.approx(factor, rel=0.02)


def test_difference_within_the_tolerance_is_none(tmp_path, before):
    after = compared_run(tmp_path, [steps(1.03, 400)], campaign="after")
    assert verdicts(compare([before], [after], "throughput", "step_time")) == [SAME] * 2
    tight = Settings(parse_tolerance("-1%,+50%"))
    assert verdicts(compare([before], [after], settings=tight)) == [SLOWER]
    for text in ("5", "-5%", "5%,5%", "-200%,5%", "", "1%,2%,3%"):
        with pytest.raises(ConfigError, match="write 5%"):
            parse_tolerance(text)


def test_memory_and_loss_of_one_run_each_are_judged_by_the_tolerance_alone(tmp_path, before):
    after = compared_run(tmp_path, [steps()], peaks=[110 << 20], losses=[1.8], campaign="after")
    nan = compared_run(tmp_path, [steps()], losses=[None], campaign="nan")
    broken = compared_run(tmp_path, [steps()], campaign="nan", seed=7)  # keeps no others apart
    (broken / "config.yaml").write_text("[")
    report_runs.change(before, evaluation={"top1": 0.8})
    report_runs.change(after, evaluation={"top1": 0.9})
    made = compare([before], [after], "memory", "loss", "accuracy")
    assert verdicts(made) == [("more", "worse"), ("lower", "better"), ("higher", "better")]
    assert made.results[0].interval is None
    assert verdicts(compare([before], [nan, broken], "loss")) == [("higher", "worse")]
    assert verdicts(compare([nan], [before], "loss")) == [("unknown", "unknown")]


def test_times_of_one_step_each_decide_nothing(tmp_path):
    # One number each has no interval: a step of 0.55 s was called slower.
    a, b = (compared_run(tmp_path, [[s]], campaign=f"{s}") for s in (0.5, 0.55))
    made = compare([a], [b], "throughput", "step_time")
    assert (verdicts(made), made.is_worse) == ([("undecided", "undecided")] * 2, False)
    assert "no interval; repeat the runs" in made.results[0].why
    uneven = compared_run(tmp_path, [[0.5, 1.0]], campaign="uneven")
    assert compare([a], [uneven]).results[0].b == 4 / 0.75  # of the mean step, as in its record


def test_points_are_paired_by_config_and_the_others_are_reported(campaign):
    a = campaign("a", {1: 1, 2: 1, 4: 1})
    made = compare(a, campaign("b", {4: 1, 2: 1, 8: 1}))
    assert [result.point.rpartition(" ")[2] for result in made.results] == ["batch=2", "batch=4"]
    assert [note.partition(":")[0] for note in made.notes[:2]] == ["only in A", "only in B"]
    # A key in which the sides differ keeps no pair apart.
    made = compare(a[1:], campaign("c", {2: 1, 4: 1}, precision={"name": "bf16"}))
    assert [result.point for result in made.results] == [
        "resnet50 224x224 single fp32->bf16 batch=2",
        "resnet50 224x224 single fp32->bf16 batch=4",
    ]
    assert [(d.what, d.a, d.b) for d in made.config] == [("precision.name", "fp32", "bf16")]
    with pytest.raises(ConfigError, match=r"they differ in batch \(1, 2 in A, 8, 9 in B\)"):
        compare(a[:2], campaign("d", {8: 1, 9: 1}))
    assert verdicts(compare(a[:1], campaign("e", {2: 0.5}))) == [("faster", "better")]
    with pytest.raises(ConfigError, match=r"other batches, and step_time, loss is of a step"):
        compare(a[:1], campaign("f", {2: 1}), "throughput", "step_time", "loss")
    other = {"image": 64, "task": {"name": "infer"}}  # another work of an image
    for key, value in other.items():
        with pytest.raises(ConfigError, match=f"they differ in {key}"):
            compare(a[:1], campaign(key, {1: 1}, **{key: value}))


def test_seeds_are_repeats_and_one_that_a_side_lacks_counts_nowhere(campaign):
    a = campaign("a", {0: 1, 1: 1, 2: 1}, "seed")
    for first, why in ((0, "3 pairs of seeds"), (2, "3 and 3 repeats"), (3, "3 and 3 repeats")):
        after = campaign(f"b{first}", dict.fromkeys(range(first, first + 3), 1.1), "seed")
        [result] = compare(a, after).results
        assert (result.why, result.repeats, result.status) == (why, (3, 3), "worse")
    # The ratio was of the shared seeds and the columns of all: B looked slower and was faster.
    few = campaign("e", {1: 1, 2: 1}, "seed")
    made = compare(campaign("d", {0: 0.1, 1: 1.25, 2: 1.25}, "seed"), few)
    [result] = made.results
    assert result.repeats == (2, 2)
    assert result.b / result.a == pytest.approx(result.ratio)
    assert result.ratio == pytest.approx(1.25, rel=0.02)
    assert any(note.startswith("seeds left out") for note in made.notes)


def test_runs_of_other_images_are_no_repeats(campaign):
    a = [*campaign("a", {1: 1}), *campaign("b", {1: 1})]
    b = campaign("c", {1: 1})
    for run, data in zip([*a, *b], "xyx", strict=True):
        report_runs.change(run, inputs={"data": data})
    for sides, repeats in (((a, b), (1, 1)), ((b, a), (1, 1)), ((a[:1], a[1:]), (1, 1))):
        assert [result.repeats for result in compare(*sides).results] == [repeats]


def test_loss_of_0_or_less_has_no_ratio(tmp_path):
    # Of a log-likelihood, for example: it was unknown without a word about why.
    sides = [compared_run(tmp_path, [STEPS], campaign=c, losses=[-1.2]) for c in "ab"]
    made = compare(sides[:1], sides[1:], "loss", "throughput")
    assert verdicts(made) == [("unknown", "unknown"), SAME]
    assert made.results[0].why == (
        "A: loss is missing (it recorded -1.2, of which there is no ratio)"
    )


def test_one_worse_or_failed_point_makes_all_worse(tmp_path, before, campaign):
    sides = (
        campaign("a", dict.fromkeys(range(1, 5), 1)),
        campaign("b", {1: 0.8, 2: 1.2, 3: 1, 4: 1}),
    )
    made = compare(*sides)
    assert [result.status for result in made.results] == ["better", "worse", "same", "same"]
    [overall] = made.overall
    assert (overall.status, overall.why) == ("worse", "1 of 4 points are worse")
    assert overall.ratio == pytest.approx(1.01, abs=0.02)
    failed = failed_run(tmp_path, campaign="after")
    made = compare([before], [failed])
    assert (verdicts(made), made.is_worse) == ([("failed", "worse")], True)
    assert made.results[0].why == "B: rank 0 was killed"
    made = compare([failed], [before])
    assert (verdicts(made), made.is_worse) == ([("unknown", "unknown")], False)


STEPS = [0.5, 0.501, 0.499, 0.5, 0.502, 0.498, 0.5, 0.5]  # 8 images per second
ENTRY = {
    "metric": "throughput", "value": 8.0, "unit": "img/s", "tolerance": ["-5%", "+15%"],
    "cluster": "node*", "point": {"layout": "single", "batch": 4},
}  # fmt: skip


def judged(tmp_path, entries, *runs, metrics=None):
    """Returns how runs compare with the entries of a file of references."""
    path = tmp_path / "reference.yaml"
    path.write_text(yaml.safe_dump({"references": [{**ENTRY, **entry} for entry in entries]}))
    known = comparison.read_references(path)
    return compare_references(("ref", "B"), known, read_runs(runs), metrics, SETTINGS)


def test_references_have_units_clusters_and_a_tolerance_below_and_above(tmp_path):
    run = compared_run(tmp_path, [STEPS], peaks=[3 << 29])
    memory = {"metric": "memory", "unit": "MiB"}
    for entries, verdict in (
        ([{"value": 8.3}], SAME),  # 3.6 % slower than it should be
        ([{"value": 8.6}], SLOWER),  # 7 % slower
        ([{"value": 7.2}], SAME),  # 11 % faster, and 15 % are allowed
        ([{"value": 6.5}], ("faster", "better")),
        ([{**memory, "value": 1536}], SAME),
        ([{**memory, "value": 1024}], ("more", "worse")),
        ([{"value": 4.0, "point": {"batch": 4}}, {}], SAME),  # the one with more keys counts
        ([{"value": 4.0, "cluster": "elsewhere"}, {}], SAME),
        ([{"value": 4.0, "point": {"image": 64}}, {"point": {"image": 224}}], SAME),
    ):
        assert verdicts(judged(tmp_path, entries, run)) == [verdict], entries
    other = compared_run(tmp_path, [STEPS], batch=8)
    made = judged(tmp_path, [{}], run, other)
    assert made.notes == ["no reference for throughput of resnet50 224x224 single fp32 batch=8"]
    strange = compared_run(
        tmp_path, [STEPS], optimizer={"weight_decay": 0.5}, task={"name": "train"}
    )
    for runs in ([other], [strange]):
        with pytest.raises(ConfigError, match="no reference of ref fits a run of B"):
            judged(tmp_path, [{}], *runs)
    point = {**ENTRY["point"], "optimizer.weight_decay": 0.5}
    assert verdicts(judged(tmp_path, [{"point": point}], strange)) == [SAME]


MISTAKES = [
    ({"metric": "speed"}, "none of"), ({"unit": "images"}, "img/s"), ({"value": -1}, "above 0"),
    ({"value": float("nan")}, "value"), ({"tolerance": None}, "tolerance"),
    ({"tolerance": ["5"]}, "write 5%"), ({"point": "sp"}, "sp"),
    ({"clustr": "node17"}, r"yaml: unknown key reference 1.clustr; choose one of cluster"),
    ({"point": None}, r"yaml: reference 1.point=None must be keys and values"),
]  # fmt: skip
CODE = "references: !!python/object/apply:os.system ['touch made']\n"


def test_mistakes_in_a_file_of_references_are_named_and_no_code_of_it_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for change, text in MISTAKES:
        with pytest.raises(ConfigError, match=text):
            judged(tmp_path, [change])
    path = tmp_path / "x.yaml"
    for text, why in (
        *((text, "holds no references") for text in ("", "[]", "references: []", "references: 3")),
        *(
            ("references: [3]", "reference 1 must hold keys, not 3"),
            ("a: [", ""),
            ("\0", ""),
            (CODE, ""),
            (None, ""),
        ),
    ):
        path.unlink() if text is None else path.write_text(text)
        with pytest.raises(ConfigError, match=rf"x\.yaml: .*{why}"):
            comparison.read_references(path)
    assert not (tmp_path / "made").exists()


def test_written_references_fit_their_runs_and_no_others(tmp_path):
    changes = [
        {"batch": n, "parallel": {"name": layout, "tiles": tiles}}
        for n in (4, 8)
        for layout, tiles in (("single", [1, 1]), ("sp", [2, 1]))
    ]
    # Only keys that were no default were written: the reference of a default fitted all runs.
    changes += [{"optimizer": {"weight_decay": 0.5}, "task": {"name": "train"}}]
    changes += [{"parallel": {"halo": {"fuse": 2}}}]
    runs = read_runs([compared_run(tmp_path, [STEPS], **keys) for keys in changes])
    path, tolerance = tmp_path / "reference.yaml", Tolerance(-0.05, 0.15)
    made = comparison.measured_references(runs, [METRICS["throughput"]], tolerance)
    assert comparison.write_references(path, made, "hires compare\n!!evil") == len(runs)
    assert path.read_text().startswith("# Written by: hires compare !!evil\nreferences:\n")
    known = comparison.read_references(path)
    fits = [[reference.fits(run) for run in runs] for reference in known]
    assert sorted(map(sum, fits)) == [1] * len(runs)
    assert [sum(row) for row in zip(*fits, strict=True)] == [1] * len(runs)
    assert {(one.accepted(), one.cluster) for one in known} == {(tolerance, "node1")}
    longer = compared_run(tmp_path, [STEPS], steps=20, seed=7, campaign="b")
    report_runs.change(longer, inputs={"network": "edited"})
    [again] = read_runs([longer])
    assert sum(reference.fits(again) for reference in known) == 1
    losses = comparison.measured_references(runs, [METRICS["loss"]], tolerance)
    assert not any(reference.fits(again) for reference in losses)  # of a longer training
    held = comparison.measured_references([again], [METRICS["throughput"]], tolerance)
    assert comparison.write_references(path, held, "hires") == len(
        runs
    )  # it replaces and keeps the others
