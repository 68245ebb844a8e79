"""Patches of slides have the class of the outlines that cover half of their area."""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter

import numpy as np
import pytest
import shapely
import tifffile
from hypothesis import given, settings
from hypothesis import strategies as st

from hires.core.config.data_config import DataConfig
from hires.core.config.run_config import RunConfig
from hires.core.errors import ConfigError
from hires.data import slide_classes
from hires.data.data_check import check_data
from hires.data.opening import open_source
from hires.data.start_check import data_findings
from tests.helpers.layouts import config_of

SIDE, PATCH = 256, 32
RANDOM = np.random.default_rng(0)
GLASS, TISSUE = (243, 242, 244), (190, 110, 160)
KEYS = {"labels": "*.geojson", "outside": "normal", "tissue": 0.0}
XML = {"labels": "*.xml"}


def noisy(colour, deviation):
    noise = RANDOM.normal(0, deviation, (SIDE, SIDE, 3))
    return (np.array(colour) + noise).clip(0, 255).round().astype(np.uint8)


def write_slide(path, pixels=None):
    """Writes a pyramid of two levels; without pixels one of tissue alone."""
    pixels = noisy(TISSUE, 6) if pixels is None else pixels
    path.parent.mkdir(parents=True, exist_ok=True)
    options = {"tile": (64, 64), "photometric": "rgb", "metadata": None}
    with tifffile.TiffWriter(path) as file:
        file.write(pixels, subifds=1, **options)
        file.write(pixels[::2, ::2], subfiletype=1, **options)


@pytest.fixture
def folder(tmp_path):
    write_slide(tmp_path / "s1.tif")
    return tmp_path


def box(left, top, right, bottom):
    return [[left, top], [right, top], [right, bottom], [left, bottom], [left, top]]


def polygon(*rings):
    return {"type": "Polygon", "coordinates": [*rings]}


def feature(geometry, label=None, **facts):
    classes = {} if label is None else {"classification": {"name": label}}
    return {"type": "Feature", "geometry": geometry, "properties": {**classes, **facts}}


def area(left, top, right, bottom, label=None, **facts):
    """Returns a rectangle of a class."""
    return feature(polygon(box(left, top, right, bottom)), label, **facts)


SQUARE = polygon(box(0, 0, 64, 64))  # four patches
TUMOR, SECTION = area(0, 0, 128, 128, "tumor"), polygon(box(0, 0, SIDE, SIDE))
POINT, LINE = {"type": "Point", "coordinates": [5, 5]}, {"type": "LineString", "coordinates": []}


def write(folder, *features, name="s1.geojson"):
    held = {"type": "FeatureCollection", "features": [*features]}
    (folder / name).write_text(json.dumps(held))


def source_of(folder, **keys):
    data = DataConfig(name="slide", path=str(folder), **KEYS | keys)
    return open_source(data, (PATCH, PATCH), 3, 0)


def classes(folder, **keys):
    """Returns the class of each patch, by row and column in patches where they are a square."""
    source = source_of(folder, **keys)
    names = np.array([source.class_names[source.label(i)] for i in range(len(source))])
    side = math.isqrt(len(names))
    return names.reshape(side, side) if side**2 == len(names) else names


def counts(folder, **keys):
    return Counter(classes(folder, **keys).flatten().tolist())


def check(folder, **keys):
    """Returns whether a run can read all of it, and the findings by severity."""
    config = RunConfig(image=[PATCH, PATCH], data=DataConfig(name="slide", **KEYS | keys))
    report = check_data(str(folder), config, "slide", sized=True)
    texts = dict.fromkeys(("error", "warning", "note"), "")
    for one in report.findings:
        texts[one.severity] += f"{one.text} {one.files} "
    return report.ok, texts


