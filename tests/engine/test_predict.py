"""Does a prediction write every sample and pixel once, as one process would, in every layout?"""

from __future__ import annotations

import csv
import dataclasses
import math

import numpy as np
import pandas as pd
import pytest
import tifffile
import torch

from hires.cli.calibration import quantised_config
from hires.cli.compose.compose_config import compose
from hires.core.config.parallel_config import ParallelConfig
from hires.core.config.value_checks import build
from hires.core.errors import PREEMPTED, ConfigError
from hires.core.store import file_names, records, rundir
from hires.core.store.network_weights import find_weights
from hires.core.store.zarr_files import ZarrFolder, map_chunks
from hires.data.image_format import normalised, open_image
from hires.data.source import open_data
from hires.engine.predict import Predictor
from hires.engine.quantised_file import write_quantised
from hires.quant.scales import read_scales, write_scales
from hires.report.read.map_overviews import overviews
from hires.report.read.runs import read_runs
from tests.engine.test_calibrate import calibration
from tests.engine.test_calibrate import folder_of as calibrated_folder
from tests.engine.test_evaluate import EDSR, UNET, evaluation, plain
from tests.helpers.jobs import failing_folder, run_folders
from tests.helpers.layouts import plan_of
from tests.helpers.ranks import run_ranks
from tests.helpers.saved import attempt, killed_attempt

PREDICT = {"task": {"name": "predict"}, "predict": {"reduce": "probability"}}
RESNET = {"model": {"name": "resnet", "depth": 18, "classes": 4}, "image": [33, 32]}
ARGMAX = {"predict": {"reduce": "argmax"}}


def prediction(**keys):
    return evaluation(**{**PREDICT, **keys})


def made(folder, config):
    """Returns a run folder of a config."""
    config = dataclasses.replace(config, results=str(folder))
    plan = plan_of(config)
    assert plan.ok, plan.findings
    return rundir.create(config, plan.to_dict(), ["hires", "run"]).path


def table_of(path, number=0):
    text = (file_names.attempt_dir(path, number) / "predictions.csv").read_text()
    return [*csv.DictReader(text.splitlines())]


LAYOUTS = {
    1: [{"replicas": 1}],
    2: [{"tiles": [2, 1]}, {"replicas": 2}],
    3: [{"stages": 2, "tiles": [[2, 1], [1, 1]], "microbatches": 2}],
    4: [
        {"tiles": [2, 1], "stages": 3, "directions": 2, "schedule": "gems"},
        {"stages": 2, "tiles": [2, 1], "local_dp": 2},
    ],
}


@pytest.mark.sampled(1)
@pytest.mark.dist
@pytest.mark.parametrize("size", LAYOUTS)
def test_every_layout_writes_the_classes_of_plain_torch(tmp_path, size):
    configs = [prediction(**RESNET, parallel=layout) for layout in LAYOUTS[size]]
    paths = [made(tmp_path, config) for config in configs]
    run_ranks(run_folders, size, [*map(str, paths)])
    outputs, _ = plain(configs[0])
    names = open_data(configs[0]).class_names
    for path in paths:
        rows = table_of(path)
        assert [row["id"] for row in rows] == [str(i) for i in range(11)]
        for row, output in zip(rows, outputs, strict=True):
            shares = output.softmax(0)
            assert int(row["class"]) == int(shares.argmax())
            assert row["name"] == names[int(shares.argmax())]
            assert float(row["probability"]) == pytest.approx(float(shares.max()), abs=1e-10)
            own = [float(row[f"p_{name}"]) for name in names]
            assert own == pytest.approx(shares.tolist(), abs=1e-10)
        facts = records.read_record(path)["prediction"]
        assert [facts[k] for k in ("kind", "images", "not_finite")] == ["classes", 11, 0]
        assert facts["table"] == "a0/predictions.csv"


@pytest.mark.dist
def test_parquet_holds_the_numbers_of_the_csv(tmp_path):
    keys = {"reduce": "probability"}
    paths = [
        made(tmp_path / form, prediction(**{**RESNET, "predict": {**keys, "table": form}}))
        for form in ("csv", "parquet")
    ]
    run_ranks(run_folders, 1, [*map(str, paths)])
    rows = table_of(paths[0])
    frame = pd.read_parquet(paths[1] / "a0" / "predictions.parquet")
    assert [*frame.columns] == [*rows[0]]
    assert frame["class"].tolist() == [int(row["class"]) for row in rows]
    for name in frame.columns[3:]:
        assert frame[name].tolist() == [float(row[name]) for row in rows]
    assert records.read_record(paths[1])["prediction"]["table"] == "a0/predictions.parquet"


MAPS = {
    1: {"tiles": [1, 1]},
    4: {"tiles": [2, 2]},
}


