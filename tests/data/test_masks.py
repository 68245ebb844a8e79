"""Label maps are read beside their images in every layout, and what is wrong is named."""

from __future__ import annotations

import dataclasses
import json
import shlex
import shutil

import numpy as np
import pytest
import tifffile
from PIL import Image

from hires.cli.data_keys import resolve_data
from hires.cli.main import main
from hires.core.config.data_config import AugmentConfig, DataConfig
from hires.core.config.run_config import to_dict
from hires.core.errors import ConfigError, PlanError, RunError
from hires.core.store import file_names, rundir
from hires.data.data_check import check_data
from hires.data.make_data import make_data
from hires.data.opening import AugmentedSource, open_data
from hires.data.sources.masks import MaskSource
from hires.data.start_check import image_findings, require_readable
from tests.helpers.layouts import config_of, plan_of, verified
from tests.helpers.saved import attempt

SIZE = (16, 20)
WHOLE = (0, 16), (0, 20)


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "my shapes"
    assert make_data("masks", path, 3, 6, SIZE, 0) == 6
    return path


def source_of(folder, size=SIZE, **keys):
    data = DataConfig(name="masks", path=str(folder), classes=3, **keys)
    return MaskSource(data, str(folder), size, 3)


def stored(folder, number):
    return np.asarray(Image.open(folder / "masks" / f"{number:05d}.png"))


def test_labels_are_those_of_the_map_beside_the_image(folder):
    source = source_of(folder)
    assert len(source) == 6
    for number in range(6):
        labels = source.target(number, *WHOLE)
        assert labels.dtype == np.int64
        assert np.array_equal(labels, stored(folder, number))
    assert source.name(2) == "images/00002.png"
    assert source.check(0, 10**6) > 0
    Image.fromarray(stored(folder, 1)).save(folder / "masks" / "00000.png")
    assert np.array_equal(source.target(0, *WHOLE), stored(folder, 1))  # it was written anew
    wanted = stored(folder, 4)
    for form in ("palette", "tiff", "tiff_lzw", "packbits", "lzma"):
        image = Image.fromarray(wanted, "L")
        for path in (folder / "masks").glob("00004.*"):
            path.unlink()
        path = folder / "masks" / ("00004.png" if form == "palette" else "00004.tif")
        if form == "palette":
            image.putpalette([9, 9, 9, 200, 0, 0, 0, 0, 200])
            image.save(path)
        elif form == "tiff":
            tifffile.imwrite(path, wanted.astype(np.uint16))
        else:
            image.save(path, compression=form)
        assert np.array_equal(source_of(folder).target(4, *WHOLE), wanted), form


