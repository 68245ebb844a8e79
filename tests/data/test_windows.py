"""A window is bit for bit its part of the whole image in every source, and reads only that part."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tifffile
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from PIL.PngImagePlugin import PngImageFile

from hires.core.config.data_config import DataConfig
from hires.core.config.run_config import from_dict
from hires.data import image_fit, whole
from hires.data.image_fit import crop, fitted, resize, taps
from hires.data.source import PairSource, open_data, open_source
from hires.data.tiff import TiffImage

H, W = 70, 53
LAYOUTS = {
    "tiled": {"tile": (16, 32), "compression": "zlib"},
    "stripped": {"rowsperstrip": 9, "compression": "zlib"},
    "mapped": {},
    "planes": {"tile": (32, 16), "compression": "zlib", "planarconfig": "separate"},
}
MADE = {
    "synthetic": ({"classes": 7}, (70, 33)),
    "one pixel": ({"classes": 7}, (1, 1)),
    "hard": ({"name": "hard", "classes": 5}, (24, 18)),
    "digits resized": ({"name": "digits", "fit": "resize"}, (20, 15)),
    "digits cropped": ({"name": "digits", "fit": "crop"}, (20, 15)),
}
STORED = [f"{layout} {fit}" for layout in LAYOUTS for fit in ("error", "resize", "crop")]


def windows(size: tuple[int, int], count: int = 20) -> Iterator[list[tuple[int, int]]]:
    """Yields rows and columns of random windows of an image."""
    random = np.random.default_rng(0)
    for _ in range(count):
        ends = [sorted(random.choice(length + 1, 2, replace=False).tolist()) for length in size]
        yield [(first, end) for first, end in ends]


@pytest.mark.parametrize("kind", [*MADE, *STORED])
def test_window_is_bitwise_part_of_the_whole_image(kind, source_of, pixels):
    if kind in MADE:
        keys, size = MADE[kind]
        source = open_source(DataConfig(**keys), size, 3, seed=1)
    else:
        layout, fit = kind.split()
        size = (H, W) if fit == "error" else (31, 64)
        stored = pixels(3, H, W) if layout == "planes" else pixels(H, W, 3)
        source = source_of(stored, size=size, fit=fit, photometric="rgb", **LAYOUTS[layout])
    for number in {0, len(source) // 2, len(source) - 1}:
        image = source.window(number, (0, size[0]), (0, size[1]))
        assert image.shape == (3, *size)
        for rows, cols in windows(size):
            window = source.window(number, rows, cols)
            assert window.flags["C_CONTIGUOUS"]
            np.testing.assert_array_equal(window, image[:, slice(*rows), slice(*cols)], strict=True)
    with pytest.raises(AssertionError, match="window"):  # a bug
        source.window(0, (0, size[0] + 1), (0, 1))


@pytest.mark.parametrize("scale", [1, 2, 3, 4])
@pytest.mark.parametrize("fit", ["resize", "crop", ""])
def test_windows_of_pairs_are_bitwise_parts(tmp_path, pixels, scale, fit):
    data = {"name": "pairs", "path": str(tmp_path), "fit": fit} if fit else {}
    for number, name in enumerate(("a.png", "b.tif")):
        Image.fromarray(pixels(31, 26, 3, seed=number)).save(tmp_path / name)
    config = {"image": [9, 7], "model": {"name": "edsr", "scale": scale}, "data": data}
    source = open_data(from_dict(config))
    assert isinstance(source, PairSource)
    for number in range(2):
        small = source.window(number, (0, 9), (0, 7))
        large = source.target(number, (0, 9 * scale), (0, 7 * scale))
        assert (small.shape, large.shape) == ((3, 9, 7), (3, 9 * scale, 7 * scale))
        for rows, cols in windows((9, 7)):
            part = small[:, slice(*rows), slice(*cols)]
            np.testing.assert_array_equal(source.window(number, rows, cols), part, strict=True)
            assert np.array_equal(source.target(number, rows, cols),
                                  large[:, slice(*rows), slice(*cols)])  # fmt: skip
        if scale > 1:  # the input is the target shrunk as Pillow shrinks
            for shrunk, channel in zip(small, large, strict=True):
                image = Image.fromarray(channel).resize((7, 9), Image.Resampling.BICUBIC)
                np.testing.assert_allclose(shrunk, np.asarray(image).clip(-2, 2), atol=1e-5)


def reader(image: np.ndarray, seen: list | None = None):
    """Reads an array as a file is read, and notes where."""

    def read(rows, cols):
        if seen is not None:
            seen.append((rows, cols))
        for (start, stop), length in zip((rows, cols), image.shape, strict=False):
            assert 0 <= start < stop <= length
        return image[slice(*rows), slice(*cols)]

    return read


def random_image(height: int, width: int) -> np.ndarray:
    random = np.random.default_rng(height * 100 + width)
    return random.integers(0, 256, (height, width, 3), dtype=np.uint8)


SIZES = st.tuples(st.integers(1, 40), st.integers(1, 40))


@given(source=SIZES, target=SIZES)
@settings(max_examples=60, deadline=None, derandomize=True, database=None)
def test_fitted_windows_of_all_sizes_are_bitwise_parts(source, target):
    image = random_image(*source)
    for fit in ("resize", "crop"):
        every = ((0, target[0]), (0, target[1]))
        made = fitted(reader(image), source, target, fit, *every, fill=127.5)
        assert made.shape[:2] == target
        for rows, cols in windows(target, 4):
            window = fitted(reader(image), source, target, fit, rows, cols, fill=127.5)
            np.testing.assert_array_equal(window, made[slice(*rows), slice(*cols)])


@pytest.mark.parametrize(
    ("source", "target"),
    [((7, 9), (7, 9)), ((7, 9), (20, 31)), ((64, 50), (9, 17)), ((33, 8), (32, 40)),
     ((1, 1), (3, 2))],
)  # fmt: skip
def test_resizing_is_the_antialiased_bilinear_of_torch(source, target):
    image = random_image(*source)
    ours = resize(reader(image), source, target, (0, target[0]), (0, target[1]))
    plain = torch.from_numpy(image.transpose(2, 0, 1)[None].astype(np.float64))
    theirs = torch.nn.functional.interpolate(plain, target, mode="bilinear", antialias=True)
    np.testing.assert_allclose(ours, theirs[0].numpy().transpose(1, 2, 0), atol=255 * 1e-6)
    axis = taps(source[0], target[0])
    np.testing.assert_allclose(axis.weight.sum(axis=1), 1, atol=1e-6)


def test_resizing_in_bands_gives_the_same_bits(monkeypatch):
    image = random_image(61, 47)
    made = resize(reader(image), (61, 47), (23, 30), (2, 21), (0, 30))
    seen: list = []
    monkeypatch.setattr(image_fit, "BAND_PIXELS", 47 * 10)
    banded = resize(reader(image, seen), (61, 47), (23, 30), (2, 21), (0, 30))
    assert len(seen) > 3
    np.testing.assert_array_equal(banded, made)


def test_crop_keeps_the_middle_and_sets_smaller_images_in_fill():
    image = np.arange(36, dtype=np.uint8).reshape(6, 6, 1)
    middle = crop(reader(image), (6, 6), (2, 4), (0, 2), (0, 4), fill=0)[..., 0]
    assert middle.tolist() == [[13, 14, 15, 16], [19, 20, 21, 22]]
    small = np.array([[[1], [2]]], np.uint8)
    made = crop(reader(small), (1, 2), (3, 4), (0, 3), (0, 4), fill=9)[..., 0]
    assert made.tolist() == [[9, 9, 9, 9], [9, 1, 2, 9], [9, 9, 9, 9]]
    beside = crop(reader(small), (1, 2), (10, 10), (0, 3), (4, 6), fill=127.5)
    assert (beside == 127.5).all()


def test_window_reads_only_the_pixels_that_it_depends_on():
    seen: list = []
    # Output row r covers source rows 2r - 1 to 2r + 2, so rows 10 to 19 need 19 to 40.
    resize(reader(random_image(100, 100), seen), (100, 100), (50, 50), (10, 20), (0, 5))
    place = {"fill": 0.0, "place": (0.5, 0.999)}
    random_crop = (100, 90), (30, 30), "random_crop", (0, 10), (5, 9)
    fitted(reader(random_image(100, 90), seen), *random_crop, **place)

    class Large:
        def window(self, i, rows, cols):
            seen.append((rows, cols))
            edge = np.where(np.arange(*cols) < 41, -2, 2).astype(np.float32)
            return np.broadcast_to(edge, (3, rows[1] - rows[0], len(edge))).copy()

    small = PairSource(Large(), (40, 40), 2, 3).window(0, (10, 20), (0, 40))
    assert seen == [((19, 41), (0, 11)), ((35, 45), (65, 69)), ((20 - 3, 40 + 3), (0, 80))]
    # The cubic kernel swings beyond an edge; a network has never seen blacker than black.
    assert (small.min(), small.max()) == (-2, 2)


@pytest.fixture
def segments(monkeypatch) -> list[int]:
    """Notes which tiles or strips are read from files."""
    read: list[int] = []
    real = TiffImage._segment
    monkeypatch.setattr(
        TiffImage, "_segment", lambda self, index: read.append(index) or real(self, index)
    )
    return read


@pytest.mark.parametrize(
    ("layout", "size", "rows", "cols", "read"),
    [  # tiles are 16 x 32, two in a row
        ("tiled", (H, W), (16, 33), (0, 32), [2, 4]),
        ("tiled", (H, W), (16, 32), (0, 32), [2]),  # of the next row nothing, it read that, too
        ("tiled", (H, W), (69, 70), (31, 33), [8, 9]),
        ("tiled", (H // 2, W), (0, 7), (0, 30), [0]),  # rows 0 to 6 are made of rows 0 to 14
        ("stripped", (H, W), (9, 28), (0, 1), [1, 2, 3]),
        ("stripped", (H, W), (9, 27), (0, 1), [1, 2]),
    ],
)
def test_only_tiles_and_strips_that_overlap_the_window_are_read(
    source_of, pixels, segments, layout, size, rows, cols, read
):
    source_of(pixels(H, W, 3), size=size, fit="resize", **LAYOUTS[layout]).window(0, rows, cols)
    assert segments == read


def test_tiles_that_the_file_leaves_out_are_black(source_of, pixels, tmp_path):
    stored = pixels(32, 32, 3)
    source = source_of(stored, size=(32, 32), tile=(16, 16), compression="zlib")
    with tifffile.TiffFile(tmp_path / "data" / "only" / "a.tif", mode="r+") as file:
        counts = list(file.pages[0].databytecounts)
        counts[1] = 0
        file.pages[0].tags["TileByteCounts"].overwrite(counts)
    window = source.window(0, (0, 32), (0, 32))
    assert (window[:, :16, 16:] == -2).all()
    expected = stored.transpose(2, 0, 1)[:, 16:] / 63.75 - 2
    np.testing.assert_allclose(window[:, 16:], expected, atol=1e-5)


def test_whole_files_are_decoded_once_while_there_is_room_and_anew_if_changed(
    source_of, pixels, monkeypatch
):
    decoded, real = [], PngImageFile.load

    def load(image):
        decoded.extend([Path(image.filename).name] if image.tile else [])  # once: then it is empty
        return real(image)

    monkeypatch.setattr(PngImageFile, "load", load)
    for name in ("a.png", "b.png", "c.png"):
        source = source_of(Image.fromarray(pixels(16, 16, 3)), name)
    monkeypatch.setattr(whole, "CACHE_BYTES", 2 * 16 * 16 * 3)
    before = [source.window(i, (0, 16), (0, 16)) for i in (0, 1, 0, 2, 0, 1)][-1]
    assert decoded == ["a.png", "b.png", "c.png", "b.png"]
    source_of(Image.fromarray(pixels(16, 16, 3) // 2), "b.png")
    assert (source.window(1, (0, 16), (0, 16)) != before).any()


def test_made_images_follow_from_seed_and_number_and_stay_in_range():
    for name in ("synthetic", "hard", "textures"):
        one, again, other = (
            open_source(DataConfig(name=name, classes=12, length=n), (40, 40), 3, seed)
            for n, seed in ((48, 0), (50, 0), (48, 1))
        )
        images, same, others = (
            np.stack([source.window(i, (0, 40), (0, 40)) for i in range(48)])
            for source in (one, again, other)
        )
        np.testing.assert_array_equal(images, same)
        assert (images != others).any((1, 2, 3)).all()
        assert all((a != b).any() for a, b in itertools.pairwise(images[::12]))  # of one class
        assert images.dtype == np.float32
        assert -2 <= images.min() < -1 < 1 < images.max() <= 2
        assert abs(images.mean()) < 0.2
        assert [one.label(i) for i in range(13)] == [*range(12), 0]
        assert [*one.class_names] == sorted(one.class_names)
