"""The right points are compared, with other runs or with references, and the verdict is right."""

from __future__ import annotations

import json

import numpy as np
import pytest
import yaml

from hires.core.errors import ConfigError
from hires.report.compare import references
from hires.report.compare.comparison import compare_references, compare_runs
from hires.report.compare.metrics import METRICS
from hires.report.compare.verdicts import Settings, Tolerance, parse_tolerance
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


def changed(run, change):
    """Changes the records of a run and of its first attempt."""
    for path in (run / "record.json", run / "a0" / "record.json"):
        values = json.loads(path.read_text())
        change(values)
        path.write_text(json.dumps(values))
    return run


@pytest.fixture
def before(tmp_path):
    return compared_run(tmp_path, [steps()], campaign="before")


@pytest.mark.parametrize(
    ("factor", "verdict"),
    [
        (1.1, ("slower", "worse")),
        (0.9, ("faster", "better")),
        (1.0, ("no difference", "same")),
    ],
)
def test_speed_is_judged(tmp_path, before, factor, verdict):
    after = compared_run(tmp_path, [steps(factor)], campaign="after")
    made = compare([before], [after], "throughput", "step_time")
    assert verdicts(made) == [verdict] * 2
    assert made.is_worse == (factor == 1.1)
    assert made.results[1].ratio == pytest.approx(factor, rel=0.02)


def test_difference_within_the_tolerance_is_none(tmp_path, before):
    after = compared_run(tmp_path, [steps(1.03, 400)], campaign="after")
    made = compare([before], [after], "throughput", "step_time")
    assert verdicts(made) == [("no difference", "same")] * 2
    tight = Settings(parse_tolerance("-1%,+50%"))
    assert verdicts(compare([before], [after], settings=tight)) == [("slower", "worse")]
    for said in ("5", "x%", "-5%", "5%,5%", "+5%,-5%", "-200%,5%", "", "1%,2%,3%"):
        with pytest.raises(ConfigError, match="write 5%"):
            parse_tolerance(said)


def test_sides_with_other_batches_are_compared_per_image_and_not_by_memory(tmp_path, before):
    # A step of 4 images was put beside one of 2, and called slower.
    after = compared_run(tmp_path, [steps(0.5)], campaign="after", batch=2)
    made = compare([before], [after], "throughput", "step_time", "memory", "loss")
    assert verdicts(made)[:2] == [("no difference", "same")] * 2
    assert made.results[1].metric.name == "step_time_per_image"
    assert made.results[1].a == pytest.approx(0.5 / 4, rel=0.02)
    assert verdicts(made)[2:] == [("not comparable", "unknown")] * 2
    assert any("per image" in note for note in made.notes)
    assert "other batches" in made.results[2].sentence()
    failed = failed_run(tmp_path, campaign="failed", batch=8)
    assert compare([before], [failed], "memory").is_worse


def test_memory_and_loss_of_one_run_each_are_judged_by_the_tolerance_alone(tmp_path, before):
    after = compared_run(tmp_path, [steps()], peaks=[110 << 20], losses=[1.8], campaign="after")
    made = compare([before], [after], "memory", "loss")
    assert verdicts(made) == [("more", "worse"), ("lower", "better")]
    assert made.results[0].interval is None
    assert "no interval" in made.results[0].why
    nan = compared_run(tmp_path, [steps()], losses=[None], campaign="nan")
    assert verdicts(compare([before], [nan], "loss")) == [("higher", "worse")]
    assert verdicts(compare([nan], [before], "loss")) == [("unknown", "unknown")]


def test_points_are_paired_by_config_and_the_rest_is_told(tmp_path):
    def campaign(name, *batches, **keys):
        return [compared_run(tmp_path, [steps()], campaign=name, batch=n, **keys) for n in batches]

    a = campaign("a", 1, 2, 4)
    made = compare(a, campaign("b", 4, 2, 8))
    assert [result.point.rpartition(" ")[2] for result in made.results] == ["batch=2", "batch=4"]
    assert made.notes[:2] == [
        "only in A: resnet50 224x224 single fp32 batch=1",
        "only in B: resnet50 224x224 single fp32 batch=8",
    ]
    # A key in which the sides differ keeps no pair apart.
    made = compare(a[1:], campaign("c", 2, 4, precision={"name": "bf16"}))
    assert [result.point for result in made.results] == [
        "resnet50 224x224 single fp32->bf16 batch=2",
        "resnet50 224x224 single fp32->bf16 batch=4",
    ]
    assert [(d.what, d.a, d.b) for d in made.config] == [("precision.name", "fp32", "bf16")]
    with pytest.raises(ConfigError, match=r"they differ in batch \(1, 2 in A, 8, 9 in B\)"):
        compare(a[:2], campaign("d", 8, 9))
    with pytest.raises(ConfigError, match=r"differ in image \(\[224,224\] in A, \[96,96\] in B\)"):
        compare(a[:1], campaign("e", 1, image=96))


