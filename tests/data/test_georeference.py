"""Do parts and enlargements of an image lie where the image lies, as its file says it?"""

from __future__ import annotations

import numpy as np
import pytest
import tifffile
from PIL import Image

from hires.core.config.data_config import DataConfig
from hires.data.georeference import DOUBLES, KEYS, MATRIX, SCALE, TEXT, TIEPOINT, Georeference
from hires.data.image_format import open_image
from hires.data.opening import open_source

AREA = (1, 1, 0, 3, 1024, 0, 1, 1, 1025, 0, 1, 1, 3072, 0, 1, 32632)
POINT = (1, 1, 0, 3, 1024, 0, 1, 2, 1025, 0, 1, 2, 2048, 0, 1, 4326)
NORTH = {SCALE: (10.0, 20.0, 0.0), TIEPOINT: (3.0, 1.0, 0.0, 500.0, 900.0, 0.0)}
TURNED = {MATRIX: (8.0, 6.0, 0, 500.0, 6.0, -8.0, 0, 900.0, 0, 0, 0, 0, 0, 0, 0, 1)}
TYPES = {SCALE: "d", TIEPOINT: "d", MATRIX: "d", KEYS: "H", DOUBLES: "d", TEXT: "s"}


def written(path, tags, pixels=None, **how):
    extra = [(n, TYPES[n], len(v), v, True) for n, v in tags.items()]
    image = np.zeros((6, 8, 3), np.uint8) if pixels is None else pixels
    tifffile.imwrite(path, image, photometric="rgb", extratags=extra, **how)
    return path


def reference(path):
    image = open_image(path)
    try:
        return image.facts.reference
    finally:
        image.close()


def place(reference, row, col):
    a, b, c, d, e, f = reference.affine
    return a * col + b * row + c, d * col + e * row + f


@pytest.mark.parametrize("keys", [AREA, POINT])
@pytest.mark.parametrize("tags", [NORTH, TURNED])
def test_corners_of_a_part_lie_where_those_of_the_image_do(keys, tags):
    whole = Georeference((2.0, 4.0), tags={**tags, KEYS: keys})
    part = whole.part((40, 60), (0.5, 4.0))
    for row, col in ((0, 0), (10, 0), (3, 7)):
        expected = place(whole, 40 + row * 0.5, 60 + col * 4)
        assert place(part, row, col) == pytest.approx(expected, abs=1e-9)
    assert (part.pixel_um, part.corner) == ((1.0, 16.0), (80.0, 15.0))
    assert part.epsg == {AREA: 32632, POINT: 4326}[keys]
    assert whole.part((0, 0)) == whole


def test_coordinates_of_pixel_centres_are_half_a_pixel_inside():
    # North of 900 at the first row of a raster of points is that of its centre.
    x, y = place(Georeference(tags={**NORTH, KEYS: POINT}), 1, 3)
    assert (x, y) == (500 - 5, 900 + 10)
    assert place(Georeference(tags={**NORTH, KEYS: AREA}), 1, 3) == (500, 900)


@pytest.mark.parametrize("how", [{}, {"compression": "zlib", "tile": (16, 16)}, {"bigtiff": True}])
def test_tags_of_geotiff_are_read_and_damaged_ones_left_out(tmp_path, how):
    tags = {**NORTH, KEYS: AREA, DOUBLES: (6378137.0,), TEXT: "WGS 84|"}
    assert reference(written(tmp_path / "a.tif", tags, **how)).tags == {**tags, TEXT: b"WGS 84|"}
    short = {SCALE: (10.0, 20.0), TIEPOINT: (1.0,) * 5, MATRIX: (1.0,) * 15, KEYS: (1, 1, 0)}
    others = {SCALE: (10.0, np.nan, 0.0), TIEPOINT: (np.inf,) * 6, MATRIX: (1.0,) * 32}
    for damaged in (short, others):
        assert reference(written(tmp_path / "b.tif", damaged, **how)).tags == {}


def ome(unit):
    size = {"PhysicalSizeX": 0.002, "PhysicalSizeXUnit": unit, "PhysicalSizeY": 0.003}
    return {"ome": True, "metadata": {"axes": "YXS", **size, "PhysicalSizeYUnit": unit}}


SIZES = {
    "ome": (ome("mm"), (3.0, 2.0)),
    "ome of another unit": (ome("pixel"), None),
    "imagej": ({"imagej": True, "resolution": (4, 2), "metadata": {"unit": "um"}}, (0.5, 0.25)),
    "svs": ({"description": "Aperio Image|MPP = 0.25|AppMag = 40", "metadata": None}, (0.25, 0.25)),
    "inch": ({"resolution": (254, 508), "resolutionunit": 2}, (50.0, 100.0)),
    "cm": ({"resolution": (1000, 500), "resolutionunit": 3}, (20.0, 10.0)),
    "damaged": ({"resolution": (4e9, 4e9), "resolutionunit": 5}, None),
    "no unit": ({"resolution": (1000, 500), "resolutionunit": 1}, None),
    "nothing": ({}, None),
}


@pytest.mark.parametrize("name", SIZES)
def test_pixel_size_of_a_tiff_is_in_micrometres(tmp_path, name):
    how, expected = SIZES[name]
    found = reference(written(tmp_path / "a.tif", {}, **how)).pixel_um
    assert found == (expected and pytest.approx(expected))


@pytest.mark.parametrize("name", ["a.png", "a.jpg"])
def test_pixel_size_of_other_formats_is_read_unless_it_is_the_default(tmp_path, name):
    image = Image.fromarray(np.zeros((6, 8, 3), np.uint8))
    image.save(tmp_path / name, dpi=(254, 508))
    assert reference(tmp_path / name).pixel_um == pytest.approx((50.0, 100.0), rel=1e-3)
    exif = Image.Exif()
    exif[274] = 6  # from which Pillow concludes 72 dots per inch
    for without in ({}, {"exif": exif}):
        image.save(tmp_path / f"b{name}", **without)
        assert reference(tmp_path / f"b{name}").pixel_um is None


def test_patch_of_a_slide_lies_at_its_row_and_column_of_the_level(tmp_path):
    # A pyramid whose second level is half as fine; only the first has tags.
    pixels = np.random.default_rng(0).integers(0, 255, (200, 240, 3), np.uint8)
    extra = [(n, "d", len(v), v, True) for n, v in NORTH.items()]
    how = {"photometric": "rgb", "tile": (64, 64), "compression": "zlib"}
    size = {"PhysicalSizeX": 0.5, "PhysicalSizeY": 0.25}
    with tifffile.TiffWriter(tmp_path / "a.ome.tif", ome=True) as file:
        file.write(pixels, subifds=1, extratags=extra, metadata={"axes": "YXS", **size}, **how)
        file.write(pixels[::2, ::2], subfiletype=1, **how)
    data = DataConfig("slide", str(tmp_path), level=1, tissue=0, region=[7, 11, 90, 100], stride=40)
    source = open_source(data, (32, 32), 3, 0)
    assert source.name(3) == "a.ome.tif[47,51]"
    found = source.stored(3)
    assert found is not None
    size, patch = found
    assert (size, patch.pixel_um, patch.corner) == ((32, 32), (0.5, 1.0), (47, 51))
    assert place(patch, 0, 0) == pytest.approx(place(Georeference(tags=NORTH), 94, 102))
    assert place(patch, 2, 3) == pytest.approx(place(Georeference(tags=NORTH), 98, 108))
