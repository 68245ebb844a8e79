"""Every kind of image file has the pixels that it holds, or is refused with the reason."""

from __future__ import annotations

import io
from contextlib import closing

import numpy as np
import pytest
import tifffile
from PIL import Image

from hires.core.errors import ConfigError, RunError
from hires.data.formats.tiff import TiffImage
from hires.data.image_format import MAX_PIXELS
from tests.helpers.image_files import png

H, W = 24, 17
RANDOM = np.random.default_rng(0)


def stored(*shape, dtype=np.uint8):
    if np.dtype(dtype).kind == "f":
        return RANDOM.random(shape).astype(dtype)
    return RANDOM.integers(0, np.iinfo(dtype).max, shape, dtype=dtype, endpoint=True)


RGB, GREY, INK = stored(H, W, 3), stored(H, W), stored(H, W, 4)
DEEP = stored(H, W, 3, dtype=np.uint16)
EYE = np.eye(H, W, dtype=bool)
PALETTE = stored(3, 256, dtype=np.uint16)
FEW = Image.fromarray(RGB).quantize(40)
CONTIG = {"planarconfig": "contig"}
ALPHA = {**CONTIG, "extrasamples": ["unassalpha"]}
PLANES = {"photometric": "rgb", "planarconfig": "separate"}
INKS = (1 - INK[..., :3] / 255) * (1 - INK[..., 3:] / 255)
CHANNELS = {"ome": True, "photometric": "minisblack", "metadata": {"axes": "CYX"}}
ZIP, STRIPS = {"compression": "zlib"}, {"rowsperstrip": 5}
BIG = {"byteorder": ">", "bigtiff": True}


def repeated(grey, peak=1):
    return np.repeat(np.asarray(grey, np.float64)[..., None], 3, 2) / peak