@pytest.mark.dist
@pytest.mark.parametrize("size", MAPS)
def test_tiles_write_the_maps_of_plain_torch(tmp_path, size):
    # The maps of the lower levels, 10x7 and 5x4, divide unevenly; the last images are EDSR's.
    unet, parallel = {**UNET, "image": [20, 12]}, MAPS[size]
    argmax, shares = (prediction(**unet, **keys, parallel=parallel) for keys in (ARGMAX, {}))
    images = prediction(**{**EDSR, "image": [11, 9]}, parallel=parallel)
    paths = [made(tmp_path, one) for one in (argmax, shares, images)]
    run_ranks(run_folders, size, [*map(str, paths)])
    outputs, _ = plain(argmax)
    for path, dtype in zip(paths, (np.uint8, np.float32, np.float32), strict=True):
        rows = table_of(path)
        assert [row["file"] for row in rows] == [f"predictions/{i}.tif" for i in range(11)]
        assert {row["not_finite"] for row in rows} == {"0"}
        held = {file.name for file in (path / "a0" / "predictions").iterdir()}
        assert held == {f"{i}.tif" for i in range(11)}
        assert tifffile.imread(path / "a0" / "predictions" / "3.tif").dtype == dtype
    for i, output in enumerate(outputs):
        classes, probability = (
            tifffile.imread(p / "a0" / "predictions" / f"{i}.tif") for p in paths[:2]
        )
        assert (classes == output.argmax(0).numpy()).all()
        assert probability.shape == (4, 20, 12)
        np.testing.assert_allclose(probability, output.softmax(0).numpy(), atol=1e-6)
    for i, output in enumerate(plain(images)[0]):
        image = open_image(paths[2] / "a0" / "predictions" / f"{i}.tif")
        assert (image.size, image.colours) == ((22, 18), 3)
        again = normalised(image.read((0, 22), (0, 18)), image.peak, 3)  # as data=pairs reads it
        image.close()
        np.testing.assert_allclose(again, output.clamp(-2, 2).numpy(), atol=1e-6)


@pytest.mark.dist
def test_a_quantised_file_predicts_the_same_bits_in_tiles(tmp_path):
    config = calibration(
        precision={"name": "fp32"}, model={"name": "preact_resnet", "n": 1, "classes": 4}
    )
    folder, _ = calibrated_folder(tmp_path, config)
    run_ranks(run_folders, 1, [str(folder)])
    place, file = folder / "a0" / file_names.SCALES, tmp_path / "n8.safetensors"
    single = quantised_config(config, place)
    write_quantised(single, plan_of(single), file, "0" * 16)
    digest = find_weights(str(file)).digest()
    scales = dataclasses.replace(read_scales(place), weights=digest)
    write_scales(file.with_suffix(".json"), scales)
    texts = []
    for tiles in ([1, 1], [2, 1]):
        stored = dataclasses.replace(
            single,
            batch=4,
            steps=math.ceil(len(open_data(config)) / 4),
            weights=str(file),
            quant=dataclasses.replace(single.quant, scales=None),
            task=dataclasses.replace(single.task, name="predict"),
            predict=prediction().predict,
            parallel=build(ParallelConfig, {"tiles": tiles}),
        )
        path = made(tmp_path, stored)
        run_ranks(run_folders, tiles[0], [str(path)])
        texts.append((path / "a0" / "predictions.csv").read_bytes())
    assert texts[0] == texts[1]
    assert texts[0].count(b"\n") == len(open_data(config)) + 1


def files_of(path):
    """Returns the bytes of a map, of each file if it is a folder."""
    files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
    assert files
    return {file.relative_to(path): file.read_bytes() for file in files}


@pytest.mark.dist
@pytest.mark.parametrize("form", ["ome-tiff", "zarr"])
def test_every_format_holds_the_numbers_of_the_tiff_in_every_layout(tmp_path, form):
    keys = {**UNET, "image": [20, 12]}
    single, tiled, tiff = (
        prediction(**keys, predict={"reduce": "probability", "format": name}, parallel=layout)
        for name, layout in ((form, MAPS[1]), (form, MAPS[4]), ("tiff", MAPS[1]))
    )
    paths = [made(tmp_path, one) for one in (single, tiled, tiff)]
    run_ranks(run_folders, 1, [str(paths[0]), str(paths[2])])
    run_ranks(run_folders, 4, [str(paths[1])])
    for rows in zip(*map(table_of, paths), strict=True):
        one, other, tif = (p / "a0" / r["file"] for p, r in zip(paths, rows, strict=True))
        expected = tifffile.imread(tif)
        read = zarr_of if form == "zarr" else tifffile.imread
        assert read(one).tobytes() == expected.tobytes()
        np.testing.assert_allclose(read(other), expected, atol=1e-6)
    assert records.read_record(paths[1])["prediction"]["format"] == form
    [run] = read_runs([paths[1]])
    shown = overviews(run, 6, notes := [])  # in a report
    assert ([one.name for one in shown], notes) == ([*"012345"], [])
    assert all(one.shares.shape == (20, 12) and len(one.names) == 4 for one in shown)


@pytest.mark.dist
def test_zarr_holds_images_as_a_tiff_does(tmp_path):
    # A part of an image had no place in its colours, and every such prediction failed.
    keys = {**EDSR, "image": [11, 9]}
    paths = [
        made(tmp_path, prediction(**keys, predict={"format": form})) for form in ("zarr", "tiff")
    ]
    run_ranks(run_folders, 1, [*map(str, paths)])
    folder, tiff = (p / "a0" / table_of(p)[0]["file"] for p in paths)
    shape = (22, 18, 3)
    read = ZarrFolder(folder, shape, map_chunks(shape, "YXS"), np.float32).read((slice(None),) * 3)
    assert read.tobytes() == tifffile.imread(tiff).tobytes()