def test_values_of_a_map_are_the_classes_that_the_config_says(folder):
    path = folder / "masks" / "00000.png"
    wanted = (np.arange(16 * 20) % 3).reshape(SIZE)
    values = np.array([255, 0, 100], np.uint8)
    Image.fromarray(values[wanted]).save(path)
    source = source_of(folder, values=[255, 0, 100])
    assert np.array_equal(source.target(0, *WHOLE), wanted)
    assert np.array_equal(source.target(0, (3, 9), (5, 20)), wanted[3:9, 5:20])
    for extra in (7, 254):
        again = np.where(wanted == 2, extra, values[wanted]).astype(np.uint8)
        Image.fromarray(again).save(path)
        with pytest.raises(RunError, match=rf"the value {extra}, which is none of data\.values"):
            source.target(0, *WHOLE)
        labels = source_of(folder, values=[255, 0, 100], ignore=extra).target(0, *WHOLE)
        assert np.array_equal(labels, np.where(wanted == 2, extra, wanted))
    two = np.where(wanted == 2, 255, 0).astype(np.uint8)
    Image.fromarray(two).save(path)
    with pytest.raises(RunError, match=r"the value 255, .*=3; it has the values 0, 255: name"):
        source_of(folder).target(0, *WHOLE)
    data = DataConfig("masks", str(folder), values=[0, 255])
    assert np.array_equal(MaskSource(data, str(folder), SIZE, 3).target(0, *WHOLE), two // 255)


def test_check_reads_the_parts_of_a_folder_and_classes_are_asked_for(folder, tmp_path):
    parts = tmp_path / "parts"
    for part in ("train", "val"):
        shutil.copytree(folder, parts / part)
    data = DataConfig("masks", str(parts), classes=3)
    report = check_data(str(parts), config_of(data=vars(data), image=[*SIZE]), "masks")
    assert (report.ok, len(report.images)) == (True, 12)
    with pytest.raises(ConfigError, match=r"images in train and val; .* as data\.split=train"):
        MaskSource.open(data, SIZE, 3, 0)
    Image.fromarray(np.full(SIZE, 9, np.uint8)).save(parts / "val/masks/00003.png")
    for split, count, ok in (("all", 12, False), ("train", 6, True), ("validation", 6, False)):
        config = config_of(data={**vars(data), "split": split}, image=[*SIZE])
        report = check_data(str(parts), config, "masks")
        assert (report.ok, len(report.images)) == (ok, count)
    labels = np.array([0, 1, 255], np.uint8)[np.arange(16 * 20).reshape(SIZE) % 3]
    Image.fromarray(labels).save(folder / "masks" / "00000.png")
    with pytest.raises(ConfigError, match=r"data\.classes=NUMBER.*00000\.png.* 0, 1, 255"):
        MaskSource(DataConfig("masks", str(folder)), str(folder), SIZE, 3)


def test_label_map_of_floats_is_refused_as_such(folder):
    (folder / "masks" / "00000.png").unlink()
    tifffile.imwrite(folder / "masks" / "00000.tif", stored(folder, 1).astype(np.float32))
    with pytest.raises(RunError, match=r"a label map has whole numbers, not floats; save it as 8"):
        source_of(folder).target(0, *WHOLE)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"values": [0, 255]}, r"one value for each of data\.classes=3; use data\.classes=2"),
        ({"values": [0, 9, 9]}, r"has a value twice; write that of each class once"),
        ({"values": [5, 6, 7], "ignore": 6}, r"has data\.ignore=6 as class 1; take it out"),
        ({"values": [5, 6, 7], "ignore": 0}, r"is also the number of the class 5 in data\.values"),
    ],
)
def test_values_that_name_no_classes_are_refused(keys, words):
    with pytest.raises(ConfigError, match=words):
        config_of(data={"name": "masks", "path": "there", "classes": 3, **keys}, image=[16, 16])


def test_maps_are_found_by_the_pattern_of_their_names(folder):
    for number in range(6):
        (folder / "masks" / f"{number:05d}.png").rename(folder / f"{number:05d}_gt.png")
    for image, copy in (("images/00000.png", "images/a/x.png"), ("00000_gt.png", "a/x_gt.png")):
        (folder / copy).parent.mkdir()
        shutil.copy(folder / image, folder / copy)
    source = source_of(folder, masks="*_gt.png")
    labels = np.asarray(Image.open(folder / "00001_gt.png"))
    assert np.array_equal(source.target(1, *WHOLE), labels)
    assert "images/a/x.png" in map(source.name, range(7))
    for keys, words in (
        ({"images": "pictures/*"}, "holds no images named data.images=pictures"),
        ({"masks": "masks/x.png"}, "needs one star"),
    ):
        with pytest.raises(ConfigError, match=words):
            source_of(folder, **keys)
    data = {"name": "masks", "path": str(folder), "masks": "*_gt.png"}
    for keys, words in (
        ({"augment": {"shift": 1}}, r"name their value, data\.ignore=255"),
        ({"loss": {"name": "l1"}}, "use loss=auto"),
    ):
        with pytest.raises(ConfigError, match=words):
            config_of(data=data, **keys)
    order = {"classes": 3, "names": ["a", "b", "c"], "order": ["c", "b", "a"], "ignore": 0}
    with pytest.raises(ConfigError, match=r"data\.ignore=0 is also the number of the class c"):
        open_data(config_of(data={**data, **order}, model={"name": "unet"}))
    model = {"name": "preact_resnet", "depth": 11, "classes": 10}
    config = config_of(image=[*SIZE], data=data, model=model)
    with pytest.raises(PlanError, match="or use model=unet"):
        plan_of(config).require_ok()


