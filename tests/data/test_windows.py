"""A window is bit for bit its part of the whole image in every source, and reads only that part."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import tifffile
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from PIL.PngImagePlugin import PngImageFile

from hires.core.augmentations import in_order
from hires.core.config.run_config import from_dict
from hires.data import image_fit
from hires.data.formats import pillow
from hires.data.formats.tiff import TiffImage
from hires.data.image_fit import fitted, resize, taps
from hires.data.make_data import make_data
from hires.data.opening import AugmentedSource, PairSource, open_data
from hires.data.source import SOURCES as REGISTERED
from hires.data.source import Source
from tests.helpers.image_files import cifar10_folder

H, W = 70, 53
LAYOUTS: dict[str, dict[str, Any]] = {
    "tiled": {"tile": (16, 32), "compression": "zlib"},
    "stripped": {"rowsperstrip": 9, "compression": "zlib"},
    "mapped": {},
    "planes": {"tile": (32, 16), "compression": "zlib", "planarconfig": "separate"},
}
AMOUNTS = {float: 0.3, int: 3, bool: True}
CHANGES = {  # every augmentation there is
    name: AMOUNTS.get(one.kind) or one.amount.metadata["choices"][-1]
    for name, one in in_order().items()
}
MADE = {"length": 5, "classes": 2}
# Keys of the data of each kind of source, and of the run; paths lie in the fixture's folder.
SOURCES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "synthetic": (MADE, {"image": [70, 33]}),
    "one pixel": (MADE, {"image": [1, 1]}),
    "hard": ({"name": "hard", **MADE}, {}),
    "textures": ({"name": "textures", **MADE}, {}),
    "digits": ({"name": "digits", "fit": "resize"}, {}),
    "cifar10": ({"name": "cifar10", "path": "cifar"}, {"image": [32, 32]}),
    "folder": ({"name": "folder", "path": "mapped", "fit": "error"}, {"image": [H, W]}),
    **{
        f"{layout}, {fit}": ({"name": "folder", "path": layout, "fit": fit}, {})
        for layout, fit in itertools.product(LAYOUTS, ("resize", "crop"))
    },
    "changed": (MADE, {"augment": CHANGES}),
    "changed, square": (MADE, {"augment": CHANGES, "image": [16, 16]}),
    "random crop": ({"name": "folder", "path": "tiled", "fit": "random_crop"}, {}),
    "random crop of arrays": ({"name": "cifar10", "path": "cifar", "fit": "random_crop"}, {}),
    "random crop of slides": (
        {"name": "slide", "path": "slides", "cut": "whole", "fit": "random_crop"},
        {},
    ),
    **{
        f"pairs of scale {scale}": (
            {"name": "pairs", "path": "tiled/b", "fit": fit},
            {"model": {"name": "edsr", "scale": scale}},
        )
        for scale, fit in ((2, "crop"), (3, "resize"))
    },
    "masks": ({"name": "masks", "path": "masks", "classes": 3}, {}),
    "masks, changed": (
        {"name": "masks", "path": "masks", "classes": 3, "ignore": 255, "fit": "random_crop"},
        {"augment": {"flip": "both", "shift": 2}},
    ),
    "slides, patches": ({"name": "slide", "path": "slides", "tissue": 0.0, "level": 1}, {}),
    "slides, whole": ({"name": "slide", "path": "slides", "cut": "whole"}, {}),
    "some of them": ({**MADE, "length": 20, "split": "train", "validation": 0.5}, {}),
    "classes in order": ({"name": "folder", "path": "tiled", "order": ["b", "a"]}, {}),
}


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with small files of every kind."""
    root, random = tmp_path_factory.mktemp("sources"), np.random.default_rng(0)
    for layout, how in LAYOUTS.items():
        for name in ("a", "b"):
            (root / layout / name).mkdir(parents=True)
            shape = (3, H, W) if layout == "planes" else (H, W, 3)
            stored = random.integers(0, 256, shape, np.uint8)
            tifffile.imwrite(root / layout / name / "1.tif", stored, photometric="rgb", **how)
    make_data("masks", root / "masks", 3, 3, (40, 50), 0)
    make_data("slides", root / "slides", 2, 2, (192, 256), 0)
    cifar10_folder(root / "cifar")
    return root


def source_named(kind: str, root: Path) -> tuple[Any, dict[str, tuple[Any, int, int]]]:
    """Returns a source, and what reads windows of what size of it."""
    data, keys = SOURCES[kind]
    if "path" in data:
        data = {**data, "path": str(root / data["path"])}
    config = from_dict({"image": [20, 26], **keys, "data": data, "batch": 2})
    source, size = open_data(config), (config.height, config.width)
    readers = {"image": (source.window, *size)}
    if source.has_maps:
        readers["labels"] = (source.target, *size)
    if isinstance(source, PairSource):
        scale = config.model.scale
        readers["target"] = (source.target, scale * size[0], scale * size[1])
    return source, readers


def span_of(data: st.DataObject, length: int) -> tuple[int, int]:
    """Returns a part of some rows or columns."""
    first = data.draw(st.integers(0, length - 1))
    return first, data.draw(st.integers(first + 1, length))


