import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hires.data import image_fit
from hires.data.image_fit import crop, resize, taps

sizes = st.integers(1, 40)


def reader(image: np.ndarray, seen: list | None = None):
    def read(rows, cols):
        if seen is not None:
            seen.append((rows, cols))
        for (start, stop), length in zip((rows, cols), image.shape, strict=False):
            assert 0 <= start < stop <= length
        return image[slice(*rows), slice(*cols)]

    return read


def random_image(height: int, width: int, samples: int = 3) -> np.ndarray:
    random = np.random.default_rng(height * 100 + width)
    return random.integers(0, 256, (height, width, samples), dtype=np.uint8)


def some_window(data, target):
    spans = []
    for length in target:
        start = data.draw(st.integers(0, length - 1))
        spans.append((start, data.draw(st.integers(start + 1, length))))
    return spans


@given(data=st.data(), source=st.tuples(sizes, sizes), target=st.tuples(sizes, sizes))
@settings(max_examples=150, deadline=None, derandomize=True, database=None)
def test_window_of_a_resized_image_is_bitwise_its_part(data, source, target):
    image = random_image(*source)
    whole = resize(reader(image), source, target, (0, target[0]), (0, target[1]))
    assert whole.shape[:2] == target
    rows, cols = some_window(data, target)
    window = resize(reader(image), source, target, rows, cols)
    np.testing.assert_array_equal(window, whole[slice(*rows), slice(*cols)], strict=True)


@given(data=st.data(), source=st.tuples(sizes, sizes), target=st.tuples(sizes, sizes))
@settings(max_examples=150, deadline=None, derandomize=True, database=None)
def test_window_of_a_cropped_image_is_bitwise_its_part(data, source, target):
    image = random_image(*source)
    everything = ((0, target[0]), (0, target[1]))
    whole = crop(reader(image), source, target, *everything, fill=127.5)
    assert whole.shape[:2] == target
    rows, cols = some_window(data, target)
    window = crop(reader(image), source, target, rows, cols, fill=127.5)
    np.testing.assert_array_equal(window, whole[slice(*rows), slice(*cols)])


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ((7, 9), (7, 9)),
        ((7, 9), (20, 31)),
        ((64, 50), (9, 17)),
        ((33, 8), (32, 40)),
        ((1, 1), (3, 2)),
    ],
)
def test_resizing_is_the_antialiased_bilinear_of_torch(source, target):
    image = random_image(*source)
    ours = resize(reader(image), source, target, (0, target[0]), (0, target[1]))
    theirs = torch.nn.functional.interpolate(
        torch.from_numpy(image.transpose(2, 0, 1)[None].astype(np.float64)),
        target,
        mode="bilinear",
        antialias=True,
    )
    np.testing.assert_allclose(ours, theirs[0].numpy().transpose(1, 2, 0), atol=255 * 1e-6)


def test_window_of_a_resized_image_reads_only_what_it_depends_on():
    seen: list = []
    resize(reader(random_image(100, 100), seen), (100, 100), (50, 50), (10, 20), (0, 5))
    # Output row r covers source rows 2r - 1 to 2r + 2, so rows 10 to 19 need 19 to 40.
    assert seen == [((19, 41), (0, 11))]


def test_resizing_in_bands_gives_the_same_bits(monkeypatch):
    image = random_image(61, 47)
    whole = resize(reader(image), (61, 47), (23, 30), (2, 21), (0, 30))
    seen: list = []
    monkeypatch.setattr(image_fit, "BAND_PIXELS", 47 * 10)
    banded = resize(reader(image, seen), (61, 47), (23, 30), (2, 21), (0, 30))
    assert len(seen) > 3
    np.testing.assert_array_equal(banded, whole)


def test_taps_of_a_line_sum_to_one_and_stay_inside():
    for source, target in [(1, 7), (7, 1), (10, 10), (1000, 37), (37, 1000)]:
        axis = taps(source, target)
        np.testing.assert_allclose(axis.weight.sum(axis=1), 1, atol=1e-6)
        assert axis.index.min() >= 0
        assert axis.index.max() < source
    assert taps(10, 10).index.shape == (10, 1)


def test_cropping_keeps_the_middle():
    image = np.arange(36, dtype=np.uint8).reshape(6, 6, 1)
    np.testing.assert_array_equal(
        crop(reader(image), (6, 6), (2, 4), (0, 2), (0, 4), fill=0)[..., 0],
        [[13, 14, 15, 16], [19, 20, 21, 22]],
    )


def test_a_smaller_image_is_set_in_the_middle():
    image = np.array([[[1], [2]]], np.uint8)
    np.testing.assert_array_equal(
        crop(reader(image), (1, 2), (3, 4), (0, 3), (0, 4), fill=9)[..., 0],
        [[9, 9, 9, 9], [9, 1, 2, 9], [9, 9, 9, 9]],
    )


def test_a_window_beside_the_image_holds_the_fill_only():
    image = np.ones((2, 2, 3), np.uint8)
    window = crop(reader(image), (2, 2), (10, 10), (0, 3), (4, 6), fill=127.5)
    np.testing.assert_array_equal(window, np.full((3, 2, 3), 127.5))