def test_other_sizes_take_the_nearest_label(folder):
    source, labels = source_of(folder, (8, 40)), stored(folder, 3)
    wanted = labels[np.arange(8) * 2 + 1][:, np.arange(40) // 2]
    assert np.array_equal(source.target(3, (0, 8), (0, 40)), wanted)
    cropped = source_of(folder, (20, 10), fit="crop", ignore=255).target(3, (0, 20), (0, 10))
    assert np.array_equal(cropped[2:18], labels[:, 5:15])
    assert (cropped[[0, 1, 18, 19]] == 255).all()


def test_maps_change_as_their_images_do(folder):
    # Each class has a colour of its own: after all changes of place they still agree.
    colours = np.array([[0, 0, 0], [120, 0, 0], [250, 0, 0]], np.uint8)
    for number in range(6):
        path = folder / "images" / f"{number:05d}.png"
        Image.fromarray(colours[stored(folder, number)]).save(path)
    augment = AugmentConfig(flip="both", rotate=True, shift=4)
    source = AugmentedSource(source_of(folder, ignore=255), SIZE, augment, 1)
    for number in range(36):
        red = (source.window(number, *WHOLE)[0] + 2) / 4 * 255
        labels = source.target(number, *WHOLE)
        inside = labels != 255
        assert np.allclose(red[inside], np.array([0, 120, 250])[labels[inside]], atol=0.01)
        assert np.allclose(red[~inside], 127.5)  # grey came in
    parts = AugmentedSource(source_of(folder), SIZE, AugmentConfig(crop=0.3), 1)
    for number in range(6):
        assert {*parts.target(number, *WHOLE).flatten()} <= {*stored(folder, number).flatten()}


def spoil(folder, how):
    path = folder / "masks" / "00004.png"
    image = Image.open(path).convert("L")
    if how == "alone":
        path.unlink()
    elif how == "cut":
        path.write_bytes(path.read_bytes()[:60])
    elif how == "jpeg":  # 731 of 2304 labels were others, and a suffix says nothing
        image.save(path, format="JPEG", quality=95)
    elif how == "jpeg in tiff":
        image.save(path.with_suffix(".tif"), compression="jpeg")
        path.unlink()
    else:
        shapes = {"small": np.zeros((8, 20)), "high": np.full(SIZE, 3), "rgb": np.zeros((*SIZE, 3))}
        Image.fromarray(shapes[how].astype(np.uint8)).save(path)


WRONG = {
    "jpeg": "JPEG.*write it anew",
    "jpeg in tiff": "JPEG.*write it anew",
    "alone": "images/00004.png has no label map masks/00004",
    "small": r"00004.png: a label map of 8 x 20 pixels, and its image 00004.png has 16 x 20",
    "high": "holds the value 3, which is none of data.classes=3; .* data.ignore=3",
    "rgb": "its pixels are RGB; save it as grey or with a palette",
    "cut": "cannot read the image .*00004.png",
}


def test_rank_names_the_command_that_lists_all_bad_label_maps(folder, tmp_path, capsys):
    for how, text in WRONG.items():
        copy = shutil.copytree(folder, tmp_path / how / "my shapes")
        spoil(copy, how)
        with pytest.raises((ConfigError, RunError), match=text) as caught:
            source_of(copy, ignore=255).check(4, 10**6)
        if how == "alone":
            continue  # the folder is no data
        command = str(caught.value).partition("`hires ")[2].partition("`")[0]
        assert shlex.split(command) == ["data", "check", "data=masks", f"data.path={copy}"]
        words = ["data.classes=3", "data.ignore=255"]
        assert main([*shlex.split(command), *words, "--json"]) == 1
        [finding] = json.loads(capsys.readouterr().out)["findings"]
        assert finding["severity"] == "error"
        assert [file.partition(".")[0] for file in finding["files"]] == ["masks/00004"]


def test_plan_refuses_label_maps_that_a_rank_would_refuse(folder):
    data = {"name": "masks", "path": str(folder), "classes": 2}
    for held, text in ((255, "has the values 0, 255"), ((9, 0, 0), "are RGB; save it")):
        for path in (folder / "masks").iterdir():
            labels = np.full((*SIZE, *np.shape(held)), held)
            labels[:4] = 0
            Image.fromarray(labels.astype(np.uint8)).save(path)
        config = config_of(data=data, image=[*SIZE], batch=2, steps=1)
        finding = image_findings(config)[0]
        assert (finding.severity, text in finding.text) == ("error", True)


@pytest.mark.parametrize("fit", ["crop", "random_crop"])
def test_smaller_images_need_a_value_beside_their_labels(fit, folder):
    data = {"name": "masks", "path": str(folder), "classes": 3, "fit": fit}

    def opened(size, **keys):
        config = config_of(image=[*size], data={**data, **keys}, model={"name": "unet"})
        return config, open_data(config)

    config, source = opened(SIZE)
    require_readable(config, source, range(3), 0, 1)
    assert {*source.target(0, *WHOLE).flatten()} <= {0, 1, 2}
    config, source = opened((24, 8))
    text = rf"data\.fit={fit} brings in .* 24 x 8, and this one has 16 x 20"
    with pytest.raises(RunError, match=text):
        require_readable(config, source, range(3), 0, 1)
    with pytest.raises(RunError, match=text):
        source.target(0, (0, 24), (0, 8))
    finding = check_data(data["path"], config, "masks", sized=True).findings[0]
    assert f"data.fit={fit} brings in" in finding.files[0]
    _, source = opened((24, 8), ignore=255)
    assert (source.target(0, (0, 4), (0, 8)) == 255).all()
    assert np.abs(source.window(0, (0, 4), (0, 8))).max() < 1e-6  # grey


@pytest.mark.dist
@pytest.mark.parametrize(
    ("layout", "loss"),
    [
        ({"replicas": 2}, {"name": "cross_entropy", "weights": [1.0, 2.0, 0.0]}),
        ({"tiles": [2, 1], "microbatches": 2}, {"name": "dice", "smooth": 0.0}),
    ],
    ids=["dp", "sp"],
)
def test_microbatch_without_labels_adds_nothing_in_every_layout(folder, tmp_path, layout, loss):
    # The loss was NaN, and a smaller learning rate was to help.
    for number in range(0, 6, 2):
        Image.fromarray(np.full(SIZE, 2, np.uint8)).save(folder / "masks" / f"{number:05d}.png")
    data = {"name": "masks", "path": str(folder), "classes": 3, "shuffle": False}
    data |= {} if loss.get("weights") else {"ignore": 2}
    model = {"name": "unet", "levels": 1, "width": 4}
    keys = {"image": [*SIZE], "batch": 2, "steps": 3, "data": data, "model": model, "loss": loss}
    config = dataclasses.replace(
        resolve_data(config_of(parallel=layout, **keys)), results=str(tmp_path)
    )
    if "tiles" in layout:
        assert verified(tmp_path, **to_dict(config))["max_rel_err"] < 1e-10
    path = rundir.create(config, plan_of(config).to_dict(), ["hires", "run"]).path
    assert set(attempt(path)) == {0}
    record = json.loads((path / file_names.RECORD).read_text())
    assert record["loss"]["finite"]
    assert record["unlabelled_microbatches"] == 3  # of 6 images in order, every other one
