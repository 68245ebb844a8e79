"""What an image of every kind becomes."""

import io

import numpy as np
import pytest
import tifffile
from PIL import Image

from hires.core.errors import RunError
from hires.core.registry import Registry
from hires.data import image_format

H, W = 24, 17


def png(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("a.png", {}),
        ("a.tif", {"tile": (16, 16), "compression": "zlib"}),
        ("a.tif", {"tile": (16, 16)}),
        ("a.tif", {"rowsperstrip": 5, "compression": "zlib", "predictor": True}),
        ("a.tif", {"rowsperstrip": 5}),
        ("a.TIFF", {}),
        ("a.tif", {"byteorder": ">", "bigtiff": True}),
    ],
)
def test_colours_come_back_exactly(source_of, pixels, whole, name, how):
    stored = pixels(H, W, 3)
    image = Image.fromarray(stored) if name == "a.png" else stored
    got = whole(source_of(image, name, size=(H, W), **how), H, W)
    np.testing.assert_allclose(got, stored / 255, atol=1e-6)


def test_normalising_is_as_documented(source_of, pixels):
    stored = pixels(H, W, 3)
    window = source_of(stored, size=(H, W)).window(0, (0, H), (0, W))
    expected = (stored.transpose(2, 0, 1) / 255 - 0.5) / 0.25
    np.testing.assert_allclose(window, expected, atol=1e-6)
    assert window[(expected == 2)].tolist() == [2.0] * int((expected == 2).sum())


@pytest.mark.parametrize("name", ["a.png", "a.tif"])
def test_grey_is_given_to_every_channel(source_of, pixels, whole, name):
    grey = pixels(H, W)
    image = Image.fromarray(grey) if name == "a.png" else grey
    got = whole(source_of(image, name, size=(H, W)), H, W)
    np.testing.assert_allclose(got, np.repeat(grey[..., None], 3, 2) / 255, atol=1e-6)


@pytest.mark.parametrize("name", ["a.png", "a.tif"])
def test_colour_becomes_luminance_for_one_channel(source_of, pixels, whole, name):
    stored = pixels(H, W, 3)
    image = Image.fromarray(stored) if name == "a.png" else stored
    got = whole(source_of(image, name, size=(H, W), channels=1), H, W)
    np.testing.assert_allclose(got[..., 0], stored @ [0.299, 0.587, 0.114] / 255, atol=1e-6)


@pytest.mark.parametrize("name", ["a.png", "a.tif"])
@pytest.mark.parametrize("samples", [2, 4])
def test_alpha_is_dropped(source_of, pixels, whole, name, samples):
    stored = pixels(H, W, samples)
    if name == "a.png":
        image, how = Image.fromarray(stored, mode={2: "LA", 4: "RGBA"}[samples]), {}
    else:
        photometric = {2: "minisblack", 4: "rgb"}[samples]
        image, how = stored, {"photometric": photometric, "extrasamples": ["unassalpha"]}
        how |= {"planarconfig": "contig"}
    got = whole(source_of(image, name, size=(H, W), **how), H, W)
    expected = np.broadcast_to(stored[..., : samples - 1], (H, W, 3)) / 255
    np.testing.assert_allclose(got, expected, atol=1e-6)


def test_as_many_samples_as_channels_are_all_taken(source_of, pixels, whole):
    stored = pixels(H, W, 5)
    how = {"photometric": "minisblack", "planarconfig": "contig"}
    got = whole(source_of(stored, size=(H, W), channels=5, **how), H, W)
    np.testing.assert_allclose(got, stored / 255, atol=1e-6)


def test_channels_that_the_image_does_not_have_are_refused(source_of, pixels):
    source = source_of(pixels(16, 16, 3), channels=4)
    with pytest.raises(RunError, match=r"a\.tif: it has 3 samples .* model\.channels=4; .*=3"):
        source.window(0, (0, 16), (0, 16))


