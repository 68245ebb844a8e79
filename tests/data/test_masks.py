"""Are label maps read beside their images, in every layout, and is what is wrong with them told?"""

from __future__ import annotations

import dataclasses
import json
import shutil

import numpy as np
import pytest
import tifffile
from PIL import Image

from hires.cli.data_keys import with_classes
from hires.core.config.augment_config import AugmentConfig
from hires.core.config.data_config import DataConfig
from hires.core.config.run_config import to_dict
from hires.core.errors import ConfigError, PlanError, RunError
from hires.core.evaluation_summary import PIXELS
from hires.core.store import file_names, rundir
from hires.data.augmented import AugmentedSource
from hires.data.mask_shapes import make_masks
from hires.data.masks import AugmentedMasks, MaskSource
from hires.data.source import open_data, step_indices
from tests.helpers.layouts import config_of, plan_of, verified
from tests.helpers.saved import attempt, losses

SIZE = (16, 20)
UNET = {"name": "unet", "levels": 2, "width": 4}


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "shapes"
    assert make_masks(path, 3, 6, SIZE, 0) == 6
    return path


def source_of(folder, size=SIZE, **keys):
    return MaskSource(
        DataConfig(name="masks", path=str(folder), classes=3, **keys), str(folder), size, 3
    )


def stored(folder, number):
    return np.asarray(Image.open(folder / "masks" / f"{number:05d}.png"))


def test_windows_are_parts_of_the_map_beside_the_image(folder):
    source = source_of(folder)
    assert len(source) == 6
    for number in range(6):
        held = source.labels(number, (0, 16), (0, 20))
        assert held.dtype == np.int64
        assert np.array_equal(held, stored(folder, number))
        assert np.array_equal(source.labels(number, (3, 9), (5, 6)), held[3:9, 5:6])
    assert source.name(2) == "images/00002.png"
    assert source.check(0, 10**6) > 0


def test_names_are_found_by_their_pattern(folder):
    for number in range(6):
        (folder / "masks" / f"{number:05d}.png").rename(folder / f"{number:05d}_gt.png")
    source = source_of(folder, masks="*_gt.png")
    assert np.array_equal(
        source.labels(1, (0, 16), (0, 20)), np.asarray(Image.open(folder / "00001_gt.png"))
    )
    (folder / "images" / "a").mkdir()
    (folder / "a").mkdir()
    shutil.copy(folder / "images" / "00000.png", folder / "images" / "a" / "x.png")
    shutil.copy(folder / "00000_gt.png", folder / "a" / "x_gt.png")
    assert "images/a/x.png" in map(source_of(folder, masks="*_gt.png").name, range(7))


def test_palettes_and_tiffs_hold_numbers(folder):
    labels = stored(folder, 0)
    image = Image.fromarray(labels, "L")
    image.putpalette([9, 9, 9, 200, 0, 0, 0, 0, 200])
    image.save(folder / "masks" / "00000.png")
    (folder / "masks" / "00001.png").unlink()
    tifffile.imwrite(folder / "masks" / "00001.tif", stored(folder, 2).astype(np.uint16))
    source = source_of(folder)
    assert np.array_equal(source.labels(0, (0, 16), (0, 20)), labels)
    assert np.array_equal(source.labels(1, (2, 9), (4, 8)), stored(folder, 2)[2:9, 4:8])