@pytest.mark.parametrize("kind", SOURCES)
def test_window_is_bitwise_part_of_the_whole_image(kind, root):
    source, readers = source_named(kind, root)

    @given(st.data())
    @settings(max_examples=15, deadline=None, derandomize=True, database=None)
    def check(data: st.DataObject) -> None:
        epochs = 3 if isinstance(source, AugmentedSource) else 1
        number = data.draw(st.integers(0, epochs * len(source) - 1))
        for what, (read, height, width) in readers.items():
            whole = read(number, (0, height), (0, width))
            assert whole.shape == ((height, width) if what == "labels" else (3, height, width))
            spans = [span_of(data, length) for length in (height, width)]
            window = read(number, *spans)
            assert what == "labels" or window.flags["C_CONTIGUOUS"]
            rows, cols = (slice(*span) for span in spans)
            np.testing.assert_array_equal(window, whole[..., rows, cols], strict=True)

    check()
    if kind.startswith("random crop"):  # each epoch has another
        [(read, height, width)] = readers.values()
        numbers = range(0, 4 * len(source), len(source))
        assert len({read(i, (0, height), (0, width)).tobytes() for i in numbers}) == 4


def test_every_kind_of_data_has_a_source_here():
    kinds = {data.get("name", "synthetic") for data, _ in SOURCES.values()}
    assert {*REGISTERED} - {"images"} <= kinds


def test_input_of_a_pair_is_the_target_as_pillow_shrinks_it(root):
    source, _ = source_named("pairs of scale 2", root)
    small, large = source.window(0, (0, 20), (0, 26)), source.target(0, (0, 40), (0, 52))
    for shrunk, channel in zip(small, large, strict=True):
        image = Image.fromarray(channel).resize((26, 20), Image.Resampling.BICUBIC)
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


@given(source=SIZES, target=SIZES, data=st.data())
@settings(max_examples=40, deadline=None, derandomize=True, database=None)
def test_fitted_windows_of_all_sizes_are_bitwise_parts(source, target, data):
    image, spans = random_image(*source), [span_of(data, length) for length in target]
    band_pixels = data.draw(st.sampled_from([image_fit.BAND_PIXELS, 4 * source[1]]))
    for fit in ("resize", "crop"):
        every = ((0, target[0]), (0, target[1]))
        whole = fitted(reader(image), source, target, fit, *every, fill=127.5)
        assert whole.shape[:2] == target
        with mock.patch.object(image_fit, "BAND_PIXELS", band_pixels):
            window = fitted(reader(image), source, target, fit, *spans, fill=127.5)
        rows, cols = (slice(*span) for span in spans)
        np.testing.assert_array_equal(window, whole[rows, cols])


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


def test_window_reads_only_the_pixels_that_it_depends_on():
    seen: list = []
    # Output row r covers source rows 2r - 1 to 2r + 2, so rows 10 to 19 need 19 to 40.
    resize(reader(random_image(100, 100), seen), (100, 100), (50, 50), (10, 20), (0, 5))
    place = {"fill": 0.0, "place": (0.5, 0.999)}
    random_crop = (100, 90), (30, 30), "random_crop", (0, 10), (5, 9)
    fitted(reader(random_image(100, 90), seen), *random_crop, **place)

    class Large(Source):
        def window(self, i, rows, cols, place=None):
            seen.append((rows, cols))
            edge = np.where(np.arange(*cols) < 41, -2, 2).astype(np.float32)
            return np.broadcast_to(edge, (3, rows[1] - rows[0], len(edge))).copy()

    small = PairSource(Large(), (40, 40), 2, 3).window(0, (10, 20), (0, 40))
    assert seen == [((19, 41), (0, 11)), ((35, 45), (65, 69)), ((20 - 3, 40 + 3), (0, 80))]
    # The cubic kernel swings beyond an edge; a network has never seen blacker than black.
    assert (small.min(), small.max()) == (-2, 2)


def test_only_tiles_and_strips_that_overlap_the_window_are_read(source_of, pixels, monkeypatch):
    segments: list[int] = []
    real = TiffImage._segment
    monkeypatch.setattr(
        TiffImage, "_segment", lambda self, page, at: segments.append(at) or real(self, page, at)
    )
    for layout, height, rows, cols, expected in (  # tiles are 16 x 32, two in a row
        ("tiled", H, (16, 33), (0, 32), [2, 4]),
        ("tiled", H, (16, 32), (0, 32), [2]),  # of the next row nothing, it read that, too
        ("tiled", H, (69, 70), (31, 33), [8, 9]),
        ("tiled", H // 2, (0, 7), (0, 30), [0]),  # rows 0 to 6 are made of rows 0 to 14
        ("stripped", H, (9, 28), (0, 1), [1, 2, 3]),
        ("stripped", H, (9, 27), (0, 1), [1, 2]),
    ):
        source = source_of(pixels(H, W, 3), size=(height, W), fit="resize", **LAYOUTS[layout])
        source.window(0, rows, cols)
        assert segments == expected, layout
        segments.clear()


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
    monkeypatch.setattr(pillow, "CACHE_BYTES", 2 * 16 * 16 * 3)
    before = [source.window(i, (0, 16), (0, 16)) for i in (0, 1, 0, 2, 0, 1)][-1]
    assert decoded == ["a.png", "b.png", "c.png", "b.png"]
    source_of(Image.fromarray(pixels(16, 16, 3) // 2), "b.png")
    assert (source.window(1, (0, 16), (0, 16)) != before).any()
