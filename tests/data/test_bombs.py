"""Files that claim or decode to too much, or are cut off, end in one line that names them."""

from __future__ import annotations

import io
import os
import struct
import tracemalloc
import warnings
import zlib

import numpy as np
import pytest
import tifffile
from PIL import Image

from hires.core.errors import RunError
from tests.helpers.image_files import chunk, png

MOST = 2**22
"""Bytes that reading any of these files may take."""
SIZE = (64, 64)
ZIP = {"compression": "zlib"}


def refused(source) -> str:
    """Returns why a window is refused, without much memory being taken."""
    tracemalloc.start()
    try:
        with pytest.raises(RunError) as caught:
            source.window(0, (0, 64), (0, 64))
        assert tracemalloc.get_traced_memory()[1] < MOST
    finally:
        tracemalloc.stop()
    message = str(caught.value)
    assert message.startswith("cannot read the image ")
    assert "/data/only/a." in message
    assert "; " in message
    assert "\n" not in message
    return message


def tiff(height: int, width: int, data: bytes, compression: int = 8, **tags: int) -> bytes:
    """Returns a little-endian grey TIFF of one strip, with some tags as the test wants them."""
    values = {256: width, 257: height, 258: 8, 259: compression, 262: 1, 277: 1, 278: height}
    values |= {273: 8, 279: len(data)} | {int(key[1:]): value for key, value in tags.items()}
    entries = b"".join(struct.pack("<HHII", k, 4, 1, v) for k, v in sorted(values.items()))
    ifd = struct.pack("<H", len(values)) + entries + struct.pack("<I", 0)
    return struct.pack("<2sHI", b"II", 42, 8 + len(data)) + data + ifd


def saved(image: np.ndarray, form: str, **how) -> bytes:
    file = io.BytesIO()
    if form == "tif":
        tifffile.imwrite(file, image, **how)
    else:
        Image.fromarray(image).save(file, {"png": "PNG", "jpg": "JPEG"}[form])
    return file.getvalue()


def jpeg_of(side: int) -> bytes:
    content = bytearray(saved(np.zeros((*SIZE, 3), np.uint8), "jpg"))
    start = content.index(b"\xff\xc0")
    content[start + 5 : start + 9] = struct.pack(">HH", side, side)
    return bytes(content)


DATA, BITS, ZEROS = zlib.compress(bytes(64)), {"t258": 64, "t339": 3}, bytes(2**25)
LARGE = saved(np.zeros((4000, 5000), np.uint8), "png")
TEXT_BOMB = chunk(b"zTXt", b"comment\0\0" + zlib.compress(ZEROS))
SIDE = 2**31 - 1
# Content, its suffix, data.fit and data.max_pixels, and what the error says.
BOMBS = [
    (png(SIDE, SIDE, 16, 6, bytes(64)), "png", "error", 2**28, f"claims {SIDE} x {SIDE} pixels"),
    (LARGE, "png", "error", 2**28, "4000 x 5000 pixels where image asks"),
    (LARGE, "png", "crop", 10**6, "use data.max_pixels=20000000"),
    (png(64, 64, 8, 0, bytes(65 * 64), TEXT_BOMB), "png", "crop", 2**28, "cannot read the image"),
    (jpeg_of(65500), "jpg", "crop", 2**28, "claims 65500 x 65500 pixels"),
    (tiff(60_000, 60_000, DATA), "tif", "resize", 2**28,
     "claims 60000 x 60000 pixels in a strip or tile of 8 bits"),
    (tiff(16_384, 16_384, DATA, **BITS), "tif", "crop", 2**28,
     "of 64 bits, more than data.max_pixels=268435456"),
    (tiff(64, 64, DATA, t277=65535), "tif", "resize", 2**20, "of 524280 bits"),
]  # fmt: skip
HEADERS = [
    ({"t258": 2**32 - 1}, "cannot read"), ({"t256": 0}, "cannot read"), ({"t278": 0}, "cannot"),
    ({"t32997": 9}, "cannot read"), ({"t279": 2**32 - 1}, "cut off in segment 0"),
    ({"t273": 2**32 - 1}, "cut off in segment 0"), ({"t256": 2**31, "t257": 2}, "pixels"),
    ({"t322": 1, "t323": 1, "t324": 8, "t325": 10}, "tiles have 1 x 1 pixels"),
]  # fmt: skip
for tags, text in HEADERS:
    content = tiff(64, 64, zlib.compress(bytes(64 * 64)), **tags)
    BOMBS.append((content, "tif", "resize", 2**20, text))


def test_file_that_would_fill_the_memory_is_refused_before_it_is_decoded(source_of, tmp_path):
    for case, (content, suffix, fit, most, text) in enumerate(BOMBS):
        source = source_of(content, f"a.{suffix}", size=SIZE, fit=fit, max_pixels=most)
        assert text in refused(source), case
        (tmp_path / f"data/only/a.{suffix}").unlink()


def test_large_files_that_fit_are_read_and_the_limit_of_pillow_stays(source_of, monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    source = source_of(LARGE, "a.png", size=SIZE, fit="crop", max_pixels=20_000_000)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        source.window(0, (0, 64), (0, 64))
    assert Image.MAX_IMAGE_PIXELS == 100
    # Of a slide only the tiles of the window are decoded.
    how = {"max_pixels": 64 * 64, "tile": (16, 16), **ZIP}
    source = source_of(np.ones((2000, 3000), np.uint8), "b.tif", size=SIZE, fit="crop", **how)
    source.window(1, (0, 64), (0, 64))


@pytest.mark.parametrize(
    ("suffix", "how"), [("png", {}), ("jpg", {}), ("tif", {}), ("tif", {"tile": (16, 16), **ZIP})]
)
def test_broken_file_is_named(source_of, pixels, tmp_path, suffix, how):
    content = saved(pixels(64, 64, 3), suffix, **how)
    path = tmp_path / f"data/only/a.{suffix}"
    for part in (0.02, 0.7):
        refused(source_of(content[: int(len(content) * part)], path.name, size=SIZE))
    source = source_of(b"", path.name, size=SIZE)
    assert "the file is empty" in refused(source)
    path.unlink()
    assert "No such file" in refused(source)
    os.mkfifo(path)  # to open it would wait for ever
    assert "it is no plain file" in refused(source)


def test_missing_part_of_a_tiff_is_named_and_windows_beside_it_are_read(source_of, pixels):
    stored = pixels(64, 64, 3)
    mapped, tiled = saved(stored, "tif"), saved(stored, "tif", tile=(16, 16), **ZIP)
    assert "cut off, 40 bytes short" in refused(source_of(mapped[:-40], size=SIZE))
    assert "does not list segment 0" in refused(source_of(tiled[:280], size=SIZE))
    source = source_of(tiled[:-100], size=SIZE)
    source.window(0, (0, 48), (0, 64))
    with pytest.raises(RunError, match="cut off in segment 15, 100 bytes short"):
        source.window(0, (48, 64), (0, 64))
