"""A file that cannot be read ends in one paragraph that names it."""

import io
import struct
import warnings
import zlib
from pathlib import Path

import numpy as np
import pytest
import tifffile
from PIL import Image

from hires.core.errors import RunError


def saved(image: np.ndarray, kind: str, **how) -> bytes:
    file = io.BytesIO()
    if kind == "tif":
        tifffile.imwrite(file, image, **how)
    else:
        Image.fromarray(image).save(file, {"png": "PNG", "jpg": "JPEG"}[kind])
    return file.getvalue()


KINDS = {
    "png": ("png", {}),
    "jpg": ("jpg", {}),
    "mapped": ("tif", {}),
    "tiled": ("tif", {"tile": (16, 16), "compression": "zlib"}),
    "stripped": ("tif", {"rowsperstrip": 8, "compression": "zlib"}),
}


def broken(source) -> str:
    """Returns the message of reading the whole image, which must name the file and a remedy."""
    with pytest.raises(RunError) as caught:
        source.window(0, (0, 64), (0, 64))
    message = str(caught.value)
    assert message.startswith("cannot read the image ")
    assert "/data/only/a." in message
    assert "; " in message
    assert "\n" not in message
    return message


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("part", [0.02, 0.3, 0.7, 0.95])
def test_a_truncated_file_is_named(source_of, pixels, kind, part):
    suffix, how = KINDS[kind]
    content = saved(pixels(64, 64, 3), suffix, **how)
    broken(source_of(content[: int(len(content) * part)], f"a.{suffix}", size=(64, 64)))


def test_what_is_missing_of_a_tiff_is_told(source_of, pixels):
    stored = pixels(64, 64, 3)
    mapped = saved(stored, "tif")[:-40]
    assert "cut off, 40 bytes short" in broken(source_of(mapped, "a.tif", size=(64, 64)))
    tiled = saved(stored, "tif", tile=(16, 16), compression="zlib")[:280]
    assert "does not list segment 0" in broken(source_of(tiled, "a.tif", size=(64, 64)))


@pytest.mark.parametrize("suffix", ["png", "jpg", "tif"])
def test_an_empty_file_is_named(source_of, suffix):
    assert "the file is empty" in broken(source_of(b"", f"a.{suffix}", size=(64, 64)))


@pytest.mark.parametrize("suffix", ["png", "jpg", "tif"])
def test_a_file_that_is_no_image_is_named(source_of, suffix):
    broken(source_of(b"<html>404</html>" * 30, f"a.{suffix}", size=(64, 64)))


@pytest.mark.parametrize("kind", ["tiled", "stripped"])
def test_garbage_in_a_tile_is_named(source_of, pixels, kind):
    suffix, how = KINDS[kind]
    content = bytearray(saved(pixels(64, 64, 3), suffix, **how))
    middle = len(content) // 2
    content[middle : middle + 300] = bytes(300)
    broken(source_of(bytes(content), "a.tif", size=(64, 64)))


def test_a_broken_tile_does_not_hurt_a_window_beside_it(source_of, pixels):
    content = saved(pixels(64, 64, 3), "tif", tile=(16, 16), compression="zlib")
    source = source_of(content[:-100], "a.tif", size=(64, 64))
    source.window(0, (0, 48), (0, 64))
    with pytest.raises(RunError, match="cut off in segment 15, 100 bytes short"):
        source.window(0, (48, 64), (0, 64))


def test_a_file_that_vanished_is_named(source_of, pixels, tmp_path):
    source = source_of(pixels(64, 64, 3), size=(64, 64))
    Path(tmp_path / "data/only/a.tif").unlink()
    assert "No such file" in broken(source)


def test_a_header_that_promises_more_than_memory_is_named(source_of):
    def chunk(kind: bytes, data: bytes) -> bytes:
        check = struct.pack(">I", zlib.crc32(kind + data))
        return struct.pack(">I", len(data)) + kind + data + check

    side = 2**31 - 1
    header = struct.pack(">IIBBBBB", side, side, 16, 0, 0, 0, 0)
    body = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")
    broken(source_of(b"\x89PNG\r\n\x1a\n" + body, "a.png", size=(64, 64)))


def test_a_large_image_is_no_bomb(source_of, monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    source = source_of(Image.new("RGB", (64, 64)), "a.png", size=(64, 64))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        source.window(0, (0, 64), (0, 64))
    assert Image.MAX_IMAGE_PIXELS == 100
