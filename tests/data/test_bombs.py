"""Small files that claim, or decode to, more than the memory holds are refused beforehand."""

import io
import lzma
import os
import struct
import tracemalloc
import zlib
from contextlib import closing

import numpy as np
import pytest
import tifffile
from PIL import Image, PngImagePlugin

from hires.core.errors import RunError
from hires.data.image_format import open_image
from hires.data.tiff import DECOMPRESSORS

MOST = 2**22
"""Bytes that reading any of these files may take."""


def refused(source) -> str:
    """Returns why a window is refused, without much memory being taken."""
    tracemalloc.start()
    try:
        with pytest.raises(RunError) as caught:
            source.window(0, (0, 64), (0, 64))
        assert tracemalloc.get_traced_memory()[1] < MOST
    finally:
        tracemalloc.stop()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def chunk(kind: bytes, data: bytes) -> bytes:
    check = struct.pack(">I", zlib.crc32(kind + data))
    return struct.pack(">I", len(data)) + kind + data + check


def png(width: int, height: int, bits: int, colour: int, *chunks: bytes) -> bytes:
    header = struct.pack(">IIBBBBB", width, height, bits, colour, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + b"".join(chunks)


def tiff(height: int, width: int, data: bytes, compression: int = 8, **tags: int) -> bytes:
    """Returns a little-endian grey TIFF of one strip, its tags as they are told."""
    values = {256: width, 257: height, 258: 8, 259: compression, 262: 1, 277: 1, 278: height}
    values |= {273: 8, 279: len(data)} | {int(key[1:]): value for key, value in tags.items()}
    entries = b"".join(struct.pack("<HHII", k, 4, 1, v) for k, v in sorted(values.items()))
    ifd = struct.pack("<H", len(values)) + entries + struct.pack("<I", 0)
    return struct.pack("<2sHI", b"II", 42, 8 + len(data)) + data + ifd


@pytest.mark.parametrize("fit", ["resize", "crop", "error"])
@pytest.mark.parametrize(("bits", "colour"), [(1, 0), (8, 2), (16, 6), (8, 3)])
def test_png_that_claims_much(source_of, fit, bits, colour):
    side = 2**31 - 1
    content = png(side, side, bits, colour, chunk(b"IDAT", zlib.compress(bytes(64))))
    source = source_of(content, "a.png", size=(64, 64), fit=fit)
    assert f"claims {side} x {side} pixels" in refused(source)


def test_png_that_decodes_to_what_it_claims_and_is_too_much(source_of):
    file = io.BytesIO()
    Image.new("L", (5000, 4000)).save(file, "PNG")
    source = source_of(file.getvalue(), "a.png", size=(64, 64), fit="crop", max_pixels=10**6)
    assert "4000 x 5000 pixels of 8 bits, more than data.max_pixels=1000000" in refused(source)
    remedy = "use data.max_pixels=20000000"
    assert remedy in refused(source)
    source_of(b"", "a.png", size=(64, 64))  # the folder is opened anew
    again = source_of(file.getvalue(), "a.png", size=(64, 64), fit="crop", max_pixels=20_000_000)
    again.window(0, (0, 64), (0, 64))


def test_png_of_another_size_than_asked_for_is_not_decoded(source_of):
    file = io.BytesIO()
    Image.new("L", (5000, 4000)).save(file, "PNG")
    source = source_of(file.getvalue(), "a.png", size=(64, 64), fit="error")
    assert "it has 4000 x 5000 pixels where image asks for 64 x 64" in refused(source)


def test_png_whose_text_decodes_to_much(source_of):
    bomb = zlib.compress(bytes(2**25))
    text = chunk(b"zTXt", b"comment\0\0" + bomb)
    rows = zlib.compress(bytes(65 * 64))
    content = png(64, 64, 8, 0, text, chunk(b"IDAT", rows), chunk(b"IEND", b""))
    assert "cannot read the image" in refused(source_of(content, "a.png", size=(64, 64)))


def test_png_with_harmless_text_is_read(source_of):
    info = PngImagePlugin.PngInfo()
    info.add_text("comment", "x" * 1000, zip=True)
    source = source_of(Image.new("L", (64, 64)), "a.png", size=(64, 64), pnginfo=info)
    source.window(0, (0, 64), (0, 64))


def test_jpeg_that_claims_much(source_of, pixels):
    file = io.BytesIO()
    Image.fromarray(pixels(64, 64, 3)).save(file, "JPEG")
    content = bytearray(file.getvalue())
    start = content.index(b"\xff\xc0")
    content[start + 5 : start + 9] = struct.pack(">HH", 65500, 65500)
    source = source_of(bytes(content), "a.jpg", size=(64, 64), fit="crop")
    assert "claims 65500 x 65500 pixels" in refused(source)


@pytest.mark.parametrize("compression", [8, 32946, 32773, 34925])
def test_strip_that_decodes_to_more_than_its_header_claims(source_of, compression):
    """A strip of 32 MiB in a file that claims 64 x 64 pixels was decoded as a whole."""
    if compression == 34925:
        lzma = pytest.importorskip("lzma")
        data = lzma.compress(bytes(2**25), preset=0)
    elif compression == 32773:
        data = b"\x81\x00" * (2**25 // 128)
    else:
        data = zlib.compress(bytes(2**25), 9)
    told = refused(source_of(tiff(64, 64, data, compression), size=(64, 64)))
    assert "holds more than the 4096 bytes of its pixels" in told


def test_strip_that_is_too_large_is_not_decoded(source_of):
    data = zlib.compress(bytes(2**20), 9)
    content = tiff(60_000, 60_000, data)
    source = source_of(content, size=(64, 64), fit="resize")
    assert "claims 60000 x 60000 pixels in a strip or tile of 8 bits" in refused(source)


def test_default_bounds_bytes_as_well_as_pixels(source_of):
    """32768 x 32768 pixels of 64 bits, 8 GiB from a few kilobytes, were accepted."""
    content = tiff(16_384, 16_384, zlib.compress(bytes(2**20), 9), t258=64, t339=3)
    source = source_of(content, size=(64, 64), fit="crop")
    assert "of 64 bits, more than data.max_pixels=268435456" in refused(source)
    grey = tiff(30_000, 30_000, zlib.compress(bytes(2**20), 9))
    assert "claims 30000 x 30000" in refused(source_of(grey, size=(64, 64), fit="crop"))


def test_strip_that_is_the_window_is_not_copied(tmp_path):
    """Its decompressed bytes are the pixels: a second array of 16 MiB is never made."""
    side = 4096
    path = tmp_path / "a.tif"
    path.write_bytes(tiff(side, side, zlib.compress(bytes(side * side), 1)))
    with closing(open_image(path)) as image:
        tracemalloc.start()
        try:
            pixels = image.read((0, side), (0, side))
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert pixels.shape == (side, side, 1)
    assert not pixels.any()
    assert peak < 2.5 * side * side  # zlib joins the blocks that it made


def test_large_image_in_small_tiles_is_read(source_of):
    """Of a slide only the tiles of the window are decoded, so its size is no reason."""
    size, tile = (2000, 3000), (16, 16)
    source = source_of(
        np.ones(size, np.uint8), size=(64, 64), fit="crop", max_pixels=64 * 64, tile=tile,
        compression="zlib",
    )  # fmt: skip
    source.window(0, (0, 64), (0, 64))


@pytest.mark.parametrize(
    ("tags", "told"),
    [
        ({"t277": 65535}, "of 524280 bits"),
        ({"t258": 64, "t277": 60000}, "cannot read the image"),
        ({"t258": 7}, "cannot read the image"),
        ({"t258": 2**32 - 1}, "cannot read the image"),
        ({"t279": 2**32 - 1}, "cut off in segment 0"),
        ({"t273": 2**32 - 1}, "cut off in segment 0"),
        ({"t256": 2**31, "t257": 2, "t278": 1}, "pixels"),
        ({"t256": 0}, "cannot read the image"),
        ({"t278": 0}, "cannot read the image"),
        ({"t322": 1, "t323": 1, "t324": 8, "t325": 10}, "tiles have 1 x 1 pixels"),
        ({"t32998": 2**31}, "cannot read the image"),
        ({"t32997": 9}, "cannot read the image"),
    ],
)
def test_absurd_headers(source_of, tags, told):
    # 65535 samples of a 64 x 64 window are 256 MiB.
    content = tiff(64, 64, zlib.compress(bytes(64 * 64)), **tags)
    source = source_of(content, size=(64, 64), fit="resize", max_pixels=2**20)
    assert told in refused(source)


def test_loop_of_pages_is_read_once(source_of):
    content = tiff(64, 64, zlib.compress(bytes(64 * 64)))
    content = content[:-4] + struct.pack("<I", struct.unpack("<I", content[4:8])[0])
    source_of(content, size=(64, 64)).window(0, (0, 64), (0, 64))


def test_names_of_makers_load_no_other_pages(source_of, pixels):
    stored = pixels(64, 64, 3)
    source_of(stored, size=(64, 64), compression="zlib", description="SI.").window(
        0, (0, 64), (0, 64)
    )


@pytest.mark.parametrize("compression", ["zlib", "lzma", "packbits", None])
@pytest.mark.parametrize("predictor", [False, True])
@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_pixels_are_those_of_tifffile(source_of, pixels, whole, compression, predictor, dtype):
    if predictor and compression in ("packbits", None):
        pytest.skip("the format has none there")
    stored = pixels(50, 70, 3, dtype=dtype)
    how = {"compression": compression, "rowsperstrip": 9, "predictor": predictor}
    try:
        source = source_of(stored, size=(50, 70), **how)
    except (KeyError, ValueError, RuntimeError):
        pytest.skip("tifffile cannot write it here")
    np.testing.assert_allclose(whole(source, 50, 70), stored / np.iinfo(dtype).max, atol=2e-7)


@pytest.mark.parametrize("suffix", ["png", "jpg", "tif"])
def test_pipe_in_place_of_an_image_does_not_hang(source_of, tmp_path, suffix):
    source = source_of(b"x", f"a.{suffix}", size=(64, 64))
    (tmp_path / f"data/only/a.{suffix}").unlink()
    os.mkfifo(tmp_path / f"data/only/a.{suffix}")
    assert "it is no plain file" in refused(source)


def test_tifffile_agrees_with_the_files_of_this_test():
    with tifffile.TiffFile(io.BytesIO(tiff(64, 64, zlib.compress(bytes(64 * 64))))) as file:
        assert file.pages[0].asarray().shape == (64, 64)


@pytest.mark.parametrize("code", [8, 34925])
def test_what_a_segment_inflates_to_lies_in_memory_once(code):
    # zlib collects blocks and copies them in the end: twice the size of the segment.
    raw = bytes(40 * 2**20)
    data = zlib.compress(raw) if code == 8 else lzma.compress(raw)
    tracemalloc.start()
    made = DECOMPRESSORS[code](data, len(raw) + 1)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert made == raw
    assert peak < 1.4 * len(raw)  # LZMA has a dictionary of 8 MiB beside it
    assert len(DECOMPRESSORS[code](data, 100)) == 100
    with pytest.raises(ValueError, match="cut off"):
        DECOMPRESSORS[code](data[:-40], len(raw) + 1)
