"""Does an overview show what the pixels of a map are, without holding the map?"""

from __future__ import annotations

import json
import tracemalloc

import numpy as np
import pytest

from hires.core.store import file_names
from hires.engine.map_formats import MapKind
from hires.engine.prediction_maps import PredictionMaps
from hires.report import frames
from hires.report.plots import base as figures
from hires.report.plots.base import PlotData
from hires.report.read import map_overviews
from hires.report.read.map_overviews import NOT_FINITE, overviews
from hires.report.read.runs import read_runs
from tests.helpers.report_runs import report_run

CLASSES = ["_sky", "<b>road</b>", "$x$"]
FORMATS = ("tiff", "ome-tiff", "zarr")


def predicted_run(results, maps, kind, form="tiff", **changes):
    """Makes the folder of a complete prediction with some maps, named by their numbers."""
    run = report_run(results, **changes)
    folder = run / "a0" / file_names.PREDICTIONS
    files = PredictionMaps(folder, map(str, range(len(maps))), kind, form)
    for number, one in enumerate(maps):
        files.write(number, one, (slice(None),) * one.ndim)
    held = {**kind._asdict(), "shape": [*kind.shape], "dtype": np.dtype(kind.dtype).name}
    record = json.loads((run / "record.json").read_text())
    record["prediction"] = {"kind": "pixels", "images": len(maps), "map": held}
    (run / "record.json").write_text(json.dumps(record))
    return run


def read(run, most=6):
    notes = []
    [one] = read_runs([run])
    return overviews(one, most, notes), notes


def drawn(*runs):
    plots = figures.draw(PlotData(frames.load(runs)))
    return next(plot for plot in plots if plot.name == "predicted_maps")


@pytest.mark.parametrize("form", FORMATS)
def test_classes_are_counted_and_shrunk(tmp_path, monkeypatch, form):
    monkeypatch.setattr(map_overviews, "MAX_SIDE", 20)
    monkeypatch.setattr(map_overviews, "PIECE_BYTES", 300)  # many pieces
    whole = np.random.default_rng(0).integers(0, 3, (61, 45), np.uint8)
    whole[5, 8] = 255
    run = predicted_run(tmp_path, [whole], MapKind(whole.shape, np.uint8, "YX", CLASSES), form)
    [[one], notes] = read(run)
    assert not notes
    assert (one.name, one.size, one.names) == ("0", (61, 45), CLASSES)
    assert one.pixels == {**{n: (whole == n).sum() for n in range(3)}, NOT_FINITE: 1}
    assert (one.classes == whole[::4, ::4]).all()
    monkeypatch.setattr(map_overviews, "MAX_COUNTED", 100)  # only what is shown
    [[one], _] = read(run)
    assert (one.classes == whole[::4, ::4]).all()
    assert one.pixels == {n: (whole[::4, ::4] == n).sum() for n in range(3)}


@pytest.mark.parametrize("form", FORMATS)
def test_probabilities_show_the_largest_one(tmp_path, monkeypatch, form):
    monkeypatch.setattr(map_overviews, "MAX_SIDE", 20)
    monkeypatch.setattr(map_overviews, "PIECE_BYTES", 3000)
    whole = np.random.default_rng(0).random((3, 30, 45), np.float32)
    whole[1, 3, 6] = np.nan
    run = predicted_run(tmp_path, [whole], MapKind(whole.shape, np.float32, "CYX", CLASSES), form)
    [[one], _] = read(run)
    expected = whole.argmax(0)
    expected[3, 6] = NOT_FINITE
    assert (one.classes == expected[::3, ::3]).all()
    np.testing.assert_array_equal(one.shares, whole.max(0)[::3, ::3])
    assert sum(one.pixels.values()) == 30 * 45


