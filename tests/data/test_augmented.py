"""Do random changes of images follow from seed, epoch and image alone, window by window?"""

from __future__ import annotations

import dataclasses
from collections import Counter

import numpy as np
import pytest

from hires.core.config.augment_config import AugmentConfig
from hires.core.errors import ConfigError
from hires.data.augmented import (
    AugmentedSource,
    ImageChange,
    drawn_change,
    nearest_window,
    seen_through,
    turned_hues,
)
from hires.data.source import open_data
from tests.helpers import reference
from tests.helpers.layouts import config_of
from tests.helpers.saved import attempt, killed_attempt, losses, make

EVERYTHING = AugmentConfig("both", True, 0.3, 3, 0.3, 0.3, 0.3, 0.2)


class Counted:
    """Images of random numbers that count the pixels that are read."""

    num_classes, class_names = 2, ("a", "b")

    def __init__(self, size, count=5):
        self.pixels = np.random.default_rng(0).uniform(-2, 2, (count, 3, *size)).astype(np.float32)
        self.read = 0

    def __len__(self):
        return len(self.pixels)

    def label(self, i):
        return i % 2

    def window(self, i, rows, cols, place=None):
        self.read += (rows[1] - rows[0]) * (cols[1] - cols[0])
        return self.pixels[i][:, slice(*rows), slice(*cols)]


@pytest.mark.parametrize("size", [(16, 16), (13, 18)])
def test_every_window_is_that_part_of_the_whole_image(size):
    source = AugmentedSource(Counted(size), size, EVERYTHING, 3)
    for number in range(40):
        whole = source.window(number, (0, size[0]), (0, size[1]))
        assert whole.shape == (3, *size)
        assert np.abs(whole).max() <= 2
        for rows, cols in (((0, 5), (0, size[1])), ((4, 11), (3, 9)), ((5, size[0]), (7, 8))):
            part = source.window(number, rows, cols)
            assert np.array_equal(part, whole[:, slice(*rows), slice(*cols)])


def test_changes_of_place_are_those_of_numpy():
    size, plain = (
        (12, 12),
        ImageChange(((0, 12), (0, 12)), (0, 0), (False, False), 0, 1.0, 1.0, 1.0),
    )
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


@pytest.mark.parametrize("turn", [0.0, 0.13, -0.5, 0.49])
def test_hues_are_turned_as_in_hsv(turn):
    pixels = np.random.default_rng(5).uniform(-2, 2, (3, 7, 9)).astype(np.float32)
    pixels[:, 0], pixels[:, 1, :2], pixels[0, 2] = 0.5, [[2], [-2], [-2]], pixels[1, 2]
    wanted = reference.turned_hues((pixels.astype(np.float64) + 2) / 4, turn) * 4 - 2
    # A hue is a quotient of float32 between 0 and 6, and a colour spans 4: 4 * 6 * 2^-23.
    assert np.abs(turned_hues(pixels, turn) - wanted).max() < 4e-6


def test_labels_are_copied_and_never_mixed():
    labels = np.arange(36).reshape(6, 6)
    made = nearest_window(
        lambda rows, cols: labels[slice(*rows), slice(*cols)], (6, 6), (12, 3), (2, 12), (0, 3)
    )
    assert np.array_equal(made, labels[np.arange(2, 12) // 2][:, [1, 3, 5]])


def test_only_what_a_window_shows_is_read():
    size = (64, 64)
    held = Counted(size)
    source = AugmentedSource(held, size, EVERYTHING, 0)
    for number in range(30):
        held.read = 0
        source.window(number, (0, 16), (0, 64))
        assert held.read <= 16 * 64 + 4 * 64  # of a resized part the neighbours of its border


def test_changes_differ_between_epochs_and_images_and_follow_the_seed():
    keys = tuple(vars(EVERYTHING).values())
    every = [
        drawn_change(keys, (32, 32), 0, epoch, image) for epoch in range(20) for image in (0, 1)
    ]
    assert len({*every}) == 40
    drawn_change.cache_clear()
    again = [
        drawn_change(keys, (32, 32), 0, epoch, image) for epoch in range(20) for image in (0, 1)
    ]
    assert again == every
    assert drawn_change(keys, (32, 32), 1, 0, 0) != every[0]


def test_shares_of_changes_are_as_the_docs_say():
    keys = tuple(vars(EVERYTHING).values())
    every = [drawn_change(keys, (100, 100), 0, 0, image) for image in range(4000)]
    for place in (0, 1):
        assert 0.46 < sum(one.flips[place] for one in every) / 4000 < 0.54
    turns = Counter(one.turns for one in every)
    assert all(900 < turns[k] < 1100 for k in range(4))
    areas = [np.prod([b - a for a, b in one.part]) / 1e4 for one in every]
    assert 0.28 < min(areas) < 0.33
    assert max(areas) > 0.98
    assert {one.shift[0] for one in every} == set(range(-3, 4))
    assert 0.7 <= min(one.contrast for one in every) < 0.71
    wide = [drawn_change(keys, (10, 20), 0, 0, image) for image in range(50)]
    assert {one.turns for one in wide} == {0, 2}


def test_no_other_task_has_any():
    keys = {"augment": {"flip": "both"}, "image": [8, 8]}
    assert isinstance(open_data(config_of(**keys)), AugmentedSource)
    assert not isinstance(open_data(config_of(**keys, task={"name": "evaluate"})), AugmentedSource)
    assert not isinstance(open_data(config_of(image=[8, 8])), AugmentedSource)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("hue", 0.6, "at most 0.5"),
        ("crop", 1.5, "at most 1"),
        ("crop", 0.0, "above 0"),
        ("contrast", 1.0, "below 1"),
    ],
)
def test_senseless_amounts_are_refused(key, value, words):
    with pytest.raises(ConfigError, match=words):
        AugmentConfig(**{key: value})


ALL = dataclasses.asdict(EVERYTHING)
KEYS = {"augment": ALL, "image": [16, 16], "batch": 4, "data": {"length": 6, "classes": 4}}


@pytest.mark.dist
def test_every_layout_sees_the_same_pixels(tmp_path):
    layouts = [{}, {"tiles": [2, 1]}, {"tiles": [[2, 1], [1, 1]], "stages": 2}]
    found = []
    for number, parallel in enumerate(layouts):
        path = make(tmp_path / str(number), **KEYS, parallel=parallel, steps=4)
        assert set(attempt(path)) == {0}
        values = {step: loss for (step, _), loss in losses(path, 0).items() if loss is not None}
        found.append([values[step] for step in sorted(values)])
    for other in found[1:]:
        assert other == pytest.approx(found[0], rel=1e-10)
    plain = make(tmp_path / "plain", **{**KEYS, "augment": {}}, steps=4)
    assert attempt(plain) == [0]
    assert losses(plain, 0)[0, 0] != found[0][0]


@pytest.mark.dist
def test_killed_training_goes_on_with_the_same_changes(tmp_path):
    keys = {**KEYS, "checkpoint": {"every": 2}}
    whole, stopped = make(tmp_path / "a", **keys), make(tmp_path / "b", **keys)
    assert attempt(whole) == [0]
    killed_attempt(stopped, 5)
    assert attempt(stopped) == [0]
    after = losses(stopped, 1)
    assert after == {key: loss for key, loss in losses(whole, 0).items() if key in after}
    assert len(after) == 4