def test_seeds_are_repeats_and_one_that_a_side_lacks_counts_nowhere(tmp_path):
    def seeds(name, factors):
        return [
            compared_run(tmp_path, [steps(factor)], campaign=name, seed=seed)
            for seed, factor in factors.items()
        ]

    a = seeds("a", {0: 1, 1: 1, 2: 1})
    [result] = compare(a, seeds("b", {0: 1.1, 1: 1.1, 2: 1.1})).results
    assert (result.why, result.repeats, result.status) == ("3 pairs of seeds", (3, 3), "worse")
    [result] = compare(a, seeds("c", {3: 1.1, 4: 1.1, 5: 1.1})).results
    assert (result.why, result.status) == ("3 and 3 repeats", "worse")
    # The ratio was of the shared seeds and the columns of all: B looked slower and was faster.
    made = compare(seeds("d", {0: 0.1, 1: 1.25, 2: 1.25}), seeds("e", {1: 1, 2: 1}))
    [result] = made.results
    assert result.repeats == (2, 2)
    assert result.b / result.a == pytest.approx(result.ratio)
    assert result.ratio == pytest.approx(1.25, rel=0.02)
    told = "seed 0 left out, because only one side has it: resnet50 224x224 single fp32"
    assert told in made.notes


def test_one_worse_or_failed_point_makes_all_worse(tmp_path, before):
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
    failed = failed_run(tmp_path, campaign="after")
    made = compare([before], [failed])
    assert verdicts(made) == [("failed", "worse")]
    assert made.results[0].why == "B: rank 0 was killed"
    assert made.is_worse
    made = compare([failed], [before])
    assert (verdicts(made), made.is_worse) == ([("unknown", "unknown")], False)


def test_damaged_runs_are_unknown_and_keep_no_others_apart(tmp_path, before):
    after = compared_run(tmp_path, [steps()], campaign="after")
    # Its missing keys counted as second values of a side, so no run had a partner.
    broken = compared_run(tmp_path, [steps()], campaign="after", seed=7)
    (broken / "config.yaml").write_text("[")
    made = compare([before], [broken, after])
    assert verdicts(made) == [("no difference", "same")]
    assert any("config.yaml" in note for note in made.notes)
    with pytest.raises(ConfigError, match=r"no run of B is the same point as one of A"):
        compare([before], [broken])

    def hostile(values):
        values |= {"samples": [{"step": [], "step_s": "x"}, 7, {"step_s": -1}], "memory": "none"}
        values |= {"loss": [], "provenance": 3}

    made = compare([before], [changed(after, hostile)], *METRICS)
    assert {result.status for result in made.results} == {"unknown"}
    json.dumps(made.to_dict(), allow_nan=False)


STEPS = [0.5, 0.501, 0.499, 0.5, 0.502, 0.498, 0.5, 0.5]  # 8 images per second
ENTRY = {
    "metric": "throughput",
    "value": 8.0,
    "unit": "img/s",
    "tolerance": ["-5%", "+15%"],
    "cluster": "node*",
    "point": {"layout": "single", "batch": 4},
}


@pytest.fixture
def file(tmp_path):
    """Returns a function that writes a file of references."""

    def write(*entries):
        path = tmp_path / "reference.yaml"
        path.write_text(yaml.safe_dump({"references": list(entries)}))
        return path

    return write


def judged(path, *runs, metrics=None):
    known = references.read(path)
    made = compare_references(("ref", "B"), known, read_runs(runs), metrics, SETTINGS)
    return verdicts(made)


def test_references_have_units_clusters_and_a_tolerance_below_and_above(tmp_path, file):
    same, run = ("no difference", "same"), compared_run(tmp_path, [STEPS], peaks=[3 << 29])
    for value, verdict in (
        (8.3, same),  # 3.6 % slower than it should be
        (8.6, ("slower", "worse")),  # 7 % slower
        (7.2, same),  # 11 % faster, and 15 % are allowed
        (6.5, ("faster", "better")),
    ):
        assert judged(file({**ENTRY, "value": value}), run) == [verdict]
    time = {**ENTRY, "metric": "step_time", "unit": "ms", "value": 500}
    memory = {**ENTRY, "metric": "memory", "unit": "GiB", "value": 1.5}
    assert judged(file(time, memory), run) == [same] * 2
    assert judged(file({**memory, "value": 1.0}), run) == [("more", "worse")]
    path = file({**ENTRY, "cluster": "gpu*", "value": 100.0}, {**ENTRY, "value": 4.0}, ENTRY)
    assert judged(path, run) == [("faster", "better")]  # the first one of the cluster counts
    other = compared_run(tmp_path / "o", [STEPS], origin={"host": "gpu7"})
    assert judged(path, other) == [("slower", "worse")]
    # The first entry that fitted counted, and the first one here fits both runs.
    run = compared_run(tmp_path, [STEPS], optimizer={"momentum": 0.5})
    momentum = {**ENTRY["point"], "optimizer.momentum": 0.5}
    path = file({**ENTRY, "value": 4.0}, {**ENTRY, "point": momentum})
    assert judged(path, run) == [same]