def test_a_map_is_read_piece_by_piece(tmp_path):
    kind = MapKind((4096, 8192), np.uint8, "YX", CLASSES)
    run = predicted_run(tmp_path, [np.ones(kind.shape, np.uint8)], kind)
    [held] = read_runs([run])
    overviews(held, 1, [])  # what it imports is no part of it
    tracemalloc.start()
    try:
        [one] = overviews(held, 1, [])
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert one.pixels == {1: 2**25}
    assert one.classes.shape == (373, 745)
    assert peak_bytes < 2**24  # of a map of 32 MiB, whose classes would take 128


def test_the_plot_names_classes_shares_and_what_is_left_out(tmp_path):
    maps = [np.full((20, 30), n % 3, np.uint8) for n in range(12)]
    maps[0][:5] = 2
    run = predicted_run(tmp_path, maps, MapKind((20, 30), np.uint8, "YX", CLASSES))
    plot = drawn(run)
    assert "single: 0, 20x30 pixels: _sky 75 %, $x$ 25 %" in plot.caption
    assert "single: 5" in plot.caption  # the sixth: 10 comes after it
    assert "6 more are not drawn" in plot.caption
    svg = figures.inline(plot)
    for name in ("_sky", "&lt;b&gt;road&lt;/b&gt;", "$x$"):
        assert name in svg
    assert "<b>" not in svg
    assert svg.count("<image") == 6


def test_many_classes_share_a_colour(tmp_path):
    whole = np.arange(600).reshape(20, 30).astype(np.uint16) % 11
    names = [f"class {n}" for n in range(11)]
    probability = np.eye(11, dtype=np.float32)[whole].transpose(2, 0, 1)
    kind = MapKind(probability.shape, np.float32, "CYX", names)
    svg = figures.inline(drawn(predicted_run(tmp_path, [probability], kind, "zarr")))
    assert "4 more classes" in svg
    assert "probability of the class" in svg


def test_images_are_shown_as_they_are(tmp_path):
    image = np.random.default_rng(0).random((20, 30, 3), np.float32)
    run = predicted_run(tmp_path, [image], MapKind(image.shape, np.float32, "YXS"))
    [[one], _] = read(run)
    np.testing.assert_array_equal(one.image, image)
    assert drawn(run).caption.endswith("single: 0, 20x30 pixels.")


@pytest.mark.parametrize("damage", ["cut off", "another shape", "a folder", "huge"])
def test_a_damaged_map_is_left_out_with_a_note(tmp_path, damage):
    whole = np.ones((20, 30), np.uint8)
    run = predicted_run(tmp_path, [whole, whole], MapKind(whole.shape, np.uint8, "YX", CLASSES))
    file = run / "a0" / "predictions" / "0.tif"
    if damage == "cut off":
        file.write_bytes(file.read_bytes()[:50])
    elif damage == "a folder":
        file.unlink()
        file.mkdir()
    else:
        record = json.loads((run / "record.json").read_text())
        record["prediction"]["map"]["shape"] = [30, 30] if damage != "huge" else [10**9, 10**9]
        (run / "record.json").write_text(json.dumps(record))
    found, notes = read(run)
    assert len(found) == (1 if damage in ("cut off", "a folder") else 0)
    assert "0.tif" in str(notes[0])


@pytest.mark.parametrize(
    "held", [None, [], {"shape": [0, 3], "dtype": "uint8", "axes": "YX"}, {"shape": "x"},
             {"shape": [3], "dtype": "uint8", "axes": "YX"},
             {"shape": [3, 3], "dtype": "O", "axes": "YX"}],
)  # fmt: skip
def test_facts_that_are_none_are_a_line(tmp_path, held):
    run = predicted_run(tmp_path, [], MapKind((2, 2), np.uint8, "YX"))
    record = json.loads((run / "record.json").read_text())
    record["prediction"]["map"] = held
    (run / "record.json").write_text(json.dumps(record))
    plot = drawn(run)
    assert plot.figure is None
    assert "no run is a complete prediction of maps" in plot.missing