@pytest.mark.parametrize("level", [0, 1])
def test_class_needs_half_of_the_area_and_outlines_of_a_class_add_up_once(folder, level):
    size = PATCH << level
    for share, label in ((0.49, "normal"), (0.5, "tumor")):
        # Strips that cover a share of every patch; cells of a raster would round them.
        strips = [[box(0, top, SIDE, top + share * size)] for top in range(0, SIDE, size)]
        write(folder, feature({"type": "MultiPolygon", "coordinates": strips}, "tumor"))
        assert counts(folder, level=level) == {label: (SIDE // size) ** 2}
    third = 0.3 * size  # beside each other 0.6 of a patch, and on each other 0.3
    beside = [area(left, 0, left + third, size, "tumor") for left in (0, third)]
    write(folder, *beside, *2 * [area(size, 0, size + third, size, "tumor")])
    assert classes(folder, level=level)[0, :2].tolist() == ["tumor", "normal"]


NUMBER = st.integers(-20, SIDE + 20)


@given(st.lists(st.tuples(*4 * [NUMBER], st.sampled_from("abc")), min_size=1, max_size=6))
@settings(max_examples=40, deadline=None)
def test_classes_follow_from_exact_areas(tmp_path_factory, drawn):
    folder = tmp_path_factory.getbasetemp() / "one slide"
    if not folder.exists():
        write_slide(folder / "s1.tif")
    regions = []  # at every pixel the smallest rectangle counts, of equal ones the later
    for left, top, w, h, label in drawn:
        width, height = abs(w) % 150 + 1, abs(h) % 150 + 1
        regions.append(((left, top, left + width, top + height), label))
    write(folder, *[area(*corners, label) for corners, label in regions])
    pixels = np.full((SIDE, SIDE), "normal")
    sized = [((b[2] - b[0]) * (b[3] - b[1]), -i) for i, (b, _) in enumerate(regions)]
    for _, i in sorted(sized, reverse=True):
        (left, top, right, bottom), label = regions[-i]
        pixels[max(0, top) : max(0, bottom), max(0, left) : max(0, right)] = label
    result = classes(folder)
    for row, col in itertools.product(range(SIDE // PATCH), repeat=2):
        patch = pixels[row * PATCH :, col * PATCH :][:PATCH, :PATCH]
        shares = {label: (patch == label).mean() for label in "abc"}
        best = [label for label in "abc" if shares[label] >= 0.5]
        assert result[row, col] == (best[0] if best else "normal"), (row, col, shares)


@pytest.mark.parametrize("corners", [0, 256])  # boxes are divided to the last, or compared at once
def test_shares_of_nests_and_overlaps_are_those_of_the_pixels(corners, monkeypatch):
    monkeypatch.setattr(slide_classes, "_FEW_CORNERS", corners)
    random, side = np.random.default_rng(3), 60
    for _ in range(20):
        rectangles = [(2, 3, 57, 58)]  # around nearly all others, which are its islands
        for size in random.integers(2, 25, 12).tolist():
            left, top = random.integers(1, side - size, 2).tolist()
            rectangles.append((left, top, left + size, top + size // 2 + 1))
        labels = random.integers(-1, 3, len(rectangles)).tolist()
        pixels = np.full((side, side), -1)
        areas = [(b - t) * (r - x) for x, t, r, b in rectangles]
        for i in sorted(range(len(areas)), key=lambda i: (-areas[i], i)):
            left, top, right, bottom = rectangles[i]
            pixels[top:bottom, left:right] = labels[i]
        boxes = [(x, y, x + 10, y + 10) for y in range(0, side, 10) for x in range(0, side, 10)]
        shapes = [shapely.box(*corners_of) for corners_of in rectangles]
        shares = slide_classes.class_shares(shapes, labels, 3, np.array(boxes, float))
        for (x, y, right, bottom), row in zip(boxes, shares, strict=True):
            part = pixels[y:bottom, x:right]
            assert row == pytest.approx([(part == label).mean() for label in range(3)], abs=1e-12)


@pytest.mark.parametrize("order", [1, -1])
def test_smaller_outline_counts_where_they_overlap(folder, order):
    regions = [feature(SECTION, "section"), TUMOR, feature(SQUARE, "necrosis")]
    write(folder, *regions[::order])
    assert counts(folder) == {"necrosis": 4, "tumor": 12, "section": 48}
    bow = [[0, 0], [64, 64], [64, 0], [0, 64], [0, 0]]  # two triangles that meet in a point
    spiky = [[128, 0], [192, 0], [192, 64], [192, 0], [192, 64], [128, 64], [128, 0]]
    write(folder, *[feature(polygon(bow), "a"), feature(polygon(spiky), "b")][::order])
    result = classes(folder)  # outlines may cross and repeat themselves
    assert (result[:2, :2] == "a").all()  # each is half of its patch
    assert (result[:2, 4:6] == "b").all()


# Properties of an outline of 16 patches, and its class.
CLASSES = [
    ({"classification": {"name": "Tumor", "color": [1, 2, 3]}}, "Tumor"),
    ({"name": "ROI 7", "classification": {"names": ["Tumor", "Positive"]}}, "Tumor: Positive"),
    ({"classification": "Tumor"}, "Tumor"),
    ({"label": "Tumor"}, "Tumor"),
    ({"label": "other", "classification": "Tumor"}, "Tumor"),
    ({"classification": {}, "name": "ROI 7"}, None),
    ({"objectType": "detection", "classification": {"name": "Tumor"}}, None),
    ({"objectType": "cell", "classification": {"name": "Tumor"}}, None),
]


def test_class_is_the_classification_and_detections_are_asked_for(folder):
    shape, rest = polygon(box(0, 0, 128, 128)), {"other": 4, "normal": 60}
    for facts, label in CLASSES:
        properties = {"type": "Feature", "geometry": shape, "properties": facts}
        write(folder, area(128, 128, 192, 192, "other"), properties)
        assert counts(folder) == (rest if label is None else rest | {label: 16, "normal": 44})
    ok, texts = check(folder)
    assert (ok, "s1.geojson" in texts["note"]) == (True, True)
    # An unclassified section does not cover the tumour.
    write(folder, TUMOR, feature(SECTION, objectType="annotation", name="whole section"))
    assert counts(folder) == {"tumor": 16, "normal": 48}
    write(folder, feature(SECTION, name="whole section"))
    with pytest.raises(ConfigError, match=r"no outline with a class.*1 without a class"):
        classes(folder)
    cell = feature(SQUARE, "cell", objectType="cell")
    core = area(0, 0, 16, 16, "core", objectType="tma_core")
    write(folder, feature(SECTION, "tumor"), cell, core)
    assert counts(folder) == {"tumor": 64}
    assert counts(folder, detections=True) == {"tumor": 60, "cell": 4}


def asap(*annotations):
    return f"<ASAP_Annotations><Annotations>{''.join(annotations)}</Annotations></ASAP_Annotations>"


def annotation(corners, group, kind="Polygon", order=range(9)):
    places = zip(order, corners, strict=False)
    coordinates = "".join(f'<Coordinate Order="{i}" X="{x}" Y="{y}"/>' for i, (x, y) in places)
    return (
        f'<Annotation Name="A" Type="{kind}" PartOfGroup="{group}">'
        f"<Coordinates>{coordinates}</Coordinates></Annotation>"
    )


def test_groups_of_camelyon_have_classes(folder):
    outlines = [
        annotation(box(0, 0, 128, 128), "_0"), annotation(box(128, 0, 192, 64), "_1"),
        annotation(box(0, 0, 64, 64), "_2"),  # cut out of the tumour
    ]  # fmt: skip
    (folder / "s1.xml").write_text(asap(*outlines))
    groups = {"_0": "tumor", "_1": "tumor", "_2": None}
    assert counts(folder, **XML, groups=groups) == {"tumor": 16, "normal": 48}
    assert counts(folder, **XML, groups=groups, outside=None) == {"tumor": 16}
    assert "_9" in check(folder, **XML, groups={**groups, "_9": "x"})[1]["warning"]
    points = box(64, 64, 128, 128)
    others = annotation(points, "a", "Dot"), annotation(points, "None"), annotation(points[:2], "a")
    (folder / "s1.xml").write_text(asap(outlines[1], *others))
    assert counts(folder, **XML) == {"_1": 4, "normal": 60}
    note = check(folder, **XML)[1]["note"]
    assert all(part in note for part in ("Dot", "without a class", "without area"))


def test_corners_of_asap_follow_their_order(folder):
    # In another order they are a bow tie, of which a side of the square has a quarter.
    for order in ([0, 2, 1, 3], [9, 20, 10, 100]):
        square = annotation([(0, 0), (64, 64), (64, 0), (0, 64)], "Tumor", order=order)
        (folder / "s1.xml").write_text(asap(square))
        for region in ([16, 0, 32, 32], [0, 16, 32, 32]):
            assert classes(folder, **XML, region=region).tolist() == [["Tumor"]]


BOMB = '<!DOCTYPE a [<!ENTITY b "c"><!ENTITY d "&b;&b;">]><ASAP_Annotations>&d;</ASAP_Annotations>'
APERIO = "<Annotations><Annotation><Regions><Region/></Regions></Annotation></Annotations>"


def with_corner(*corner):
    return json.dumps(feature(polygon([[0, 0], [64, 0], [64, 64], [*corner], [0, 0]]), "a"))


REFUSED = [
    ("json", "{", "cannot be read"), ("json", '{"a": 1}', "cannot be read"),
    ("json", 100_000 * "[", "nested too deeply"), ("xml", "\0\1\2", "cannot be read"),
    ("json", json.dumps(feature({"type": "Circle"}, "a")), "geometry type"),
    ("json", with_corner(math.nan, 3), ""), ("json", with_corner(1e12, 3), "off any slide"),
    ("xml", asap(annotation([(0, 0), (64, 0), (64, "NaN")], "a")), "nan"),
    ("xml", asap('<Annotation PartOfGroup="a"><Coordinate Y="1"/></Annotation>'), "'X'"),
    ("xml", BOMB, "document type"), ("xml", "<kml/>", "<kml>.*GeoJSON"),
    ("xml", APERIO, "<Annotations>, not of ASAP"),
]  # fmt: skip


def test_files_that_say_nothing_are_refused(folder):
    for suffix, text, words in REFUSED:
        (folder / f"s1.{suffix}").write_text(text)
        with pytest.raises(ConfigError, match=rf"(?s)s1\..*{words}"):
            classes(folder, labels=f"*.{suffix}")
    ok, texts = check(folder, **XML)
    assert (ok, "s1.xml" in texts["error"]) == (False, True)


# What a file holds, the patches of class a, and whether something is left out.
READ = [
    (feature(SQUARE, "a"), 4, False),
    ([feature(polygon([[*corner, 7] for corner in box(0, 0, 64, 64)]), "a")], 4, False),
    ([feature({"type": "GeometryCollection", "geometries": [POINT, SQUARE]}, "a")], 4, False),
    ([feature(polygon(box(0, 0, 96, 96), box(32, 32, 64, 64)), "a")], 8, False),
    ([feature(POINT, "a"), feature(LINE, "a"), feature(SQUARE, "a")], 4, True),
    ([feature(None, "a"), feature(polygon([]), "a"), feature(SQUARE, "a")], 4, True),
    ([area(9, 9, 9, 9, "a"), feature(SQUARE, "a")], 4, True),
    ([SQUARE, area(0, 0, 32, 64, "a")], 2, True),
]


def test_forms_of_geojson_are_read(folder):
    for held, count, is_noted in READ:
        (folder / "s1.geojson").write_text("\ufeff" + json.dumps(held))
        assert counts(folder)["a"] == count, held
        assert ("s1.geojson" in check(folder)[1]["note"]) == is_noted, held
    (folder / "s1.geojson").unlink()
    (folder / "._s1.geojson").write_bytes(b"\0\xff")  # macOS leaves such files
    write(folder, feature(SQUARE, "tumor"), name="s1.GeoJSON")
    assert counts(folder, names=["ordinary", "cancer"]) == {"ordinary": 60, "cancer": 4}
    write(folder, feature(SQUARE, "tumor"))
    with pytest.raises(ConfigError, match="of one slide"):
        classes(folder)


# Outlines of a file, its name, how severe it is and words that the finding has.
FOUND = [
    ([TUMOR], "S1.geojson", "error", ["S1"]),  # beside s1.tif
    ([area(SIDE + 5, 0, SIDE + 99, 64, "tumor")], "s1.geojson", "error", ["s1.tif", "off"]),
    ([area(SIDE - 20, 0, SIDE + 99, 64, "t")], "s1.geojson", "warning", ["s1.tif", "off"]),
    ([area(0, 0, 9, 9, "small"), TUMOR], "s1.geojson", "warning", ["small"]),  # has no patch
    ([area(0, 0, 9, 9, "small")], "s1.geojson", "error", ["small"]),  # all patches are normal
]


def test_files_outlines_and_classes_without_a_patch_are_found(folder):
    for outlines, name, severity, words in FOUND:
        write(folder, *outlines, name=name)
        ok, texts = check(folder)
        assert all(word in texts[severity] for word in words), (name, texts)
        assert ok == (severity != "error")
        (folder / name).unlink()
    write_slide(folder / "s1.tif", noisy(TISSUE, 6)[: SIDE // 2])
    write(folder, area(SIDE - 64, 0, SIDE, 64, "tumor"))
    assert check(folder) == (True, {"error": "", "warning": "", "note": ""})
    write(folder, TUMOR)
    write(folder, TUMOR, name="s9.geojson")
    ok, texts = check(folder)
    assert (ok, "s9" in texts["warning"]) == (True, True)
    # The plan has them, too.
    data = {"name": "slide", "path": str(folder), **KEYS}
    write(folder, TUMOR, name="S2.geojson")
    write_slide(folder / "s2.tif")
    findings = data_findings(config_of(data=data, image=[PATCH, PATCH]))
    assert any(one.severity == "warning" and "S2" in one.files for one in findings), findings


def test_names_match_slides_of_all_parts_and_never_two(tmp_path):
    for name in ("train/x.tif", "val/y.tif"):
        write_slide(tmp_path / name)
    for name in ("x.geojson", "y.geojson"):
        write(tmp_path, feature(SQUARE, "a"), name=name)
    assert counts(tmp_path, split="train") == {"a": 4, "normal": 60}
    assert check(tmp_path) == (True, {"error": "", "warning": "", "note": ""})
    write_slide(tmp_path / "val/x.tif")
    table = {"labels": "labels.csv", "outside": None}
    for lines, words in (
        ("x,t\ny,n\n", r"labels\.csv.*'x'.* train/x\.tif and val/x\.tif"),
        ("train/x,t\nval/x,n\ny,n\ny.tif,t\n", r"'y' and 'y\.tif'|'y\.tif' and 'y'"),
        ("x,t\ntrain/x,n\ny,n\n", None),
    ):
        (tmp_path / "labels.csv").write_text(f"\ufeffslide,label\n{lines}")  # of Excel
        if words:
            with pytest.raises(ConfigError, match=words):
                classes(tmp_path, **table)
    assert len(source_of(tmp_path, **table)) == 3 * 64
    with pytest.raises(ConfigError, match="'x' names two slides"):
        classes(tmp_path)
    with pytest.raises(ConfigError, match=r"data\.cut=whole"):
        classes(tmp_path, cut="whole")


def stacked(height, upper, lower):
    return np.vstack([noisy(*upper)[:height], noisy(*lower)[height:]])


# Pixels of a slide, and how many of its patches are tissue.
SLIDES = [
    (noisy(GLASS, 4), 0),
    (np.full((SIDE, SIDE, 3), 240, np.uint8), 0),
    (noisy(TISSUE, 10), 64),
    (stacked(128, (TISSUE, 8), ((120, 70, 150), 8)), 64),  # two stains
    (stacked(32, (TISSUE, 8), (GLASS, 4)), 8),
]


def test_tissue_of_slides_without_glass_or_tissue(tmp_path):
    write_slide(tmp_path / "other.tif", stacked(128, (TISSUE, 8), (GLASS, 4)))
    keys = {"labels": None, "outside": None, "tissue": 0.5}
    for pixels, count in SLIDES:
        write_slide(tmp_path / "s1.tif", pixels)
        assert len(source_of(tmp_path, **keys)) == 32 + count
        ok, texts = check(tmp_path, **keys)
        word = {0: "no tissue", 64: "no glass"}.get(count)
        assert ok
        assert ("s1.tif" in texts["note"]) == (word is not None)
        assert word is None or word in texts["note"]