# Name, what is written and how, and the values from 0 to 1 that a network of three channels sees.
ROWS = [
    ("a.png", Image.fromarray(RGB), {}, RGB / 255),
    ("a.tif", RGB, {"tile": (16, 16), **ZIP}, RGB / 255),
    ("a.tif", RGB, {"tile": (16, 16)}, RGB / 255),
    ("a.tif", RGB, {**STRIPS, **ZIP, "predictor": True}, RGB / 255),
    ("a.tif", RGB, {**STRIPS, "compression": "lzma"}, RGB / 255),
    ("a.tif", Image.fromarray(RGB), {"compression": "packbits"}, RGB / 255),
    ("a.tif", Image.fromarray(RGB), {"compression": "tiff_lzw"}, RGB / 255),
    ("a.tif", DEEP, {"tile": (16, 16), "compression": "zstd", "predictor": True}, DEEP / 65535),
    ("a.tif", Image.fromarray(EYE), {"compression": "group4"}, repeated(EYE)),
    ("a.tif", DEEP, {**STRIPS, **ZIP, "predictor": True}, DEEP / 65535),
    ("a.tif", RGB, STRIPS, RGB / 255),
    ("a.TIFF", RGB, BIG, RGB / 255),
    ("a.tif", RGB, {**ZIP, "description": "SI."}, RGB / 255),
    ("a.tif", np.stack([RGB, RGB // 2]), {"photometric": "rgb"}, RGB / 255),  # two pages
    ("a.tif", RGB.transpose(2, 0, 1), PLANES, RGB / 255),
    ("a.tif", RGB.transpose(2, 0, 1), {**PLANES, "tile": (16, 16), **ZIP}, RGB / 255),
    ("a.png", Image.fromarray(GREY), {}, repeated(GREY, 255)),
    ("a.tif", GREY, {}, repeated(GREY, 255)),
    ("a.png", Image.fromarray(INK[..., :2].copy(), mode="LA"), {}, repeated(INK[..., 0], 255)),
    ("a.png", Image.fromarray(INK, mode="RGBA"), {}, INK[..., :3] / 255),
    ("a.tif", INK[..., :2], {**ALPHA, "photometric": "minisblack"}, repeated(INK[..., 0], 255)),
    ("a.tif", INK, {**ALPHA, "photometric": "rgb"}, INK[..., :3] / 255),
    ("a.png", Image.fromarray(EYE), {}, repeated(EYE)),
    ("a.tif", EYE, {"photometric": "minisblack"}, repeated(EYE)),
    ("a.tif", GREY, {"photometric": "miniswhite"}, 1 - repeated(GREY, 255)),
    ("a.tif", GREY, {"photometric": "palette", "colormap": PALETTE},
     PALETTE[:, GREY].transpose(1, 2, 0) / 65535),
    ("a.png", FEW, {}, np.asarray(FEW.convert("RGB")) / 255),
    ("a.png", FEW, {"transparency": 0}, np.asarray(FEW.convert("RGB")) / 255),
    ("a.tif", GREY, {"photometric": "palette", "colormap": PALETTE // 256},  # of 8 bits
     PALETTE[:, GREY].transpose(1, 2, 0) // 256 / 255),
    ("a.tif", INK, {"photometric": "separated", **CONTIG}, INKS),
    ("a.bmp", Image.fromarray(RGB), {}, RGB / 255),
    ("a.bmp", FEW, {}, np.asarray(FEW.convert("RGB")) / 255),
    ("a.webp", Image.fromarray(RGB), {"lossless": True}, RGB / 255),
    ("a.jp2", Image.fromarray(RGB), {"irreversible": False}, RGB / 255),
    ("a.tif", RGB.transpose(2, 0, 1), CHANNELS, RGB / 255),  # each a page
    ("a.tif", RGB.transpose(2, 0, 1), {**CHANNELS, "tile": (16, 16), **ZIP}, RGB / 255),
    ("a.tif", np.stack([RGB, RGB // 2]).transpose(0, 3, 1, 2),
     {"imagej": True, "metadata": {"axes": "ZCYX"}}, RGB / 255),
]  # fmt: skip
for kind, peak in (("u2", 65535), ("u4", 2**32 - 1), ("f2", 1), ("f4", 1), ("f8", 1)):
    deep = stored(H, W, dtype=np.dtype(kind).type)
    ROWS += [("a.tif", deep, {"byteorder": order}, repeated(deep, peak)) for order in "<>"]
    if kind == "u2":
        ROWS.append(("a.png", Image.fromarray(deep), {}, repeated(deep, peak)))


def test_values_are_those_of_the_file(source_of, whole, tmp_path):
    for number, (name, image, how, expected) in enumerate(ROWS):
        values = whole(source_of(image, name, size=(H, W), **how), H, W)
        np.testing.assert_allclose(values, expected, atol=1e-6, err_msg=str(number))
        (tmp_path / "data" / "only" / name).unlink()
    for mode in ("L", "RGB", "CMYK"):
        image = Image.fromarray(RGB).convert(mode)
        values = whole(source_of(image, "a.jpg", size=(H, W)), H, W)
        with Image.open(tmp_path / "data" / "only" / "a.jpg") as opened:
            np.testing.assert_allclose(values, np.asarray(opened.convert("RGB")) / 255, atol=1e-6)
    file = io.BytesIO()
    Image.fromarray(RGB).save(file, "PNG")
    values = whole(
        source_of(file.getvalue(), "a.jpg", size=(H, W)), H, W
    )  # a PNG, whatever its name
    np.testing.assert_allclose(values, RGB / 255, atol=1e-6)


def test_first_page_that_shows_another_in_small_is_not_the_image(tmp_path, pixels):
    large = pixels(64, 48, 3)
    path = tmp_path / "a.tif"
    with tifffile.TiffWriter(path) as file:
        file.write(large[::4, ::4], photometric="rgb")
        for step in (2, 1):  # the pyramid in any order
            file.write(large[::step, ::step], photometric="rgb", tile=(16, 16))
    with closing(TiffImage(path, MAX_PIXELS)) as image:
        assert image.levels == [(64, 48), (32, 24)]
        assert np.array_equal(image.read((3, 60), (5, 48)), large[3:60, 5:48])
    with closing(TiffImage(path, MAX_PIXELS, level=1)) as coarse:
        assert np.array_equal(coarse.read((0, 32), (0, 24)), large[::2, ::2])


@pytest.mark.parametrize("name", ["a.png", "a.tif"])
def test_channels_of_the_network_decide_which_samples_are_taken(source_of, whole, name):
    image = Image.fromarray(RGB) if name == "a.png" else RGB
    light = whole(source_of(image, name, size=(H, W), channels=1), H, W)[..., 0]
    np.testing.assert_allclose(light, RGB @ [0.299, 0.587, 0.114] / 255, atol=1e-6)
    if name == "a.tif":
        five = stored(H, W, 5)
        how = {"photometric": "minisblack", **CONTIG}
        values = whole(source_of(five, size=(H, W), channels=5, **how), H, W)
        np.testing.assert_allclose(values, five / 255, atol=1e-6)
        with pytest.raises(RunError, match=r"it has 5 samples .* as data\.bands=\[1, 2, 3\]"):
            source_of(five, size=(H, W), **how).window(0, (0, H), (0, W))
        values = whole(source_of(five, size=(H, W), bands=[5, 1, 2], **how), H, W)
        np.testing.assert_allclose(values, five[..., [4, 0, 1]] / 255, atol=1e-6)
        with pytest.raises(RunError, match=r"5 samples .* data\.bands=\[1, 6, 2\] names number 6"):
            source_of(five, size=(H, W), bands=[1, 6, 2], **how).window(0, (0, H), (0, W))
        with pytest.raises(
            ConfigError, match=r"data\.bands=\[1, 2\] are 2 where model\.channels=3"
        ):
            source_of(five, size=(H, W), bands=[1, 2], **how)
        near = stored(H, W, 4)  # red, green, blue and infrared, of which none is alpha
        how = {"photometric": "rgb", "extrasamples": ["unspecified"], **CONTIG}
        with pytest.raises(RunError, match=r"it has 4 samples per pixel"):
            source_of(near, size=(H, W), **how).window(0, (0, H), (0, W))
        with pytest.raises(RunError, match=r"a\.tif: it has 3 samples .* model\.channels=4; .*=3"):
            source_of(RGB, size=(H, W), channels=4).window(0, (0, H), (0, W))


def test_pixels_without_a_white_are_refused(source_of):
    for value in (-0.5, 255, np.nan, np.inf):
        image = np.where(np.eye(16), value, 0.5).astype(np.float32)
        words = "its floats reach from" if np.isfinite(value) else "it has values that are not fin"
        with pytest.raises(RunError, match=rf"a\.tif: {words}"):
            source_of(image).window(0, (0, 16), (0, 16))
    with pytest.raises(RunError, match=r"its pixels are int16; convert them to unsigned"):
        source_of(np.zeros((16, 16), np.int16)).window(0, (0, 16), (0, 16))


def test_png_that_lacks_rows_or_colours_is_refused(source_of, pixels):
    def refusal(*header, passes=0):
        source = source_of(png(16, 16, 8, *header, passes=passes), "a.png")
        try:
            source.window(0, (0, 16), (0, 16))
        except RunError as error:
            return str(error)
        return ""

    rows = b"".join(b"\0" + row.tobytes() for row in pixels(16, 16))
    assert refusal(0, rows) == refusal(0, bytes(17 * 16)) == ""
    assert "its pixels are cut off, 68 bytes short" in refusal(0, rows[: -17 * 4])
    assert "its pixels have colour 255 of a palette of 0" in refusal(3, rows)
    passes = ((2, 2), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16))  # an interlaced one has
    rows = b"".join(b"\0" + row.tobytes() for size in passes for row in pixels(*size))
    assert refusal(0, rows, passes=1) == ""
    assert "its pixels are cut off, 51 bytes short" in refusal(0, rows[: -17 * 3], passes=1)


def test_jpeg_in_tiff_is_decoded_and_an_unknown_compression_is_refused(source_of, tmp_path, whole):
    smooth = RGB // 8 + 100
    values = whole(source_of(Image.fromarray(smooth), size=(H, W), compression="jpeg"), H, W)
    np.testing.assert_allclose(values, smooth / 255, atol=0.1)
    source = source_of(GREY, size=(H, W), compression="zlib")
    with tifffile.TiffFile(tmp_path / "data/only/a.tif", mode="r+b") as file:
        file.pages[0].tags["Compression"].overwrite(34676)  # of measured light
    with pytest.raises(
        RunError, match=r"a\.tif: its compression is SGILOG, .*save it with deflate"
    ):
        source.window(0, (0, H), (0, W))


def test_image_of_another_size_is_cropped_padded_or_refused(source_of, whole):
    image = stored(20, 30, 3)
    cropped = whole(source_of(image, size=(16, 16), fit="crop"), 16, 16)
    np.testing.assert_allclose(cropped, image[2:18, 7:23] / 255, atol=1e-6)
    padded = whole(source_of(image, size=(22, 30), fit="crop"), 22, 30)
    np.testing.assert_array_equal(padded[0], np.full((30, 3), 0.5))  # zero for the network
    np.testing.assert_allclose(padded[1:21], image / 255, atol=1e-6)
    with pytest.raises(RunError, match=r"it has 20 x 30 pixels where image asks for 10 x 15; use"):
        source_of(image, size=(10, 15), fit="error").window(0, (0, 10), (0, 15))
