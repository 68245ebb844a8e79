"""Each point of a sweep begins with the weights of the run before it, and each such run runs once;
stored figures and tables have the published sizes."""

from __future__ import annotations

import json

import pytest

from hires.cli.calibration import calibration_of
from hires.cli.compose.choices import groups
from hires.cli.compose.compose_config import Composer
from hires.cli.sweep.axes import axes_of, stored_sweep
from hires.cli.sweep.preceding_runs import begin_with, lacking, preceding
from hires.cli.sweep.sweep_points import Where, compose_all
from hires.core.errors import ConfigError
from hires.data.source import open_data
from hires.data.textures import make_folder
from tests.helpers import commands

SAVED = ("task=train", "steps=4", "checkpoint.every=2")


def made(*words, first=SAVED, where=None):
    composer = Composer(None)
    kept = where and Where(where, groups())
    points = compose_all(axes_of([*words], [], groups()), composer, kept)
    return points, preceding(points, first, composer), composer


def test_points_that_differ_in_what_is_replaced_share_one_run():
    words = ("data=digits,hard", "precision=fp32,bf16", "task=evaluate", "batch=4")
    points, before, _ = made(*words, first=(*SAVED, "precision=fp32"))
    assert [point.words for point in before.listed] == [
        [f"data={data}", "batch=4", *SAVED, "precision=fp32"] for data in ("digits", "hard")
    ]
    assert [point.before.words[0] for point in points.listed] == ["data=digits"] * 2 + [
        "data=hard"
    ] * 2
    assert [axis.keys for axis in before.axes] == [("data",), ("batch",)]
    assert before.listed[0].config.steps == 4


@pytest.mark.parametrize(
    ("first", "told"),
    [
        (("steps=4",), "add --first checkpoint.every=4"),
        (("steps=5", "checkpoint.every=2"), "add --first checkpoint.every=5"),
        (("steps",), "must be one KEY=VALUE"),
        (("steps=4,5",), "must be one KEY=VALUE"),
    ],
)
def test_run_before_a_point_is_one_that_saves_its_end(first, told):
    with pytest.raises(ConfigError, match=told):
        made("batch=4", first=first)


def test_point_begins_with_the_weights_of_its_complete_run(tmp_path):
    points, before, composer = made("batch=4,8")
    for number, point in enumerate(before.listed):
        point.path = tmp_path / f"run {number}"
        point.path.mkdir()
    assert lacking(points) == [point.path for point in before.listed]
    record = {"schema": 1, "state": "done", "attempt": 0}
    for point in before.listed:
        (point.path / "record.json").write_text(json.dumps(record))
    assert lacking(points) == []
    begin_with(points, composer)
    assert [p.config.weights for p in points.listed] == [str(p.path) for p in before.listed]
    assert points.listed[0].words[-1] == f"weights={tmp_path}/run 0"


def table_2_2(*typed):
    _, stored = stored_sweep(["experiment=table2.2"], None)
    points, before, _ = made(*stored.words, *typed, first=stored.options["first"])
    return points, before


def test_table_2_2_trains_once_and_calibrates_on_no_image_that_it_evaluates(tmp_path):
    for part, count, seed in (("train", 300, 0), ("val", 60, 1)):
        make_folder(tmp_path / "images" / part, 3, count, (8, 8), seed)
    points, before = table_2_2("data=folder", f"data.path={tmp_path / 'images'}")
    [trained] = [len(open_data(point.config)) for point in before.listed]
    assert [p.config.precision.name for p in points.listed] == ["fp32", "fp16", "bf16", "int8"]
    assert {len(open_data(point.config)) for point in points.listed} == {60}
    own = calibration_of(points.listed[-1].config, points.listed[-1].words)
    assert (trained, len(open_data(own)), own.data.split) == (300, 300, "train")


@pytest.mark.dist
def test_sweep_trains_evaluates_and_compares_with_the_most_exact(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    small = ("model=preact_resnet", "model.n=1", "image=8", "data=digits", "launcher.threads=1")
    words = ("sweep", *small, "batch=64", "measure.warmup=0", "precision=fp32,bf16")
    words = (*words, "task=evaluate", "data.split=validation", "campaign=c")
    first = ("task=train", "data.split=train", "precision=fp32", "steps=2", "checkpoint.every=2")
    flags = [word for one in first for word in ("--first", one)]
    out, err = commands.hires(tmp_path, *words, *flags)
    assert "1 of 1 attempts done" in err
    assert "2 of 2 attempts done" in err
    table = out[out.rindex("Accuracy") :]
    assert table.count("digits, validation") == 2
    again, _ = commands.hires(tmp_path, *words, *flags, "--json")  # nothing runs twice
    facts = json.loads(again)
    assert [point["state"] for point in facts["points"]] == ["done", "done"]
    assert [point["state"] for point in facts["first"]["points"]] == ["done"]
