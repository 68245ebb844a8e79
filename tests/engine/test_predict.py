"""A prediction writes every sample and pixel once, as one process would, in every layout."""

from __future__ import annotations

import csv
import dataclasses
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import tifffile
import torch
import zarr

from hires.core.store import file_names, records
from hires.data.image_format import normalised, open_image
from hires.data.opening import open_data
from hires.engine.predict import Predictor, class_type
from hires.report.plots.predicted_maps import overviews
from hires.report.runs import read_runs
from tests.helpers.evaluations import EDSR, GEMS, UNET, evaluation, plain, prediction
from tests.helpers.jobs import run_folders
from tests.helpers.layouts import config_of, plan_of
from tests.helpers.ranks import run_ranks
from tests.helpers.saved import attempt, killed_attempt, run_folder

pytestmark = pytest.mark.dist

RESNET = {"model": {"name": "preact_resnet", "depth": 11, "classes": 4}, "image": [19, 22]}
ARGMAX = {"predict": {"reduce": "argmax"}}


def table_of(path: Path, number: int = 0) -> list[dict[str, str]]:
    text = (file_names.attempt_dir(path, number) / "predictions.csv").read_text()
    return [*csv.DictReader(text.splitlines())]


def test_gems_writes_the_classes_of_plain_torch_as_text_and_as_parquet(tmp_path: Path):
    configs = [
        prediction(**RESNET, parallel=GEMS, predict={"reduce": "probability", "table": form})
        for form in ("csv", "parquet")
    ]
    paths = [run_folder(tmp_path, config) for config in configs]
    run_ranks(run_folders, 3, [*map(str, paths)])
    outputs, _ = plain(configs[0])
    names, rows = open_data(configs[0]).class_names, table_of(paths[0])
    assert [row["id"] for row in rows] == [str(i) for i in range(11)]
    for row, output in zip(rows, outputs, strict=True):
        shares = output.softmax(0)
        assert int(row["class"]) == int(shares.argmax())
        assert row["name"] == names[int(shares.argmax())]
        assert float(row["probability"]) == pytest.approx(float(shares.max()), abs=1e-10)
        assert [float(row[f"p_{n}"]) for n in names] == pytest.approx(shares.tolist(), abs=1e-10)
    facts = records.read_record(paths[0])["prediction"]
    assert [facts[k] for k in ("kind", "images", "not_finite")] == ["classes", 11, 0]
    assert facts["table"] == "a0/predictions.csv"
    frame = pd.read_parquet(paths[1] / "a0" / "predictions.parquet")
    assert [*frame.columns] == [*rows[0]]
    assert frame["class"].tolist() == [int(row["class"]) for row in rows]
    for name in frame.columns[3:]:
        assert frame[name].tolist() == [float(row[name]) for row in rows]
    assert records.read_record(paths[1])["prediction"]["table"] == "a0/predictions.parquet"


def test_tiles_write_the_maps_of_plain_torch_in_every_format(tmp_path: Path):
    # The maps of the lower levels, 10x7 and 5x4, divide unevenly; the last images are EDSR's.
    unet, edsr = {**UNET, "image": [20, 12]}, {**EDSR, "image": [11, 9]}
    tiles = {"parallel": {"tiles": [2, 2]}}
    formats = {
        form: prediction(**unet, **tiles, predict={"reduce": "probability", "format": form})
        for form in ("ome-tiff", "zarr")
    }
    configs = {
        **formats,
        "classes": prediction(**unet, **ARGMAX, **tiles),
        "images": prediction(**edsr, **tiles),
        "zarr images": prediction(**edsr, **tiles, predict={"format": "zarr"}),
    }
    paths = {name: run_folder(tmp_path, config) for name, config in configs.items()}
    run_ranks(run_folders, 4, [*map(str, paths.values())])
    files = {
        name: [path / "a0" / row["file"] for row in table_of(path)] for name, path in paths.items()
    }
    for name, kind in (("ome-tiff", np.float32), ("classes", np.uint8), ("images", np.float32)):
        rows = table_of(paths[name])
        assert [row["file"] for row in rows] == [f"../predictions/{i}.ome.tif" for i in range(11)]
        assert {row["not_finite"] for row in rows} == {"0"}
        assert {file.name for file in (paths[name] / "predictions").iterdir()} == {
            f"{i}.ome.tif" for i in range(11)
        }
        assert tifffile.imread(files[name][3]).dtype == kind
    for i, output in enumerate(plain(configs["classes"])[0]):
        assert (tifffile.imread(files["classes"][i]) == output.argmax(0).numpy()).all()
        shares = tifffile.imread(files["ome-tiff"][i])
        assert shares.shape == (4, 20, 12)
        np.testing.assert_allclose(shares, output.softmax(0).numpy(), atol=1e-6)
        array = zarr.open_array(files["zarr"][i], mode="r")
        assert array[:].tobytes() == shares.tobytes()
        assert array.metadata.dimension_names == ("c", "y", "x")
        assert len(array.attrs["classes"]) == 4
    for i, output in enumerate(plain(configs["images"])[0]):
        image = open_image(files["images"][i])
        assert (image.size, image.colours) == ((22, 18), 3)
        again = normalised(image.read((0, 22), (0, 18)), image.peak, 3)  # as data=pairs reads it
        image.close()
        np.testing.assert_allclose(again, output.clamp(-2, 2).numpy(), atol=1e-6)
        read = zarr.open_array(files["zarr images"][i], mode="r")[:]
        assert read.tobytes() == tifffile.imread(files["images"][i]).tobytes()
    for form in ("ome-tiff", "zarr"):
        assert records.read_record(paths[form])["prediction"]["format"] == form
        [run] = read_runs([paths[form]])
        shown = overviews(run, 6, notes := [])  # in a report
        assert ([one.name for one in shown], notes) == ([*"012345"], [])
        assert all(one.shares.shape == (20, 12) and len(one.names) == 4 for one in shown)


