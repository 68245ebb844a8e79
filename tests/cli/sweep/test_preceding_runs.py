"""Each point of a sweep begins with the weights of the run before it; each such run runs once."""

from __future__ import annotations

import pytest

from hires.cli.axes import axes_of, stored_sweep
from hires.cli.calibration import calibration_of
from hires.cli.choices import groups
from hires.cli.compose_config import Composer
from hires.cli.sweep_points import compose_all, preceding
from hires.core.errors import ConfigError
from hires.data.make_data import make_data
from hires.data.opening import open_data
from tests.helpers import commands

SAVED = ("task=train", "steps=4", "checkpoint.every=2")


def pairs(*words, first=SAVED):
    composer = Composer(None)
    points = compose_all(axes_of([*words], [], groups()), composer, None)
    return points, preceding(points, first, composer), composer


def test_points_that_differ_in_what_is_replaced_share_one_run():
    words = ("data=digits,hard", "precision=fp32,bf16", "task=evaluate", "batch=4")
    points, before, _ = pairs(*words, first=(*SAVED, "precision=fp32"))
    assert [point.words for point in before.listed] == [
        [f"data={data}", "batch=4", *SAVED, "precision=fp32"] for data in ("digits", "hard")
    ]
    names = [point.before.words[0] for point in points.listed]
    assert names == ["data=digits"] * 2 + ["data=hard"] * 2
    assert before.listed[0].config.steps == 4


def test_run_before_a_point_is_one_that_saves_its_end():
    for first, text in (
        (("steps=4",), "add --first checkpoint.at_end=always"),
        (("steps=5", "checkpoint.every=2", "checkpoint.at_end=never"), "checkpoint.at_end=never;"),
        (("task=infer", "checkpoint.at_end=always"), "add --first task=train"),
        (("steps=4,5",), "must be one KEY=VALUE"),
    ):
        with pytest.raises(ConfigError, match=text):
            pairs("batch=4", first=first)
    for saves in (
        ("epochs=5",),
        ("steps=5", "checkpoint.at_end=always"),
        ("steps=5", "checkpoint.every=2"),
        ("steps=4", "checkpoint.every=2", "checkpoint.at_end=never"),
    ):
        _, before, _ = pairs("batch=4", first=("task=train", *saves))
        assert len(before.listed) == 1


def test_table_2_2_trains_once_and_calibrates_on_no_image_that_it_evaluates(tmp_path):
    for part, count, seed in (("train", 30, 0), ("val", 6, 1)):
        make_data("textures", tmp_path / "images" / part, 3, count, (8, 8), seed)
    _, stored = stored_sweep(["experiment=table2.2"], None)
    words = (*stored.words, "data=folder", f"data.path={tmp_path / 'images'}", "quant.images=20")
    points, before, _ = pairs(*words, first=stored.options["first"])
    [trained] = [len(open_data(point.config)) for point in before.listed]
    assert [p.config.precision.name for p in points.listed] == ["fp32", "fp16", "bf16", "int8"]
    assert {len(open_data(point.config)) for point in points.listed} == {6}
    own = calibration_of(points.listed[-1].config, points.listed[-1].words)
    assert (trained, len(open_data(own)), own.data.split) == (30, 30, "train")


@pytest.mark.dist
def test_sweep_trains_evaluates_and_compares_with_the_most_exact(tmp_path):
    small = (
        "model=preact_resnet",
        "model.depth=11",
        "image=8",
        "data=digits",
        "launcher.threads=1",
    )
    words = ("sweep", *small, "batch=64", "measure.warmup=0", "precision=fp32,bf16")
    words = (*words, "task=evaluate", "data.split=validation", "campaign=c")
    first = ("task=train", "data.split=train", "precision=fp32", "steps=2", "checkpoint.every=2")
    flags = [word for one in first for word in ("--first", one)]
    out, err = commands.hires(tmp_path, *words, *flags)
    assert ("1 of 1 attempts done" in err, "2 of 2 attempts done" in err) == (True, True)
    table = out[out.rindex("Accuracy") :]
    assert {"fp32", "bf16", "difference"} <= {*table.split()}


def test_another_choice_of_a_group_leaves_out_the_keys_of_the_points_own():
    words = ("model=preact_resnet", "model.depth=11", "batch=4")
    _, before, _ = pairs(*words, first=(*SAVED, "model=unet"))
    assert [point.words for point in before.listed] == [["batch=4", *SAVED, "model=unet"]]


def test_calibration_has_no_keys_of_the_task_and_the_bands_of_its_run():
    words = ("task=predict", "predict.reduce=probability", "precision=int8", "parallel=stream")
    axes = axes_of([*words, "data=digits", "quant.images=2"], [], groups())
    points = compose_all(axes, Composer(None), None)
    own = calibration_of(points.listed[0].config, points.listed[0].words)
    assert (own.parallel.band_rows, own.parallel.name) == (None, "single")
    assert own.predict.reduce == "argmax"
