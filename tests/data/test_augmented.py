"""Random changes and crops follow from seed, epoch and image alone, alike in every layout."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import tifffile
from PIL import Image

from hires.core.augmentations import AUGMENTATIONS, ColourChange, in_order
from hires.core.config.data_config import AugmentConfig
from hires.core.errors import ConfigError
from hires.data.image_fit import nearest_window
from hires.data.opening import AugmentedSource, open_data
from hires.data.source import Source
from tests.helpers import reference
from tests.helpers.layouts import config_of

EVERYTHING = AugmentConfig(
    flip="both", rotate=True, crop=0.3, shift=3, brightness=0.3, contrast=0.3, saturation=0.3,
    hue=0.2,
)  # fmt: skip


class Counted(Source):
    """Images of random numbers."""

    num_classes, class_names = 2, ("a", "b")

    def __init__(self, size, count=5):
        self.pixels = np.random.default_rng(0).uniform(-2, 2, (count, 3, *size)).astype(np.float32)

    def __len__(self):
        return len(self.pixels)

    def window(self, i, rows, cols, place=None):
        return self.pixels[i][:, slice(*rows), slice(*cols)]


def changed(name, amount, size=(12, 12), label_fill=None, **drawn):
    """Returns an image of random numbers, and what one augmentation makes of it."""
    image = np.random.default_rng(1).normal(size=(2, *size)).astype(np.float32)
    change = AUGMENTATIONS[name](amount, size, np.random.default_rng(0))
    vars(change).update(drawn)

    def read(rows, cols):
        return image[:, slice(*rows), slice(*cols)]

    return image, change.window(read, (0, size[0]), (0, size[1]), label_fill)


def test_changes_of_place_are_those_of_numpy():
    image, flipped = changed("flip", "both", vertical=True, horizontal=False)
    assert np.array_equal(flipped, image[:, ::-1])
    image, flipped = changed("flip", "both", vertical=False, horizontal=True)
    assert np.array_equal(flipped, image[:, :, ::-1])
    for turns in range(4):
        image, turned = changed("rotate", True, turns=turns)
        assert np.array_equal(turned, np.rot90(image, turns, (1, 2)))
    image, moved = changed("shift", 3, down=2, right=-3)
    assert np.array_equal(moved[:, 2:, :9], image[:, :10, 3:])
    assert not moved[:, :2].any()
    assert not moved[:, :, 9:].any()
    image, part = changed("crop", 0.3, part=(6, 6), top=2, left=4)
    assert part.min() >= image[:, 2:8, 4:10].min()
    assert np.abs(part.mean() - image[:, 2:8, 4:10].mean()) < 0.1
    labels = np.arange(36).reshape(6, 6)  # they are copied and never mixed
    nearest = nearest_window(
        lambda rows, cols: labels[slice(*rows), slice(*cols)], (6, 6), (12, 3), (2, 12), (0, 3)
    )
    assert np.array_equal(nearest, labels[np.arange(2, 12) // 2][:, [1, 3, 5]])


def test_pixels_move_before_colours_change_and_parts_are_cut_before_they_turn():
    ours = ["crop", "shift", "flip", "rotate", "brightness", "contrast", "saturation", "hue"]
    assert [name for name in in_order() if name in ours] == ours
    places = [issubclass(kind, ColourChange) for kind in in_order().values()]
    assert places == sorted(places)


@pytest.mark.parametrize("turn", [0.0, 0.13, -0.5, 0.49])
def test_hues_are_turned_as_in_hsv(turn):
    pixels = np.random.default_rng(5).uniform(-2, 2, (3, 7, 9)).astype(np.float32)
    pixels[:, 0], pixels[:, 1, :2], pixels[0, 2] = 0.5, [[2], [-2], [-2]], pixels[1, 2]
    wanted = reference.turned_hues((pixels.astype(np.float64) + 2) / 4, turn) * 4 - 2
    # A hue is a quotient of float32 between 0 and 6, and a colour spans 4: 4 * 6 * 2^-23.
    hue = AUGMENTATIONS["hue"](0.5, (7, 9), np.random.default_rng(0))
    hue.turn = turn
    assert np.abs(hue.colours(pixels) - wanted).max() < 4e-6


@pytest.mark.parametrize("name", ["brightness", "contrast", "saturation"])
def test_colours_are_scaled_about_grey_and_black(name):
    # Brightness scales from black, contrast from grey, saturation from the luminance.
    images = Counted((8, 8))
    images.pixels = images.pixels / 4
    image = images.pixels[0].astype(np.float64)
    source = AugmentedSource(images, (8, 8), AugmentConfig(**{name: 0.3}), 2)
    [change] = source.changes(0)
    factor = change.factor
    light = np.tensordot([0.299, 0.587, 0.114], image, 1)
    base = {"brightness": -2.0, "contrast": 0.0, "saturation": light}[name]
    window = source.window(0, (0, 8), (0, 8))
    np.testing.assert_allclose(window, base + factor * (image - base), atol=1e-6)
    assert abs(factor - 1) > 0.01
    images.pixels = images.pixels * 4
    every = [source.window(i, (0, 8), (0, 8)) for i in range(20)]
    assert max(np.abs(window).max() for window in every) == 2


def drawn(size, seed, numbers, augment=EVERYTHING):
    """Returns what is drawn for images of a source of two, by augmentation."""
    source = AugmentedSource(Counted(size, 2), size, augment, seed)
    return [
        {type(change).__name__.lower(): vars(change) for change in source.changes(i)}
        for i in numbers
    ]


def test_changes_differ_between_epochs_and_images_and_have_the_documented_shares():
    every = drawn((32, 32), 0, range(40))
    assert len({str(one) for one in every}) == 40
    assert drawn((32, 32), 0, range(40)) == every
    assert drawn((32, 32), 1, [0]) != every[:1]
    many = drawn((100, 100), 0, range(1000))
    for way in ("vertical", "horizontal"):
        assert 440 < sum(one["flip"][way] for one in many) < 560
        alone = AugmentConfig(flip=way)  # whatever else is on, it draws the same
        source = AugmentedSource(Counted((100, 100), 2), (100, 100), alone, 0)
        flips = [vars(source.changes(i)[0]) for i in range(1000)]
        assert [one[way] for one in flips] == [one["flip"][way] for one in many]
        assert not any(one[{"vertical": "horizontal"}.get(way, "vertical")] for one in flips)
    turns = Counter(one["rotate"]["turns"] for one in many)
    assert all(200 < count < 300 for count in turns.values())
    areas = [np.prod(one["crop"]["part"]) / 1e4 for one in many]
    assert 0.28 < min(areas) < 0.33 < 0.98 < max(areas)
    assert {one["shift"]["down"] for one in many} == set(range(-3, 4))
    assert all(one["contrast"]["factor"] != one["brightness"]["factor"] for one in many)
    assert 0.7 <= min(one["contrast"]["factor"] for one in many) < 0.71
    assert {one["rotate"]["turns"] for one in drawn((10, 20), 0, range(50))} == {0, 2}


OF_A_USER = """
import sys, hires.augmentations
hires.augmentations.__path__.append({folder!r})
from hires.cli.choices import config_keys
from hires.core.config.run_config import from_dict
meaning = config_keys()["augment.invert"].meaning
assert meaning == "Share of the images whose colours are inverted.", meaning
configs = [from_dict({{"augment": {{"flip": "both", "invert": one}}}}) for one in (0.0, 1.0)]
assert "numpy" not in sys.modules
from hires.data.opening import open_data
plain, inverted = (open_data(one).window(3, (0, 8), (0, 8)) for one in configs)
assert plain.any() and (plain == -inverted).all()
"""


def test_augmentation_is_one_class_in_a_module_that_is_found_by_scanning(python):
    folder = Path(__file__).parents[1] / "helpers" / "scanned_augmentations"
    answer = python("-c", OF_A_USER.format(folder=str(folder)))
    assert answer.code == 0, answer.err


def test_only_trainings_change_their_images():
    keys = {"augment": {"flip": "both"}, "image": [8, 8]}
    assert isinstance(open_data(config_of(**keys)), AugmentedSource)
    assert not isinstance(open_data(config_of(**keys, task={"name": "evaluate"})), AugmentedSource)
    for key, value in (("hue", 0.6), ("crop", 1.5), ("crop", 0.0), ("contrast", 1.0)):
        with pytest.raises(ConfigError, match=key):
            AugmentConfig(**{key: value})


LARGE, SIZE = (40, 50), (16, 20)


@pytest.fixture
def folder(tmp_path):
    """Images with label maps; a pixel of either says where it was."""
    rows, cols = np.indices(LARGE)
    for name in ("images", "masks"):
        (tmp_path / name).mkdir()
    for number in range(3):
        place = (rows + cols + number) % 3
        colours = np.stack([rows, cols, 80 * place], axis=2).astype(np.uint8)
        tifffile.imwrite(tmp_path / "images" / f"{number}.tif", colours)
        Image.fromarray(place.astype(np.uint8)).save(tmp_path / "masks" / f"{number}.png")
    return tmp_path


def cropped(folder, name="masks", size=SIZE, task="train", split="all", **keys):
    """Returns the data of a run whose images are cropped at random."""
    labels = {"classes": 3, "ignore": 255, "split": split} if name == "masks" else {}
    data = {"name": name, "path": str(folder), "fit": "random_crop", **labels}
    model = {"name": {"pairs": "edsr", "masks": "unet"}[name]}
    return open_data(
        config_of(image=[*size], data=data, task={"name": task}, model=model, **keys)
    )  # fmt: skip


def whole(source, i, size=SIZE):
    return source.window(i, (0, size[0]), (0, size[1]))


def corner(source, i):
    """Returns row and column of the stored image at the first pixel of a window."""
    return tuple(round(float(value + 2) / 4 * 255) for value in whole(source, i)[:2, 0, 0])


def test_crops_keep_the_resolution_and_have_other_places_in_each_epoch(folder):
    source = cropped(folder)
    places = [corner(source, number) for number in range(60)]  # 20 epochs of 3 images
    for number, (row, col) in enumerate(places):
        stored = tifffile.imread(folder / "images" / f"{number % 3}.tif")[row:, col:]
        wanted = stored[: SIZE[0], : SIZE[1]].transpose(2, 0, 1) / 255 * 4 - 2
        assert np.abs(whole(source, number) - wanted).max() < 1e-6
    assert len({*places}) > 50
    assert min(row for row, _ in places) < 4 < 20 < max(row for row, _ in places)
    assert [corner(cropped(folder), i) for i in range(6)] == places[:6]
    assert [corner(cropped(folder, seed=1), i) for i in range(6)] != places[:6]
    for task in ("evaluate", "predict"):  # they see the middle
        assert corner(cropped(folder, task=task), 0) == ((40 - 16) // 2, (50 - 20) // 2)
    # Targets of pairs are cut at the place of their image. Rows and columns rise in a line, so
    # that a smaller copy has the same means.
    pairs = cropped(folder, "pairs", (8, 10))
    first = pairs.target(0, (0, 16), (0, 20))
    assert not np.array_equal(first, pairs.target(len(pairs), (0, 16), (0, 20)))
    assert np.abs(whole(pairs, 0, (8, 10))[:2].mean() - first[:2].mean()) < 0.01


@pytest.mark.parametrize("split", ["all", "train"])
def test_label_maps_are_cut_at_the_place_of_their_image(folder, split):
    source = cropped(folder, split=split)
    for number in range(12):
        blue = (whole(source, number)[2] + 2) / 4 * 255  # 80 times the class
        labels = source.target(number, (0, SIZE[0]), (0, SIZE[1]))
        assert np.array_equal((blue / 80).round(), labels)
