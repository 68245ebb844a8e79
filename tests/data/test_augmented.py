"""Random changes and crops follow from seed, epoch and image alone, alike in every layout."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import tifffile
from PIL import Image

from hires.core.config.data_config import AugmentConfig
from hires.core.errors import ConfigError
from hires.data.augmented import (
    AugmentedSource,
    ImageChange,
    drawn_change,
    nearest_window,
    seen_through,
    turned_hues,
)
from hires.data.opening import open_data
from hires.data.source import Source
from tests.helpers import reference
from tests.helpers.layouts import config_of

EVERYTHING = AugmentConfig("both", True, 0.3, 3, 0.3, 0.3, 0.3, 0.2)
KEYS = tuple(vars(EVERYTHING).values())


class Counted(Source):
    """Images of random numbers that count the pixels that are read."""

    num_classes, class_names = 2, ("a", "b")

    def __init__(self, size, count=5):
        self.pixels = np.random.default_rng(0).uniform(-2, 2, (count, 3, *size)).astype(np.float32)
        self.read = 0

    def __len__(self):
        return len(self.pixels)

    def window(self, i, rows, cols, place=None):
        self.read += (rows[1] - rows[0]) * (cols[1] - cols[0])
        return self.pixels[i][:, slice(*rows), slice(*cols)]


def test_changed_window_reads_only_what_it_shows():
    size = (64, 64)
    images = Counted(size)
    source = AugmentedSource(images, size, EVERYTHING, 0)
    for number in range(30):
        images.read = 0
        source.window(number, (0, 16), (0, 64))
        assert images.read <= 16 * 64 + 4 * 64  # of a resized part the neighbours of its border


def test_changes_of_place_are_those_of_numpy():
    square, size = ((0, 12), (0, 12)), (12, 12)
    plain = ImageChange(square, (0, 0), (False, False), 0, 1.0, 1.0, 1.0)
    image = np.random.default_rng(1).normal(size=(2, 12, 12))

    def seen(**changes):
        def read(rows, cols):
            return image[:, slice(*rows), slice(*cols)]

        return seen_through(plain._replace(**changes), size, read, (0, 12), (0, 12))

    assert np.array_equal(seen(), image)
    assert np.array_equal(seen(flips=(True, False)), image[:, ::-1])
    assert np.array_equal(seen(flips=(False, True)), image[:, :, ::-1])
    for turns in range(4):
        assert np.array_equal(seen(turns=turns), np.rot90(image, turns, (1, 2)))
    both = np.rot90(image[:, ::-1], 1, (1, 2))
    assert np.array_equal(seen(flips=(True, False), turns=1), both)
    moved = seen(shift=(2, -3))
    assert np.array_equal(moved[:, 2:, :9], image[:, :10, 3:].astype(np.float32))
    assert not moved[:, :2].any()
    assert not moved[:, :, 9:].any()
    part = seen(part=((2, 8), (4, 10)))
    assert part.min() >= image[:, 2:8, 4:10].min()
    assert np.abs(part.mean() - image[:, 2:8, 4:10].mean()) < 0.1
    labels = np.arange(36).reshape(6, 6)  # they are copied and never mixed
    nearest = nearest_window(
        lambda rows, cols: labels[slice(*rows), slice(*cols)], (6, 6), (12, 3), (2, 12), (0, 3)
    )
    assert np.array_equal(nearest, labels[np.arange(2, 12) // 2][:, [1, 3, 5]])


@pytest.mark.parametrize("turn", [0.0, 0.13, -0.5, 0.49])
def test_hues_are_turned_as_in_hsv(turn):
    pixels = np.random.default_rng(5).uniform(-2, 2, (3, 7, 9)).astype(np.float32)
    pixels[:, 0], pixels[:, 1, :2], pixels[0, 2] = 0.5, [[2], [-2], [-2]], pixels[1, 2]
    wanted = reference.turned_hues((pixels.astype(np.float64) + 2) / 4, turn) * 4 - 2
    # A hue is a quotient of float32 between 0 and 6, and a colour spans 4: 4 * 6 * 2^-23.
    assert np.abs(turned_hues(pixels, turn) - wanted).max() < 4e-6


@pytest.mark.parametrize("name", ["brightness", "contrast", "saturation"])
def test_colours_are_scaled_about_grey_and_black(name):
    # Brightness scales from black, contrast from grey, saturation from the luminance.
    images = Counted((8, 8))
    images.pixels = images.pixels / 4
    image = images.pixels[0].astype(np.float64)
    source = AugmentedSource(images, (8, 8), AugmentConfig(**{name: 0.3}), 2)
    factor = getattr(source.change(0), name)
    light = np.tensordot([0.299, 0.587, 0.114], image, 1)
    base = {"brightness": -2.0, "contrast": 0.0, "saturation": light}[name]
    window = source.window(0, (0, 8), (0, 8))
    np.testing.assert_allclose(window, base + factor * (image - base), atol=1e-6)
    assert abs(factor - 1) > 0.01


def test_changes_differ_between_epochs_and_images_and_have_the_documented_shares():
    places = [(epoch, image) for epoch in range(20) for image in (0, 1)]
    every = [drawn_change(KEYS, (32, 32), 0, *place) for place in places]
    assert len({*every}) == 40
    drawn_change.cache_clear()
    assert [drawn_change(KEYS, (32, 32), 0, *place) for place in places] == every
    assert drawn_change(KEYS, (32, 32), 1, 0, 0) != every[0]
    many = [drawn_change(KEYS, (100, 100), 0, 0, image) for image in range(1000)]
    for place in (0, 1):
        assert 440 < sum(one.flips[place] for one in many) < 560
    assert all(200 < count < 300 for count in Counter(one.turns for one in many).values())
    for flip, flips in (("vertical", (True, False)), ("horizontal", (False, True))):
        drawn = {drawn_change((flip, *KEYS[1:]), (9, 9), 0, 0, image).flips for image in range(20)}
        assert drawn == {(False, False), flips}
    areas = [np.prod([b - a for a, b in one.part]) / 1e4 for one in many]
    assert 0.28 < min(areas) < 0.33 < 0.98 < max(areas)
    assert {one.shift[0] for one in many} == set(range(-3, 4))
    assert 0.7 <= min(one.contrast for one in many) < 0.71
    assert {drawn_change(KEYS, (10, 20), 0, 0, image).turns for image in range(50)} == {0, 2}


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
