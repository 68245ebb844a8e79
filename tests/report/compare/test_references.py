"""Do references say what they should, to the runs that they are about, on the right machine?"""

from __future__ import annotations

import pytest
import yaml

from hires.core.errors import ConfigError
from hires.report.compare import references
from hires.report.compare.comparison import compare_references
from hires.report.compare.metrics import METRICS
from hires.report.compare.verdicts import Settings, Tolerance, parse_tolerance
from hires.report.read.runs import read_runs
from tests.helpers.compared_runs import compared_run

SETTINGS = Settings(parse_tolerance("5%"))
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
    return [(result.verdict, result.status) for result in made.results]


@pytest.mark.parametrize(
    ("value", "verdict"),
    [
        (8.0, ("no difference", "same")),
        (8.3, ("no difference", "same")),  # 3.6 % slower than it should be
        (8.6, ("slower", "worse")),  # 7 % slower
        (7.2, ("no difference", "same")),  # 11 % faster, and 15 % are allowed
        (6.5, ("faster", "better")),
    ],
)
def test_tolerance_differs_below_and_above(tmp_path, file, value, verdict):
    run = compared_run(tmp_path, [STEPS])
    assert judged(file({**ENTRY, "value": value}), run) == [verdict]


def test_units_are_converted(tmp_path, file):
    run = compared_run(tmp_path, [STEPS], peaks=[3 << 29])
    time = {**ENTRY, "metric": "step_time", "unit": "ms", "value": 500}
    memory = {**ENTRY, "metric": "memory", "unit": "GiB", "value": 1.5}
    assert judged(file(time, memory), run) == [("no difference", "same")] * 2
    assert judged(file({**memory, "value": 1.0}), run) == [("more", "worse")]


def test_first_reference_of_the_cluster_counts(tmp_path, file):
    path = file({**ENTRY, "cluster": "gpu*", "value": 100.0}, {**ENTRY, "value": 4.0}, ENTRY)
    run = compared_run(tmp_path, [STEPS])
    assert judged(path, run) == [("faster", "better")]
    other = compared_run(tmp_path / "o", [STEPS], origin={"host": "gpu7"})
    assert judged(path, other) == [("slower", "worse")]


@pytest.mark.parametrize(
    "point",
    [
        {"image": 224},
        {"image": "224x224"},
        {"image": [224, 224]},
        {"parallel.tiles": [1, 1]},
        {"data.shuffle": True},
        {"model.target": None},
        {"model": "resnet50", "precision": "fp32", "ranks": 2},
        {},
    ],
)
def test_point_names_columns_and_keys(tmp_path, file, point):
    run = compared_run(tmp_path, [STEPS])
    assert judged(file({**ENTRY, "point": point}), run) == [("no difference", "same")]


def test_runs_without_a_reference_are_told_and_if_none_has_one_it_is_an_error(tmp_path, file):
    runs = [compared_run(tmp_path, [STEPS], batch=n) for n in (4, 8)]
    known = references.read(file(ENTRY))
    made = compare_references(("ref", "B"), known, read_runs(runs), None, SETTINGS)
    assert len(made.results) == 1
    assert made.notes == ["no reference for throughput of resnet50 224x224 single fp32 batch=8"]
    elsewhere = {**ENTRY, "cluster": "elsewhere"}
    point = {"point": {"layout": "sp", "batch": 5}}
    with pytest.raises(ConfigError, match="no reference of ref fits a run of B") as caught:
        judged(file(elsewhere | point, elsewhere), *runs)
    assert str(caught.value).endswith(
        "batch=4; of the nearest reference cluster elsewhere is not node1"
    )
    with pytest.raises(ConfigError, match="no reference"):
        judged(file(ENTRY), *runs, metrics=[METRICS["loss"]])


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"metric": "speed"}, "entry 1 has metric 'speed'; choose one of throughput"),
        ({"unit": "images"}, "throughput is in img/s"),
        ({"value": "fast"}, "it must be above 0"),
        ({"value": float("nan")}, "it must be above 0"),
        ({"value": -1}, "it must be above 0"),
        ({"tolerance": ["5%"] * 3}, "write 5%"),
        ({"tolerance": None}, "write 5%"),
        ({"point": "sp"}, "write it as {layout: sp"),
        ({"host": "a"}, "unknown key 'host'"),
        ({"others": "any"}, "entry 1 has others 'any'; it is default, or left out"),
    ],
)
def test_mistakes_are_named(file, change, told):
    with pytest.raises(ConfigError) as caught:
        references.read(file({**ENTRY, **change}))
    assert told in str(caught.value)