@pytest.mark.parametrize("planes", [{}, {"tile": (16, 16), "compression": "zlib"}])
def test_planes_stored_one_after_the_other(source_of, pixels, whole, planes):
    stored = pixels(3, H, W)
    how = {"photometric": "rgb", "planarconfig": "separate", **planes}
    got = whole(source_of(stored, size=(H, W), **how), H, W)
    np.testing.assert_allclose(got, stored.transpose(1, 2, 0) / 255, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "dtype", "peak"),
    [
        ("a.tif", np.uint16, 65535),
        ("a.png", np.uint16, 65535),
        ("a.tif", np.uint32, 2**32 - 1),
        ("a.tif", np.float32, 1),
        ("a.tif", np.float64, 1),
        ("a.tif", np.float16, 1),
    ],
)
@pytest.mark.parametrize("byteorder", ["<", ">"])
def test_deep_pixels_are_scaled_by_their_type(
    source_of, pixels, whole, name, dtype, peak, byteorder
):
    stored = pixels(H, W, dtype=dtype)
    if name == "a.png":
        image, how = Image.fromarray(stored), {}
    else:
        image, how = stored, {"byteorder": byteorder}
    got = whole(source_of(image, name, size=(H, W), **how), H, W)
    expected = np.repeat(stored[..., None].astype(np.float64), 3, 2) / peak
    np.testing.assert_allclose(got, expected, atol=1e-6)


@pytest.mark.parametrize("bad", [-0.5, 255.0, np.nan, np.inf])
def test_floats_beyond_black_and_white_are_refused(source_of, bad):
    stored = np.full((16, 16), 0.5, np.float32)
    stored[3, 3] = bad
    with pytest.raises(RunError, match=r"a\.tif: its floats reach from .*; scale them to 0"):
        source_of(stored).window(0, (0, 16), (0, 16))


def test_signed_pixels_are_refused(source_of):
    with pytest.raises(RunError, match=r"a\.tif: its pixels are int16; convert them to unsigned"):
        source_of(np.zeros((16, 16), np.int16)).window(0, (0, 16), (0, 16))


def test_bilevel_images(source_of, whole):
    stored = np.eye(16, dtype=bool)
    expected = np.repeat(stored[..., None], 3, 2).astype(float)
    got = whole(source_of(stored, photometric="minisblack"), 16, 16)
    np.testing.assert_array_equal(got, expected)


def test_bilevel_png(source_of, whole):
    stored = np.eye(16, dtype=bool)
    got = whole(source_of(Image.fromarray(stored), "a.png"), 16, 16)
    np.testing.assert_array_equal(got, np.repeat(stored[..., None], 3, 2).astype(float))


def test_white_may_be_zero(source_of, pixels, whole):
    stored = pixels(16, 16)
    got = whole(source_of(stored, photometric="miniswhite"), 16, 16)
    np.testing.assert_allclose(got[..., 0], 1 - stored / 255, atol=1e-6)


def test_palettes_become_colours(source_of, pixels, whole):
    stored, palette = pixels(16, 16), pixels(3, 256, dtype=np.uint16, seed=1)
    got = whole(source_of(stored, photometric="palette", colormap=palette), 16, 16)
    np.testing.assert_allclose(got, palette[:, stored].transpose(1, 2, 0) / 65535, atol=1e-6)


@pytest.mark.parametrize("transparency", [None, 0])
def test_palettes_of_png_become_colours(source_of, pixels, whole, transparency):
    image = Image.fromarray(pixels(16, 16, 3)).quantize(40)
    how = {} if transparency is None else {"transparency": transparency}
    got = whole(source_of(image, "a.png", **how), 16, 16)
    np.testing.assert_allclose(got, np.asarray(image.convert("RGB")) / 255, atol=1e-6)


def test_cmyk_becomes_colours(source_of, pixels, whole):
    stored = pixels(16, 16, 4)
    got = whole(source_of(stored, photometric="separated", planarconfig="contig"), 16, 16)
    ink = stored / 255
    np.testing.assert_allclose(got, (1 - ink[..., :3]) * (1 - ink[..., 3:]), atol=1e-6)


@pytest.mark.parametrize("mode", ["L", "RGB", "CMYK"])
def test_jpeg_is_what_pillow_decodes(source_of, pixels, whole, tmp_path, mode):
    image = Image.fromarray(pixels(16, 16, 3)).convert(mode)
    got = whole(source_of(image, "a.jpg", quality=95), 16, 16)
    with Image.open(tmp_path / "data" / "only" / "a.jpg") as opened:
        expected = np.asarray(opened.convert("RGB")) / 255
    np.testing.assert_allclose(got, expected, atol=1e-6)


