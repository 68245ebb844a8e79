"""Does each point of a sweep get the run that goes before it, and each such run run once?"""

from __future__ import annotations

import json
from pathlib import Path

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
from tests.helpers.cifar10_files import cifar10_folder
from tests.helpers.commands import hires

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


def test_last_word_of_a_key_counts():
    _, before, _ = made("batch=4", first=(*SAVED, "steps=6"))
    assert before.listed[0].words == ["batch=4", "task=train", "steps=6", "checkpoint.every=2"]


def test_keys_of_a_replaced_group_go_with_it():
    _, before, _ = made("parallel=sp", "parallel.tiles=[1,2]", first=(*SAVED, "parallel=single"))
    assert before.listed[0].words == [*SAVED, "parallel=single"]


@pytest.mark.parametrize("words", [("steps=4",), ("steps=5", "checkpoint.every=2")])
def test_run_that_saves_nothing_at_its_end_is_refused(words):
    with pytest.raises(ConfigError, match=r"add --first checkpoint\.every=[45]"):
        made("batch=4", first=words)


@pytest.mark.parametrize("word", ["steps", "steps=4,5"])
def test_word_that_is_no_single_override_is_refused(word):
    with pytest.raises(ConfigError, match="must be one KEY=VALUE"):
        made("batch=4", first=(word,))


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
    first, where = (stored.options[name] for name in ("first", "where"))
    points, before, _ = made(*stored.words, *typed, first=first, where=where)
    return points, before


@pytest.mark.slow
def test_table_2_2_trains_once_for_each_data_set():
    points, before = table_2_2()
    assert len(points.listed) == 5 * len(before.listed) == 15
    arithmetic = [(p.config.precision.name, p.config.quant.weights) for p in points.listed[:5]]
    assert arithmetic == [
        ("fp32", "int8"), ("fp16", "int8"), ("bf16", "int8"), ("int8", "int8"), ("int8", "int4"),
    ]  # fmt: skip
    assert {point.config.data.split for point in before.listed} == {"train"}
    assert {point.config.data.split for point in points.listed} == {"validation"}


@pytest.mark.slow
def test_table_2_2_calibrates_on_no_image_that_it_evaluates():
    points, _ = table_2_2()
    quantised = [one for one in points.listed if one.config.precision.name == "int8"]
    assert len(quantised) == 6
    for point in quantised:
        own = calibration_of(point.config, point.words)
        assert own.data.split == "train"
        calibrated, evaluated = (
            {source.name(index) for index in range(len(source))}
            for source in (open_data(own), open_data(point.config))
        )
        assert len(calibrated) >= own.quant.images
        assert len(evaluated) > 1000
        assert calibrated.isdisjoint(evaluated)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("data", ["cifar10", "folder"])
def test_table_2_2_takes_data_of_a_local_path(tmp_path, data):
    if data == "cifar10":
        cifar10_folder(tmp_path / "images", each=60)
    else:
        make_folder(tmp_path / "images" / "train", 3, 300, (8, 8), 0)
        make_folder(tmp_path / "images" / "val", 3, 60, (8, 8), 1)
    points, before = table_2_2(f"data={data}", f"data.path={tmp_path / 'images'}")
    assert len(points.listed) == 5
    [trained] = [len(open_data(point.config)) for point in before.listed]
    assert trained == 300
    assert {len(open_data(point.config)) for point in points.listed} == {60}
    last = points.listed[-1]
    assert len(open_data(calibration_of(last.config, last.words))) == 300


@pytest.mark.slow
@pytest.mark.dist
def test_sweep_trains_evaluates_and_compares_with_the_most_exact(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    small = ("model=preact_resnet", "model.n=1", "image=8", "data=digits", "launcher.threads=1")
    words = ("sweep", *small, "batch=64", "measure.warmup=0", "precision=fp32,bf16")
    words = (*words, "task=evaluate", "data.split=validation", "campaign=c")
    first = ("task=train", "data.split=train", "precision=fp32", "steps=2", "checkpoint.every=2")
    flags = [word for one in first for word in ("--first", one)]
    out, err = hires(tmp_path, *words, *flags)
    assert "1 of 1 attempts done" in err
    assert "2 of 2 attempts done" in err
    table = out[out.rindex("Accuracy") :]
    assert table.count("digits, validation") == 2
    again, _ = hires(tmp_path, *words, *flags, "--json")  # nothing runs twice
    facts = json.loads(again)
    assert [point["state"] for point in facts["points"]] == ["done", "done"]
    assert [point["state"] for point in facts["first"]["points"]] == ["done"]
    low, exact = (Path(point["path"]) for point in sorted(facts["points"], key=lambda p: p["run"]))
    answer, _ = hires(tmp_path, "compare", str(exact), str(low), "--metric", "accuracy", code=None)
    assert "A and B predict the same class for" in answer
    assert "of 179 images" in answer
    assert "the accuracy of B less that of A is" in answer