def test_runs_without_a_reference_are_told_and_if_none_has_one_it_is_an_error(tmp_path, file):
    runs = [compared_run(tmp_path, [STEPS], batch=n) for n in (4, 8)]
    known = references.read(file(ENTRY))
    made = compare_references(("ref", "B"), known, read_runs(runs), None, SETTINGS)
    assert made.notes == ["no reference for throughput of resnet50 224x224 single fp32 batch=8"]
    elsewhere = {**ENTRY, "cluster": "elsewhere"}
    with pytest.raises(ConfigError, match="no reference of ref fits a run of B"):
        judged(file(elsewhere), *runs)
    with pytest.raises(ConfigError, match="no reference"):
        judged(file(ENTRY), *runs, metrics=[METRICS["loss"]])


MISTAKES = [
    ({"metric": "speed"}, "entry 1: metric 'speed' is none of throughput"),
    ({"unit": "images"}, "throughput is in img/s"),
    ({"value": float("nan")}, "it must be above 0"),
    ({"value": -1}, "it must be above 0"),
    ({"tolerance": None}, "write 5%"),
    ({"point": "sp"}, "write `point: {layout: sp"),
    ({"host": "a"}, "its keys are cluster, metric"),
    ({"others": "any"}, "`others: default`"),
]
NO_FILES = ["", "[]", "references: 3", "a: [", "\0"]
CODE = "references: !!python/object/apply:os.system ['touch made']\n"


def test_mistakes_in_a_file_of_references_are_named_and_no_code_of_it_runs(
    tmp_path, file, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    for change, told in MISTAKES:
        with pytest.raises(ConfigError) as caught:
            references.read(file({**ENTRY, **change}))
        assert told in str(caught.value)
    for text in (*NO_FILES, CODE):
        (tmp_path / "x.yaml").write_text(text)
        with pytest.raises(ConfigError, match=r"x\.yaml"):
            references.read(tmp_path / "x.yaml")
    assert not (tmp_path / "made").exists()
    with pytest.raises(ConfigError, match="No such file"):
        references.read(tmp_path / "none.yaml")


def test_written_references_fit_their_runs_and_no_others(tmp_path):
    runs = [
        compared_run(tmp_path, [STEPS], batch=n, parallel={"name": layout, "tiles": tiles})
        for n in (4, 8)
        for layout, tiles in (("single", [1, 1]), ("sp", [2, 1]))
    ]
    # Only keys that were no default were written: the reference of 0.9 fitted the run of 0.5.
    runs += [
        compared_run(tmp_path / "m", [STEPS], optimizer={"momentum": m}, steps=n)
        for m, n in ((0.9, 10), (0.5, 10), (0.9, 20))
    ]
    path = tmp_path / "reference.yaml"
    for part in (runs[:4], runs[4:]):
        tolerance = Tolerance(-0.05, 0.15)
        made = references.measured(read_runs(part), [METRICS["throughput"]], tolerance)
        path.unlink(missing_ok=True)
        assert references.write(path, made, "hires compare\n!!evil") == len(part)
        assert path.read_text().startswith("# Written by: hires compare !!evil\nreferences:\n")
        known = references.read(path)
        fits = [[reference.fits(run) for run in read_runs(part)] for reference in known]
        assert fits == [[row == column for column in range(len(part))] for row in range(len(part))]
        assert {(one.tolerance, one.cluster) for one in known} == {(tolerance, "node1")}
        assert judged(path, *part) == [("no difference", "same")] * len(part)
    own = known[1]
    again = references.Reference(own.metric, 9.0, own.tolerance, own.point, own.cluster, own.strict)
    assert references.write(path, [again], "hires") == 3  # it replaces and keeps the rest
    assert [round(reference.value) for reference in references.read(path)] == [8, 9, 8]
    [plain] = read_runs([compared_run(tmp_path / "p", [STEPS], task={"name": "train"})])
    [default] = references.measured([plain], [METRICS["throughput"]], tolerance)
    path.unlink()
    references.write(path, [default], "hires")
    [known] = references.read(path)
    assert known.fits(plain)
    path.write_text(path.read_text().replace("others: default", ""))
    [any_other] = references.read(path)
    for change, fits in (
        ({"optimizer": {"momentum": 0.5}}, False),
        ({"parallel": {"halo": {"fuse": 2}}}, False),
        ({"steps": 20, "seed": 7, "campaign": "b"}, True),
    ):
        keys = {"task": {"name": "train"}, **change}
        [other] = read_runs([compared_run(tmp_path / "p", [STEPS], **keys)])
        assert (known.fits(other), any_other.fits(other)) == (fits, True)