@pytest.mark.parametrize("text", ["", "[]", "references: 3", "references: []", "a: [", "\0", "{"])
def test_file_that_is_none(tmp_path, text):
    path = tmp_path / "x.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"x\.yaml"):
        references.read(path)
    with pytest.raises(ConfigError, match="No such file"):
        references.read(tmp_path / "none.yaml")


def test_no_object_is_made_of_a_tag(tmp_path):
    path = tmp_path / "x.yaml"
    path.write_text("references: !!python/object/apply:os.system ['touch made']\n")
    with pytest.raises(ConfigError, match="cannot be read"):
        references.read(path)


def test_what_was_written_fits_its_runs_and_no_others(tmp_path):
    runs = [
        compared_run(tmp_path, [STEPS], batch=n, parallel={"name": layout, "tiles": tiles})
        for n in (4, 8)
        for layout, tiles in (("single", [1, 1]), ("sp", [2, 1]))
    ]
    tolerance = Tolerance(-0.05, 0.15)
    made = references.measured(read_runs(runs), [METRICS["throughput"]], tolerance)
    path = tmp_path / "reference.yaml"
    assert references.write(path, made, "hires compare\n!!evil") == 4
    assert path.read_text().startswith("# Written by: hires compare !!evil\nreferences:\n")
    known = references.read(path)
    fits = [[not reference.misfits(run) for run in read_runs(runs)] for reference in known]
    assert fits == [[row == column for column in range(4)] for row in range(4)]
    assert [reference.tolerance for reference in known] == [Tolerance(-0.05, 0.15)] * 4
    assert known[0].cluster == "node1"
    assert judged(path, *runs) == [("no difference", "same")] * 4


def test_run_is_judged_by_the_reference_that_says_most_of_it(tmp_path, file):
    # The first entry that fitted counted, and the first one here fits both runs.
    run = compared_run(tmp_path, [STEPS], optimizer={"momentum": 0.5})
    momentum = {**ENTRY["point"], "optimizer.momentum": 0.5}
    path = file({**ENTRY, "value": 4.0}, {**ENTRY, "point": momentum})
    assert judged(path, run) == [("no difference", "same")]


def test_what_tells_points_apart_is_written_even_if_it_is_the_default(tmp_path):
    # Only keys that were no default were written: the reference of 0.9 fitted the run of 0.5.
    runs = read_runs(
        compared_run(tmp_path, [STEPS], optimizer={"momentum": m}, steps=n)
        for m, n in ((0.9, 10), (0.5, 10), (0.9, 20))
    )
    made = references.measured(runs, [METRICS["throughput"]], parse_tolerance("5%"))
    assert all({"optimizer.momentum", "steps"} <= set(reference.point) for reference in made)
    fits = [[not reference.misfits(run) for run in runs] for reference in made]
    assert fits == [[row == column for column in range(3)] for row in range(3)]
    assert references.write(tmp_path / "r.yaml", made, "hires") == 3


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"optimizer": {"momentum": 0.5}}, "optimizer.momentum is 0.5, not its default"),
        ({"parallel": {"halo": {"fuse": 2}}}, "parallel.halo.fuse is 2, not its default"),
        ({"steps": 20, "seed": 7, "campaign": "b"}, None),
    ],
)
def test_reference_of_defaults_is_none_of_a_run_with_other_values(tmp_path, change, told):
    task = {"task": {"name": "train"}}
    runs = read_runs([compared_run(tmp_path, [STEPS], **task)])
    made = references.measured(runs, [METRICS["throughput"]], parse_tolerance("5%"))
    path = tmp_path / "r.yaml"
    references.write(path, made, "hires")
    assert yaml.safe_load(path.read_text())["references"][0]["others"] == "default"
    [known] = references.read(path)
    [other] = read_runs([compared_run(tmp_path, [STEPS], **(task | change))])
    assert not known.misfits(runs[0])
    assert (not known.misfits(other)) is (told is None)
    assert known.misfits(other) == ([told] if told else [])
    path.write_text(path.read_text().replace("others: default", ""))
    assert not references.read(path)[0].misfits(other)


def test_writing_again_replaces_and_keeps_the_rest(tmp_path, file):
    path = file({**ENTRY, "cluster": "other"}, ENTRY)
    [_, own] = references.read(path)
    again = references.Reference(own.metric, 9.0, own.tolerance, own.point, own.cluster)
    assert references.write(path, [again], "hires") == 2
    assert [reference.value for reference in references.read(path)] == [8.0, 9.0]