def test_a_png_called_jpg_is_read(source_of, pixels, whole):
    stored = pixels(16, 16, 3)
    got = whole(source_of(png(Image.fromarray(stored)), "a.jpg"), 16, 16)
    np.testing.assert_allclose(got, stored / 255, atol=1e-6)


def test_the_first_of_many_pages_counts(source_of, pixels, whole):
    stored = pixels(5, 16, 16, 3)
    got = whole(source_of(stored, photometric="rgb"), 16, 16)
    np.testing.assert_allclose(got, stored[0] / 255, atol=1e-6)


@pytest.mark.parametrize("compression", ["tiff_lzw", "jpeg"])
def test_compressions_that_only_pillow_knows_are_decoded_as_a_whole(
    source_of, pixels, whole, caplog, monkeypatch, compression
):
    monkeypatch.setattr(tifffile.TIFF, "DECOMPRESSORS", {1: None, 8: None})  # no imagecodecs
    stored = pixels(16, 16, 3) // 8 + 100
    source = source_of(Image.fromarray(stored), compression=compression)
    got = whole(source, 16, 16)
    atol = 1e-6 if compression == "tiff_lzw" else 0.1  # jpeg loses
    np.testing.assert_allclose(got, stored / 255, atol=atol)
    assert "decoded as a whole" in caplog.text
    assert "pip install imagecodecs" in caplog.text


def test_a_compression_that_needs_a_package_is_named_with_the_remedy(
    source_of, pixels, monkeypatch
):
    # Pillow would read 16-bit colours, but only their upper half.
    source = source_of(pixels(16, 16, 3, dtype=np.uint16), compression="zlib", tile=(16, 16))
    monkeypatch.setattr(tifffile.TIFF, "DECOMPRESSORS", {})
    monkeypatch.setattr("hires.data.tiff.DECOMPRESSORS", {})
    remedy = r"is ADOBE_DEFLATE, which needs `pip install imagecodecs`; or"
    with pytest.raises(RunError, match=rf"a\.tif: its compression {remedy}"):
        source.window(0, (0, 16), (0, 16))


def test_an_image_of_another_size_is_resized_cropped_or_refused(source_of, pixels, whole):
    stored = pixels(20, 30, 3)
    cropped = whole(source_of(stored, size=(16, 16), fit="crop"), 16, 16)
    np.testing.assert_allclose(cropped, stored[2:18, 7:23] / 255, atol=1e-6)
    padded = whole(source_of(stored, size=(22, 30), fit="crop"), 22, 30)
    np.testing.assert_array_equal(padded[0], np.full((30, 3), 0.5))  # zero for the network
    np.testing.assert_allclose(padded[1:21], stored / 255, atol=1e-6)
    resized = whole(source_of(stored, size=(10, 15), fit="resize"), 10, 15)
    assert abs(resized.mean() - stored.mean() / 255) < 0.01
    with pytest.raises(
        RunError, match=r"a\.tif: it has 20 x 30 pixels where image asks for 10 x 15; use"
    ):
        source_of(stored, size=(10, 15), fit="error").window(0, (0, 10), (0, 15))


def test_another_format_is_one_opener_under_its_suffix(source_of, monkeypatch):
    formats = Registry("image format")
    monkeypatch.setattr(image_format, "FORMATS", formats)
    monkeypatch.setattr("hires.data.folder.FORMATS", formats)

    @formats.register(".scope")
    class Scope:
        """A file whose bytes are 16 x 16 grey pixels."""

        size, colours, peak = (16, 16), 1, 255.0

        def __init__(self, path, max_pixels):
            pixels = np.frombuffer(path.read_bytes(), np.uint8)
            self.pixels = pixels.reshape(16, 16, 1)

        def read(self, rows, cols):
            return self.pixels[slice(*rows), slice(*cols)]

        def close(self):
            pass

    stored = np.arange(256, dtype=np.uint8)
    window = source_of(stored.tobytes(), "a.SCOPE").window(0, (2, 3), (0, 16))
    np.testing.assert_allclose(window[1, 0] / 4 + 0.5, stored[32:48] / 255, atol=1e-6)
    with pytest.raises(RunError, match=r"cannot read the image .*a\.SCOPE: cannot reshape"):
        source_of(b"half", "a.SCOPE").window(0, (0, 16), (0, 16))