def zarr_of(path):
    """Returns the probabilities of a map of four classes, 20 x 12 pixels."""
    shape = (4, 20, 12)
    return ZarrFolder(path, shape, map_chunks(shape, "CYX"), np.float32).read((slice(None),) * 3)


@pytest.mark.sampled(1)
@pytest.mark.dist
@pytest.mark.parametrize(
    ("ends", "form"), [("killed", "tiff"), ("preempted", "ome-tiff"), ("killed", "zarr")]
)
def test_a_stopped_prediction_goes_on_and_is_whole(tmp_path, ends, form):
    keys = {"predict": {"reduce": "argmax", "format": form}}
    config = prediction(**UNET, **keys, parallel={"tiles": [2, 1]})
    whole, stopped = made(tmp_path / "a", config), made(tmp_path / "b", config)
    assert attempt(whole) == [0, 0]
    if ends == "killed":  # nothing was saved: the lines are all that there is
        killed_attempt(stopped, 1)
    else:
        assert attempt(stopped, stop_at=1) == [PREEMPTED, PREEMPTED]
    assert not (stopped / "a0" / "predictions.csv").exists()
    assert attempt(stopped) == [0, 0]
    record = records.read_record(stopped)
    assert (record["state"], record["resumed"]["step"]) == ("done", 1)
    assert table_of(stopped, 1) == table_of(whole)
    for row in table_of(whole):
        one, other = whole / "a0" / row["file"], stopped / "a1" / row["file"]
        assert files_of(one) == files_of(other)
    # A complete run is done anew, and not from its lines.
    assert attempt(stopped) == [0, 0]
    assert records.read_record(stopped)["resumed"] is None


@pytest.mark.dist
def test_a_killed_prediction_with_the_parameters_of_a_run_goes_on(tmp_path):
    # It began at step 0 again: a checkpoint of another run counted as one without steps.
    keys = {**UNET, "steps": 3, "checkpoint": {"every": 3}}
    trained = made(tmp_path / "t", evaluation(**keys, task={"name": "train"}))
    assert attempt(trained) == [0]
    config = prediction(**UNET, **ARGMAX, checkpoint={"resume": str(trained)})
    whole, stopped = made(tmp_path / "a", config), made(tmp_path / "b", config)
    assert attempt(whole) == [0]
    killed_attempt(stopped, 2)
    assert attempt(stopped) == [0]
    assert records.read_record(stopped)["resumed"]["step"] == 2
    for row in table_of(whole):
        one, other = whole / "a0" / row["file"], stopped / "a1" / row["file"]
        assert one.read_bytes() == other.read_bytes()
    first = made(tmp_path / "c", prediction(**UNET, **ARGMAX))
    assert attempt(first) == [0]
    names = [row["file"] for row in table_of(whole)]
    assert any((first / "a0" / n).read_bytes() != (whole / "a0" / n).read_bytes() for n in names)


def test_an_attempt_that_may_not_resume_begins_at_step_0(tmp_path):
    config = prediction(parallel={"replicas": 1})
    path = made(tmp_path, config)
    killed_attempt(path, 2)
    text = (path / "config.yaml").read_text()
    assert "resume: auto" in text
    (path / "config.yaml").write_text(text.replace("resume: auto", "resume: never"))
    assert attempt(path) == [0]
    assert records.read_record(path)["resumed"] is None


def test_what_is_not_finite_is_no_class(tmp_path):
    config = prediction(**UNET, **ARGMAX)
    predictor = Predictor(config, open_data(config), plan_of(config).graph, tmp_path)
    output = torch.zeros(4, 2, 3)
    output[1], output[2, 0, 0], output[3, 1, 1] = 1.0, math.nan, math.inf
    part, _ = predictor._part(output, (0, 2, 0, 3))
    assert part.tolist() == [[255, 1, 1], [1, 255, 1]]
    rows = predictor._class_rows(range(2), torch.tensor([[0.0, 1.0], [math.nan, 1.0]]))
    (_, label, share), (_, broken, none) = rows
    assert (label, share, broken) == (1, pytest.approx(1 / (1 + math.exp(-1))), -1)
    assert math.isnan(none)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["predict.reduce=foo"], "predict.reduce='foo' is unknown; choose one of argmax, prob"),
    ],
)
def test_wrong_keys_are_refused_with_the_remedy(words, text):
    with pytest.raises(ConfigError, match=text):
        compose(["task=predict", *words])


@pytest.mark.dist
def test_a_folder_that_cannot_be_made_ends_the_run(tmp_path):
    path = made(tmp_path, prediction(**UNET))
    (path / "a0" / "predictions").write_text("a file of someone's")
    [text] = run_ranks(failing_folder, 1, str(path))
    assert "predictions: File exists; a file is where a folder should be: move it" in text
