"""A window costs only the part of the file that it shows, and has the same bits as the whole."""

from pathlib import Path

import numpy as np
import pytest
import tifffile
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from PIL.PngImagePlugin import PngImageFile

from hires.data import whole
from hires.data.tiff import TiffImage

H, W = 70, 53
LAYOUTS = {
    "tiled": {"tile": (16, 32), "compression": "zlib"},
    "stripped": {"rowsperstrip": 9, "compression": "zlib"},
    "mapped": {},
    "planes": {"tile": (32, 16), "compression": "zlib", "planarconfig": "separate"},
}


@pytest.fixture
def segments(monkeypatch) -> list[int]:
    """Notes which tiles or strips are read from files."""
    read: list[int] = []
    real = TiffImage._segment

    def noting(self, index):
        read.append(index)
        return real(self, index)

    monkeypatch.setattr(TiffImage, "_segment", noting)
    return read


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("fit", ["error", "resize", "crop"])
@given(data=st.data())
@settings(
    max_examples=20,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_window_is_bitwise_part_of_the_whole_image(data, source_of, pixels, layout, fit):
    stored = pixels(H, W, 3)
    if layout == "planes":
        stored = np.ascontiguousarray(stored.transpose(2, 0, 1))
    size = {"error": (H, W), "resize": (31, 64), "crop": (31, 64)}[fit]
    source = source_of(stored, size=size, fit=fit, photometric="rgb", **LAYOUTS[layout])
    whole = source.window(0, (0, size[0]), (0, size[1]))
    rows, cols = (
        tuple(sorted(data.draw(st.sets(st.integers(0, n), min_size=2, max_size=2)))) for n in size
    )
    window = source.window(0, rows, cols)
    assert window.flags["C_CONTIGUOUS"]
    np.testing.assert_array_equal(window, whole[:, slice(*rows), slice(*cols)], strict=True)


def test_only_tiles_that_overlap_the_window_are_read(source_of, pixels, segments):
    source = source_of(pixels(H, W, 3), size=(H, W), **LAYOUTS["tiled"])
    source.window(0, (16, 33), (0, 32))  # tiles are 16 x 32, two in a row
    assert segments == [2, 4]
    segments.clear()
    source.window(0, (69, 70), (31, 33))
    assert segments == [8, 9]


def test_only_strips_that_overlap_the_window_are_read(source_of, pixels, segments):
    source = source_of(pixels(H, W, 3), size=(H, W), **LAYOUTS["stripped"])
    source.window(0, (9, 28), (0, 1))
    assert segments == [1, 2, 3]


def test_a_resized_window_reads_the_tiles_below_it_only(source_of, pixels, segments):
    source = source_of(pixels(H, W, 3), size=(H // 2, W), fit="resize", **LAYOUTS["tiled"])
    source.window(0, (0, 7), (0, 30))  # rows 0 to 6 are made of rows 0 to 14
    assert segments == [0]


def test_tiles_that_the_file_leaves_out_are_black(source_of, pixels, tmp_path):
    stored = pixels(32, 32, 3)
    source = source_of(stored, size=(32, 32), tile=(16, 16), compression="zlib")
    path = tmp_path / "data" / "only" / "a.tif"
    with tifffile.TiffFile(path, mode="r+") as file:
        counts = list(file.pages[0].databytecounts)
        counts[1] = 0
        file.pages[0].tags["TileByteCounts"].overwrite(counts)
    window = source.window(0, (0, 32), (0, 32))
    assert (window[:, :16, 16:] == -2).all()
    np.testing.assert_allclose(
        window[:, 16:], stored.transpose(2, 0, 1)[:, 16:] / 63.75 - 2, atol=1e-5
    )


def test_whole_files_are_decoded_once_while_there_is_room(source_of, pixels, monkeypatch):
    decoded, real = [], PngImageFile.load

    def load(image):
        decoded.extend([Path(image.filename).name] if image.tile else [])  # once: then it is empty
        return real(image)

    monkeypatch.setattr(PngImageFile, "load", load)
    for name in ("a.png", "b.png", "c.png"):
        source = source_of(Image.fromarray(pixels(16, 16, 3)), name)
    monkeypatch.setattr(whole, "CACHE_BYTES", 2 * 16 * 16 * 3)
    for i in (0, 1, 0, 2, 0, 1):
        source.window(i, (0, 16), (0, 16))
    assert decoded == ["a.png", "b.png", "c.png", "b.png"]


def test_a_file_that_has_changed_is_decoded_again(source_of, pixels):
    first = source_of(Image.fromarray(pixels(16, 16, 3)), "a.png")
    before = first.window(0, (0, 16), (0, 16))
    source_of(Image.fromarray(pixels(16, 16, 3) // 2), "a.png")
    assert (first.window(0, (0, 16), (0, 16)) != before).any()