SIZES = [(20, 12), (33, 45), (7, 5), (20, 30), (9, 12), (1, 50)]
"""Rows and columns of images: that of the config, larger, smaller, one dimension of it; a line."""


def scenes_of(folder: Path) -> dict[str, Any]:
    folder.mkdir()
    random = np.random.default_rng(0)
    for number, size in enumerate(SIZES):
        pixels = random.integers(0, 255, (*size, 3), np.uint8)
        place = [(33550, "d", 3, (10.0, 10.0, 0.0), True)]
        place += [(33922, "d", 6, (0.0, 0.0, 0.0, 1000.0 * number, 5000.0, 0.0), True)]
        place += [(34735, "H", 8, (1, 1, 0, 1, 3072, 0, 1, 32632), True)]
        tags = {"extratags": place, "resolution": (10, 20), "resolutionunit": "CENTIMETER"}
        tifffile.imwrite(folder / f"{number}.tif", pixels, photometric="rgb", **tags)
    return {"name": "images", "path": str(folder)}


def as_large(output: np.ndarray, axis: int, size: int, fit: str, scale: int) -> np.ndarray:
    """Returns an output that is stretched, or set in what means no prediction, along an axis.

    A pixel of the image is ``scale`` pixels of the output.
    """
    length = output.shape[axis]
    if fit == "resize":
        return output.take([(2 * n + 1) * length // (2 * size) for n in range(size)], axis)
    missing = 255 if output.dtype == np.uint8 else np.nan
    shape = [size if k == axis else n for k, n in enumerate(output.shape)]
    made = np.full(shape, missing, output.dtype)
    for n in range(size):
        place = n - (size // scale - length // scale) // 2 * scale
        if 0 <= place < length:
            made[(slice(None),) * axis + (n,)] = output.take(place, axis)
    return made


@pytest.mark.parametrize("fit", ["resize", "crop"])
def test_maps_have_the_size_and_place_of_their_images_in_every_layout(tmp_path: Path, fit: str):
    data = {**scenes_of(tmp_path / "scenes"), "fit": fit}
    unet, edsr = ({**net, "image": [20, 12], "data": data} for net in (UNET, EDSR))
    kinds = {
        "YX": prediction(**unet, **ARGMAX),
        "CYX": prediction(**unet, predict={"reduce": "probability", "format": "zarr"}),
        "YXS": prediction(**edsr),
    }
    of_axes: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "YX": lambda output: output.argmax(0).byte(),
        "CYX": lambda output: output.softmax(0),
        "YXS": lambda output: (output.clamp(-2, 2) + 2).permute(1, 2, 0) / 4,
    }
    layouts = {"whole": {}, "bands": {"band_rows": 6}, "rows": {"tiles": [2, 1]}}
    layouts["both"] = {"tiles": [2, 2]}
    for name, keys in layouts.items():
        parallel = config_of(parallel=keys).parallel
        world = parallel.num_ranks
        configs = [dataclasses.replace(config, parallel=parallel) for config in kinds.values()]
        paths = [run_folder(tmp_path / name, config) for config in configs]
        run_ranks(run_folders, world, [*map(str, paths)])
        for axes, config, path in zip(kinds, configs, paths, strict=True):
            scale, axis = 1 + (axes == "YXS"), axes.index("Y")
            for row, size, output in zip(table_of(path), SIZES, plain(config)[0], strict=True):
                rows, columns = scale * size[0], scale * size[1]
                expected = as_large(of_axes[axes](output).numpy(), axis, rows, fit, scale)
                expected = as_large(expected, axis + 1, columns, fit, scale)
                read = tifffile.imread if axes != "CYX" else partial(zarr.open_array, mode="r")
                found = np.reshape(read(path / "a0" / row["file"]), expected.shape)
                np.testing.assert_allclose(found, expected, atol=1e-6, err_msg=f"{axes} {size}")
                lost = rows * columns
                if fit == "crop":
                    lost -= min(rows, 20 * scale) * min(columns, 12 * scale)
                counts = rows, columns, 0, lost if fit == "crop" else 0
                names = ("rows", "columns", "not_finite", "not_predicted")
                assert tuple(int(row[name]) for name in names) == counts
    # Of the last layout: pixels of an image twice as fine begin at the same corner.
    for path, step in ((paths[0], 10), (paths[2], 5)):
        with tifffile.TiffFile(path / "a0" / table_of(path)[1]["file"]) as file:
            tags, page = file.geotiff_metadata, file.pages.first
            assert tags["ModelPixelScale"][:2] == [step, step]
            assert tags["ModelTiepoint"] == [0, 0, 0, 1000, 5000, 0]
            assert page.resolution == (100 / step, 200 / step)
            assert f'PhysicalSizeX="{100 * step}.0" PhysicalSizeXUnit="µm"' in file.ome_metadata
    attributes = zarr.open_array(paths[1] / "a0" / table_of(paths[1])[1]["file"]).attrs
    assert attributes["proj:code"] == "EPSG:32632"
    assert attributes["spatial:transform"] == [10, 0, 1000, 0, -10, 5000]
    assert attributes["coordinateTransformations"][0]["scale"] == [1, 500, 1000]


def test_killed_prediction_goes_on_and_is_whole(tmp_path: Path):
    # With the parameters of a run, too, whose checkpoint has no steps of this one.
    train = {**UNET, "steps": 3, "checkpoint": {"every": 3}, "task": {"name": "train"}}
    trained = run_folder(tmp_path / "t", evaluation(**train))
    assert attempt(trained) == [0]
    keys: dict[str, Any] = {"predict": {"reduce": "argmax", "format": "zarr"}}
    keys["checkpoint"] = {"resume": str(trained)}
    data = {**scenes_of(tmp_path / "scenes"), "fit": "crop"}  # images of several sizes
    config = prediction(**UNET, **keys, parallel={"tiles": [2, 1]}, batch=2, data=data)
    whole, stopped = (run_folder(tmp_path / name, config) for name in "ab")
    assert attempt(whole) == [0, 0]
    killed_attempt(stopped, 1)  # nothing was saved: the lines are all that there is
    assert not (stopped / "a0" / "predictions.csv").exists()
    assert attempt(stopped) == [0, 0]
    record = records.read_record(stopped)
    assert (record["state"], record["resumed"]["step"]) == ("done", 1)
    assert table_of(stopped, 1) == table_of(whole)
    maps = [path / "predictions" for path in (whole, stopped)]
    files = [{p.relative_to(m): p.read_bytes() for p in m.rglob("*") if p.is_file()} for m in maps]
    assert files[0] == files[1] != {}
    assert attempt(stopped) == [0, 0]  # a complete run is done anew, and not from its lines
    assert records.read_record(stopped)["resumed"]["step"] == 0


def test_prediction_that_may_not_resume_begins_at_step_0(tmp_path: Path):
    path = run_folder(tmp_path, prediction(checkpoint={"resume": "never"}))
    killed_attempt(path, 2)
    assert attempt(path) == [0]
    assert records.read_record(path)["resumed"] is None
    assert len(table_of(path, 1)) == 11


def test_what_is_not_finite_is_no_class(tmp_path: Path):
    config = prediction(**UNET, **ARGMAX)
    predictor = Predictor(config, open_data(config), plan_of(config).graph, tmp_path)
    output = torch.zeros(4, 2, 3)
    output[1], output[2, 0, 0], output[3, 1, 1] = 1.0, math.nan, math.inf
    assert [class_type(count) for count in (255, 256)] == [np.uint8, np.uint16]
    part = predictor._part(output)
    assert part.tolist() == [[255, 1, 1], [1, 255, 1]]
    rows = predictor._class_rows(range(2), torch.tensor([[0.0, 1.0], [math.nan, 1.0]]))
    (_, label, share), (_, broken, none) = rows
    assert (label, share, broken) == (1, pytest.approx(1 / (1 + math.exp(-1))), -1)
    assert math.isnan(none)