def test_other_sizes_take_the_nearest_label(folder):
    source, labels = source_of(folder, (8, 40)), stored(folder, 3)
    wanted = labels[np.arange(8) * 2 + 1][:, np.arange(40) // 2]
    assert np.array_equal(source.labels(3, (0, 8), (0, 40)), wanted)
    cropped = source_of(folder, (20, 10), fit="crop", ignore=255).labels(3, (0, 20), (0, 10))
    assert np.array_equal(cropped[2:18], labels[:, 5:15])
    assert (cropped[[0, 1, 18, 19]] == 255).all()


def test_maps_change_as_their_images_do(folder):
    # Each class has a colour of its own: after all changes of place they still agree.
    for number in range(6):
        colours = np.array([[0, 0, 0], [120, 0, 0], [250, 0, 0]], np.uint8)
        Image.fromarray(colours[stored(folder, number)]).save(
            folder / "images" / f"{number:05d}.png"
        )
    augment = AugmentConfig("both", True, 1.0, 4)
    source = AugmentedMasks(source_of(folder, ignore=255), SIZE, augment, 1)
    for number in range(36):
        red = (source.window(number, (0, 16), (0, 20))[0] + 2) / 4 * 255
        labels = source.labels(number, (0, 16), (0, 20))
        inside = labels != 255
        assert np.allclose(red[inside], np.array([0, 120, 250])[labels[inside]], atol=0.01)
        assert np.allclose(red[~inside], 127.5)  # grey came in
        assert np.array_equal(source.labels(number, (3, 9), (2, 20)), labels[3:9, 2:20])
    parts = AugmentedMasks(source_of(folder), SIZE, AugmentConfig(crop=0.3), 1)
    for number in range(6):
        made = parts.labels(number, (0, 16), (0, 20))
        assert {*made.flatten()} <= {*stored(folder, number).flatten()}


def _alone(folder):
    (folder / "masks" / "00004.png").unlink()


def _small(folder):
    Image.fromarray(np.zeros((8, 20), np.uint8)).save(folder / "masks" / "00004.png")


def _high(folder):
    Image.fromarray(np.full(SIZE, 7, np.uint8)).save(folder / "masks" / "00004.png")


def _colour(folder):
    Image.fromarray(np.zeros((*SIZE, 3), np.uint8)).save(folder / "masks" / "00004.png")


def _cut(folder):
    path = folder / "masks" / "00004.png"
    path.write_bytes(path.read_bytes()[:60])


def _jpeg(folder):
    # 731 of 2304 labels were others, and a suffix says nothing.
    with Image.open(folder / "masks" / "00004.png") as image:
        image.convert("L").save(folder / "masks" / "00004.png", format="JPEG", quality=95)


def _jpeg_in_tiff(folder):
    path = folder / "masks" / "00004.tif"
    with Image.open(path.with_suffix(".png")) as image:
        image.convert("L").save(path, compression="jpeg")
    path.with_suffix(".png").unlink()


WRONG = [
    (_jpeg, "JPEG.*write it anew"),
    (_jpeg_in_tiff, "(?i)jpeg.*write it anew"),
    (_alone, "images/00004.png has no label map masks/00004"),
    (_small, r"00004.png: a label map of 8 x 20 pixels, and its image 00004.png has 16 x 20"),
    (_high, "holds the class 7, and data.classes=3; use data.classes=8, or data.ignore=7"),
    (_colour, "its pixels are RGB; save it as grey or with a palette"),
    (_cut, "cannot read the image .*00004.png"),
]


@pytest.mark.parametrize(("spoil", "words"), WRONG, ids=[one[0].__name__ for one in WRONG])
def test_wrong_maps_are_named_with_the_remedy(folder, spoil, words):
    spoil(folder)
    with pytest.raises((ConfigError, RunError), match=words):
        source_of(folder).check(4, 10**6)


@pytest.mark.parametrize("form", ["tiff_lzw", "tiff_adobe_deflate", "packbits", "raw", "lzma"])
def test_label_maps_of_other_compressions_keep_their_classes(folder, form):
    wanted, path = stored(folder, 4), folder / "masks" / "00004.tif"
    with Image.open(path.with_suffix(".png")) as image:
        image.convert("L").save(path, compression=form)
    path.with_suffix(".png").unlink()
    assert np.array_equal(source_of(folder).labels(4, (0, 16), (0, 20)), wanted)


def test_wrong_patterns_are_answered(folder):
    for keys, words in (
        ({"images": "pictures/*"}, "holds no images named data.images=pictures"),
        ({"masks": "masks/x.png"}, "needs one star"),
    ):
        with pytest.raises(ConfigError, match=words):
            source_of(folder, **keys)
    with pytest.raises(ConfigError, match="name their value, data\\.ignore=255"):
        config_of(data={"name": "masks", "path": str(folder)}, augment={"shift": 1})
    with pytest.raises(ConfigError, match="use loss=auto"):
        config_of(data={"name": "masks", "path": str(folder)}, loss={"name": "l1"})


def training(folder, results, **keys):
    data = {"name": "masks", "path": str(folder), "classes": 3, "ignore": 2, "validation": 0.34}
    keys = {"image": [16, 20], "batch": 2, "steps": 4, "data": data, "model": UNET, **keys}
    return dataclasses.replace(with_classes(config_of(**keys)), results=str(results))


def test_network_of_classes_is_refused(folder, tmp_path):
    plan = plan_of(training(folder, tmp_path, model={"name": "preact_resnet", "n": 1}))
    with pytest.raises(PlanError, match="or use model=unet"):
        plan.require_ok()


@pytest.mark.dist
def test_every_layout_learns_the_same_from_pixels(folder, tmp_path):
    wanted = {"validate": {"every": 2}, "augment": {"flip": "both"}}
    found, evaluated = [], []
    for number, tiles in enumerate(([1, 1], [2, 1], [1, 3])):
        config = training(folder, tmp_path / str(number), parallel={"tiles": tiles}, **wanted)
        assert isinstance(open_data(config), AugmentedSource)
        plan = plan_of(config)
        assert plan.ok, plan.findings
        path = rundir.create(config, plan.to_dict(), ["hires", "run"]).path
        assert set(attempt(path)) == {0}
        values = {step: loss for (step, _), loss in losses(path, 0).items()}
        found.append([values[step] for step in sorted(values)])
        record = json.loads((path / file_names.RECORD).read_text())
        evaluated.append(record["validation"]["last"])
        assert evaluated[-1]["images"] == 2
        labels = [stored(folder, i) for i in range(6)]
        assert evaluated[-1]["pixels"] < 2 * 16 * 20
        assert any((one == 2).any() for one in labels)
    for other, facts in zip(found[1:], evaluated[1:], strict=True):
        assert other == pytest.approx(found[0], rel=1e-10)
        for key in ("pixels", "top1", "mean_iou"):
            assert facts[key] == evaluated[0][key]
        assert facts["loss"] == pytest.approx(evaluated[0]["loss"], rel=1e-10)


@pytest.mark.sampled(3)
@pytest.mark.dist
@pytest.mark.parametrize("layout", [{}, {"tiles": [2, 1]}, {"replicas": 2}, {"stages": 2}], ids=str)
@pytest.mark.parametrize(
    "loss",
    [
        {"name": "cross_entropy"},
        {"name": "cross_entropy", "weights": [1.0, 2.0, 0.0], "label_smoothing": 0.1},
        {"name": "bce"},
        {"name": "dice", "smooth": 0.0},
    ],
    ids=str,
)
def test_a_microbatch_without_labels_adds_nothing_in_every_layout(folder, tmp_path, layout, loss):
    # The loss was NaN, and a smaller learning rate was to help.
    for number in range(0, 6, 2):
        Image.fromarray(np.full(SIZE, 2, np.uint8)).save(folder / "masks" / f"{number:05d}.png")
    parallel = {**layout, "microbatches": 2 // layout.get("replicas", 1)}
    keys = {"parallel": parallel, "loss": loss, "validate": {"every": 4}}
    data = {"name": "masks", "path": str(folder), "classes": 3, "shuffle": False}
    data |= {"validation": 0.34} if loss.get("weights") else {"ignore": 2, "validation": 0.34}
    config = training(folder, tmp_path, **keys, data=data)
    answer = verified(tmp_path, **{**to_dict(config), "validate": {}})
    assert answer["max_rel_err"] < 1e-10
    path = rundir.create(config, plan_of(config).to_dict(), ["hires", "run"]).path
    assert set(attempt(path)) == {0}
    record = json.loads((path / file_names.RECORD).read_text())
    assert record["loss"]["finite"]
    numbers = [step_indices(step, 2, 4, 0, False) for step in range(4)]
    names = [open_data(config).name(i) for step in numbers for i in step]
    empty = sum(int(name[-5]) % 2 == 0 for name in names)
    assert 0 < record["unlabelled_microbatches"] == empty < 8


@pytest.mark.dist
def test_loss_is_that_of_plain_torch(folder, tmp_path):
    data = {"name": "masks", "path": str(folder), "classes": 3, "ignore": 2}
    keys = {"image": [16, 20], "data": data, "model": {**UNET, "classes": 3}}
    made = verified(tmp_path, **keys, parallel={"tiles": [2, 1]})
    assert made["max_rel_err"] < 1e-10
    assert PIXELS == "pixels"
