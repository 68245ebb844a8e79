"""Patches of slides have the class of the outlines that cover half of their area."""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter

import numpy as np
import pytest
import tifffile
from hypothesis import given, settings
from hypothesis import strategies as st

from hires.core.config.data_config import DataConfig
from hires.core.config.run_config import RunConfig
from hires.core.errors import ConfigError
from hires.data.label_check import check_slides
from hires.data.source import open_source
from hires.data.start_check import data_findings
from tests.helpers.layouts import config_of

SIDE, PATCH = 256, 32
RANDOM = np.random.default_rng(0)
GLASS, TISSUE = (243, 242, 244), (190, 110, 160)


def write_slide(path, pixels=None):
    """Writes a pyramid of two levels; without pixels one of tissue alone."""
    if pixels is None:
        pixels = noisy(TISSUE, 6)
    path.parent.mkdir(parents=True, exist_ok=True)
    options = {"tile": (64, 64), "photometric": "rgb", "metadata": None}
    with tifffile.TiffWriter(path) as file:
        file.write(pixels, subifds=1, **options)
        file.write(pixels[::2, ::2], subfiletype=1, **options)


def noisy(colour, deviation, side=SIDE):
    noise = RANDOM.normal(0, deviation, (side, side, 3))
    return (np.array(colour) + noise).clip(0, 255).round().astype(np.uint8)


@pytest.fixture(scope="session")
def one_slide(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one")
    write_slide(folder / "s1.tif")
    return folder


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


def write(folder, *features, name="s1.geojson"):
    held = {"type": "FeatureCollection", "features": [*features]}
    (folder / name).write_text(json.dumps(held))


def source_of(folder, **keys):
    keys = {"labels": "*.geojson", "outside": "normal", "tissue": 0.0} | keys
    return open_source(DataConfig(name="slide", path=str(folder), **keys), (PATCH, PATCH), 3, 0)


def counts(folder, **keys):
    source = source_of(folder, **keys)
    return Counter(source.class_names[source.label(i)] for i in range(len(source)))


def classes(folder, **keys):
    """Returns the class of each patch, by row and column in patches."""
    source = source_of(folder, **keys)
    names = [source.class_names[source.label(i)] for i in range(len(source))]
    side = math.isqrt(len(names))
    return np.array(names).reshape(side, side)


def check(folder, **keys):
    """Returns whether a run can read all of it, and the findings by severity."""
    keys = {"labels": "*.geojson", "outside": "normal", "tissue": 0.0} | keys
    config = RunConfig(image=[PATCH, PATCH], data=DataConfig(name="slide", **keys))
    report = check_slides(str(folder), config, True, lambda done, total: None)
    texts = dict.fromkeys(("error", "warning", "note"), "")
    for one in report.findings:
        texts[one.severity] += f"{one.text} {one.files} "
    return report.ok, texts


@pytest.mark.parametrize("level", [0, 1])
def test_class_needs_half_of_the_area_and_outlines_of_a_class_add_up_once(folder, level):
    size = PATCH << level
    for share, label in ((0.4, "normal"), (0.49, "normal"), (0.5, "tumor")):
        # Strips that cover a share of every patch; cells of a raster would round them.
        strips = [[box(0, top, SIDE, top + share * size)] for top in range(0, SIDE, size)]
        write(folder, feature({"type": "MultiPolygon", "coordinates": strips}, "tumor"))
        assert counts(folder, level=level) == {label: (SIDE // size) ** 2}
    third = 0.3 * size  # beside each other 0.6 of a patch, and on each other 0.3
    write(
        folder,
        feature(polygon(box(0, 0, third, size)), "tumor"),
        feature(polygon(box(third, 0, 2 * third, size)), "tumor"),
        *2 * [feature(polygon(box(size, 0, size + third, size)), "tumor")],
    )
    assert classes(folder, level=level)[0, :2].tolist() == ["tumor", "normal"]


@given(
    st.lists(
        st.tuples(*4 * [st.integers(-20, SIDE + 20)], st.sampled_from("abc")),
        min_size=1,
        max_size=6,
    )
)
@settings(max_examples=40, deadline=None)
def test_classes_follow_from_exact_areas(one_slide, drawn):
    regions = []  # at every pixel the smallest rectangle counts, of equal ones the later
    for x, y, w, h, label in drawn:
        left, top, width, height = x, y, abs(w) % 150 + 1, abs(h) % 150 + 1
        regions.append(((left, top, left + width, top + height), label))
    write(one_slide, *[feature(polygon(box(*corners)), label) for corners, label in regions])
    pixels = np.full((SIDE, SIDE), "normal")
    sized = [((b[2] - b[0]) * (b[3] - b[1]), -i) for i, (b, _) in enumerate(regions)]
    for _, i in sorted(sized, reverse=True):
        (left, top, right, bottom), label = regions[-i]
        pixels[max(0, top) : max(0, bottom), max(0, left) : max(0, right)] = label
    found = classes(one_slide)
    for row, col in itertools.product(range(SIDE // PATCH), repeat=2):
        patch = pixels[row * PATCH :, col * PATCH :][:PATCH, :PATCH]
        shares = {label: (patch == label).mean() for label in "abc"}
        best = [label for label in "abc" if shares[label] >= 0.5]
        assert found[row, col] == (best[0] if best else "normal"), (row, col, shares)


def test_outlines_may_cross_and_repeat_themselves(folder):
    bow = [[0, 0], [64, 64], [64, 0], [0, 64], [0, 0]]  # two triangles that meet in a point
    spiky = [[128, 0], [192, 0], [192, 64], [192, 0], [192, 64], [128, 64], [128, 0]]
    write(folder, feature(polygon(bow), "a"), feature(polygon(spiky), "b"))
    found = classes(folder)
    assert found[:2, :2].tolist() == [["a", "a"], ["a", "a"]]  # each is half of its patch
    assert (found[:2, 4:6] == "b").all()


@pytest.mark.parametrize("order", [1, -1])
def test_smaller_outline_counts_where_they_overlap(folder, order):
    regions = [
        feature(polygon(box(0, 0, SIDE, SIDE)), "section"),
        feature(polygon(box(0, 0, 128, 128)), "tumor"),
        feature(polygon(box(0, 0, 64, 64)), "necrosis"),
    ]
    write(folder, *regions[::order])
    assert counts(folder) == {"necrosis": 4, "tumor": 12, "section": 48}


CLASSES = {
    "name": ({"classification": {"name": "Tumor", "color": [1, 2, 3]}}, "Tumor"),
    "names": ({"name": "ROI 7", "classification": {"names": ["Tumor", "Positive"]}},
              "Tumor: Positive"),
    "text": ({"classification": "Tumor"}, "Tumor"),
    "label": ({"label": "Tumor"}, "Tumor"),
    "empty": ({"classification": {}, "name": "ROI 7"}, None),
    "none": ({"name": "ROI 7"}, None),
    "detection": ({"objectType": "detection", "classification": {"name": "Tumor"}}, None),
    "cell": ({"objectType": "cell", "classification": {"name": "Tumor"}}, None),
}  # fmt: skip


def test_class_is_the_classification(folder):
    shape, rest = polygon(box(0, 0, 128, 128)), {"other": 4, "normal": 60}
    for facts, label in CLASSES.values():
        write(
            folder,
            feature(polygon(box(128, 128, 192, 192)), "other"),
            {"type": "Feature", "geometry": shape, "properties": facts},
        )
        assert counts(folder) == (rest if label is None else rest | {label: 16, "normal": 44})
    ok, found = check(folder)
    assert (ok, "s1.geojson" in found["note"]) == (True, True)


def test_unclassified_section_does_not_cover_the_tumour_and_detections_are_asked_for(folder):
    whole, tumor = polygon(box(0, 0, SIDE, SIDE)), feature(polygon(box(0, 0, 128, 128)), "tumor")
    write(folder, tumor, feature(whole, objectType="annotation", name="whole section"))
    assert counts(folder) == {"tumor": 16, "normal": 48}
    write(folder, feature(whole, name="whole section"))
    with pytest.raises(ConfigError, match=r"no outline with a class.*1 without a class"):
        source_of(folder)
    cell = feature(polygon(box(0, 0, 64, 64)), "cell", objectType="cell")
    core = feature(polygon(box(0, 0, 16, 16)), "core", objectType="tma_core")
    write(folder, feature(whole, "tumor"), cell, core)
    assert counts(folder) == {"tumor": 64}
    assert counts(folder, detections=True) == {"tumor": 60, "cell": 4}


def asap(*annotations, groups=""):
    return (
        f'<?xml version="1.0"?><ASAP_Annotations><Annotations>{"".join(annotations)}'
        f"</Annotations><AnnotationGroups>{groups}</AnnotationGroups></ASAP_Annotations>"
    )


def annotation(corners, group, kind="Polygon", order=None):
    places = enumerate(corners) if order is None else zip(order, corners, strict=True)
    coordinates = "".join(f'<Coordinate Order="{i}" X="{x}" Y="{y}"/>' for i, (x, y) in places)
    return (
        f'<Annotation Name="A" Type="{kind}" PartOfGroup="{group}">'
        f"<Coordinates>{coordinates}</Coordinates></Annotation>"
    )


XML = {"labels": "*.xml"}


def test_groups_of_camelyon_have_classes(folder):
    (folder / "s1.xml").write_text(
        asap(
            annotation(box(0, 0, 128, 128), "_0"),
            annotation(box(128, 0, 192, 64), "_1"),
            annotation(box(0, 0, 64, 64), "_2"),  # cut out of the tumour
        )
    )
    groups = {"_0": "tumor", "_1": "tumor", "_2": None}
    assert counts(folder, **XML, groups=groups) == {"tumor": 16, "normal": 48}
    assert counts(folder, **XML, groups=groups, outside=None) == {"tumor": 16}
    assert counts(folder, **XML)["_0"] == 12
    assert "_9" in check(folder, **XML, groups={**groups, "_9": "x"})[1]["warning"]
    with pytest.raises(ConfigError, match=r"data\.groups has _0: 1"):
        source_of(folder, **XML, groups={"_0": 1})


def test_corners_of_asap_follow_their_order(folder):
    # In another order they are a bow tie, of which a side of the square has a quarter.
    corners = [(0, 0), (64, 64), (64, 0), (0, 64)]
    group = '<Group Name="Tumor" PartOfGroup="None"/>'
    for order in ([0, 2, 1, 3], [9, 20, 10, 100]):
        square = annotation(corners, "Tumor", order=order)
        (folder / "s1.xml").write_text(asap(square, groups=group))
        for region in ([16, 0, 32, 32], [0, 16, 32, 32]):
            assert classes(folder, **XML, region=region).tolist() == [["Tumor"]]


def test_points_of_asap_are_counted(folder):
    tumor, points = annotation(box(0, 0, 64, 64), "a"), box(64, 64, 128, 128)
    others = annotation(points, "a", "Dot"), annotation(points, "None"), annotation(points[:2], "a")
    (folder / "s1.xml").write_text(asap(tumor, *others))
    assert counts(folder, **XML)["a"] == 4
    note = check(folder, **XML)[1]["note"]
    assert all(part in note for part in ("Dot", "without a class", "without area"))


BOMB = '<!DOCTYPE a [<!ENTITY b "c"><!ENTITY d "&b;&b;">]><ASAP_Annotations>&d;</ASAP_Annotations>'
APERIO = (
    '<Annotations MicronsPerPixel="0.5"><Annotation Id="1" Name="Tumor"><Regions><Region Id="1">'
    '<Vertices><Vertex X="0" Y="0"/><Vertex X="64" Y="0"/><Vertex X="64" Y="64"/></Vertices>'
    "</Region></Regions></Annotation></Annotations>"
)
SQUARE = polygon(box(0, 0, 64, 64))


def with_corner(*corner):
    return json.dumps(feature(polygon([[0, 0], [64, 0], [64, 64], [*corner], [0, 0]]), "a"))


REFUSED = {
    "not_json": ("s1.geojson", "{", "cannot be read"),
    "no_geojson": ("s1.geojson", '{"a": 1}', "cannot be read"),
    "deep": ("s1.geojson", 100_000 * "[", "cannot be read"),
    "kind": ("s1.geojson", json.dumps(feature({"type": "Circle"}, "a")), "'Circle'"),
    "nan": ("s1.geojson", with_corner(math.nan, 3), "nan"),
    "far": ("s1.geojson", with_corner(1e12, 3), "1000000000000"),
    "far_xml": ("s1.xml", asap(annotation([(0, 0), (64, 0), (64, "NaN")], "a")), "nan"),
    "no_x": ("s1.xml", asap('<Annotation PartOfGroup="a"><Coordinate Y="1"/></Annotation>'), "'X'"),
    "bomb": ("s1.xml", BOMB, "document type"),
    "aperio": ("s1.xml", APERIO, "Aperio ImageScope.*GeoJSON"),
    "other_xml": ("s1.xml", "<kml/>", "<kml>.*GeoJSON"),
    "binary": ("s1.xml", "\0\1\2", "cannot be read"),
}  # fmt: skip


def test_files_that_say_nothing_are_refused(folder):
    for name, held, text in REFUSED.values():
        (folder / name).write_text(held)
        with pytest.raises(ConfigError, match=rf"(?s)s1\..*{text}"):
            source_of(folder, labels=f"*.{name.partition('.')[2]}")
    ok, found = check(folder, **XML)
    assert (ok, "s1.xml" in found["error"]) == (False, True)


POINT, LINE = {"type": "Point", "coordinates": [5, 5]}, {"type": "LineString", "coordinates": []}
READ = {
    "feature": (feature(SQUARE, "a"), 4),
    "height": ([feature(polygon([[*corner, 7] for corner in box(0, 0, 64, 64)]), "a")], 4),
    "collection": ([feature({"type": "GeometryCollection", "geometries": [POINT, SQUARE]}, "a")],
                   4),
    "hole": ([feature(polygon(box(0, 0, 96, 96), box(32, 32, 64, 64)), "a")], 8),
    "point": ([feature(POINT, "a"), feature(SQUARE, "a")], 4),
    "null": ([feature(None, "a"), feature(SQUARE, "a")], 4),
    "no_corners": ([feature(polygon(), "a"), feature(polygon([]), "a"), feature(SQUARE, "a")], 4),
    "flat": ([feature(polygon([[0, 0], [9, 9], [99, 99], [0, 0]]), "a"), feature(SQUARE, "a")], 4),
    "no_class": ([SQUARE, feature(polygon(box(0, 0, 32, 64)), "a")], 2),
}  # fmt: skip


def test_forms_of_geojson_are_read(folder):
    left_out = "point", "line", "null", "no_corners", "flat", "no_class"
    for case, (held, count) in READ.items():
        (folder / "s1.geojson").write_text("\ufeff" + json.dumps(held))
        assert counts(folder)["a"] == count, case
        assert ("s1.geojson" in check(folder)[1]["note"]) == (case in left_out), case


def test_files_and_outlines_that_meet_no_slide_are_found(folder):
    tumor = feature(polygon(box(0, 0, 64, 64)), "tumor")
    write(folder, tumor, name="S1.geojson")  # beside s1.tif
    ok, found = check(folder)
    assert (ok, "S1" in found["error"], "s1.tif" in found["error"]) == (False, True, True)
    write(folder, tumor)
    (folder / "S1.geojson").rename(folder / "s9.geojson")
    ok, found = check(folder)
    assert (ok, "s9" in found["warning"]) == (True, True)
    (folder / "s9.geojson").unlink()
    off = feature(polygon(box(SIDE + 5, 0, SIDE + 99, 64)), "tumor")
    partly = feature(polygon(box(SIDE - 20, 0, SIDE + 99, 64)), "tumor")
    for outlines, severity in (
        ((off,), "error"),
        ((off, tumor), "warning"),
        ((partly,), "warning"),
    ):
        write(folder, *outlines)
        ok, found = check(folder)
        assert "s1.tif" in found[severity]
        assert "off" in found[severity]
        assert ok == (not found["error"])


def test_suffixes_in_capitals_and_hidden_files_are_no_trap(folder):
    (folder / "._s1.geojson").write_bytes(b"\0\xff")  # macOS leaves such files
    write(folder, feature(SQUARE, "tumor"), name="s1.GeoJSON")
    assert counts(folder)["tumor"] == 4
    assert counts(folder, names=["ordinary", "cancer"]) == {"ordinary": 60, "cancer": 4}
    write(folder, feature(SQUARE, "tumor"))
    with pytest.raises(ConfigError, match="of one slide"):
        source_of(folder)


def test_outlines_of_other_parts_match_their_slides(tmp_path):
    for name in ("train/x.tif", "val/y.tif"):
        write_slide(tmp_path / name)
    for name in ("x.geojson", "y.geojson"):
        write(tmp_path, feature(SQUARE, "a"), name=name)
    assert counts(tmp_path, split="train") == {"a": 4, "normal": 60}
    assert check(tmp_path) == (True, {"error": "", "warning": "", "note": ""})


def test_classes_without_a_patch_are_found(folder):
    small = feature(polygon(box(0, 0, 9, 9)), "small")
    for others, severity in (
        ([feature(polygon(box(64, 64, 128, 128)), "tumor")], "warning"),
        ([], "error"),  # all patches are normal
    ):
        write(folder, small, *others)
        ok, found = check(folder)
        assert (ok, "small" in found[severity]) == (severity == "warning", True)


def test_plan_has_the_findings(folder):
    tumor = feature(polygon(box(0, 0, 128, 128)), "tumor")
    write(folder, tumor, feature(POINT, "tumor"))
    keys = {"labels": "*.geojson", "outside": "normal", "tissue": 0.0}
    config = config_of(data={"name": "slide", "path": str(folder), **keys}, image=[PATCH, PATCH])
    [(severity, _, text)] = data_findings(config)
    assert (severity, "Point" in text) == ("note", True)
    write(folder, tumor, name="S2.geojson")
    write_slide(folder / "s2.tif")
    found = data_findings(config)
    assert any(severity == "error" and "S2" in text for severity, _, text in found), found


def test_line_or_file_that_names_two_slides_is_refused(tmp_path):
    for name in ("a/x.tif", "b/x.tif", "y.tif"):
        write_slide(tmp_path / name)
    for table, names in (
        ("x,t\ny,n\n", ("'x'", "a/x.tif", "b/x.tif")),
        ("x.tif,t\ny,n\n", ("'x.tif'", "a/x.tif", "b/x.tif")),
        ("a/x,t\nb/x,n\ny,n\ny.tif,t\n", ("'y'", "'y.tif'", "y.tif")),
        ("x,t\na/x,n\ny,n\n", None),
    ):
        (tmp_path / "labels.csv").write_text(f"slide,label\n{table}")
        if names is None:
            assert len(source_of(tmp_path, labels="labels.csv", outside=None)) == 3 * 64
            continue
        with pytest.raises(ConfigError) as error:
            source_of(tmp_path, labels="labels.csv", outside=None)
        assert all(name in str(error.value) for name in ("labels.csv", *names))
    write(tmp_path, feature(SQUARE, "a"), name="x.geojson")
    with pytest.raises(ConfigError, match="'x' names two slides"):
        source_of(tmp_path)
    with pytest.raises(ConfigError, match=r"data\.cut=whole"):
        source_of(tmp_path, cut="whole")


SLIDES = {
    "blank": (noisy(GLASS, 4), 0),
    "flat": (np.full((SIDE, SIDE, 3), 240, np.uint8), 0),
    "tissue": (noisy(TISSUE, 10), 64),
    "two_stains": (np.vstack([noisy(TISSUE, 8)[:128], noisy((120, 70, 150), 8)[128:]]), 64),
    "both": (np.vstack([noisy(TISSUE, 8)[:128], noisy(GLASS, 4)[128:]]), 32),
    "little": (np.vstack([noisy(TISSUE, 8)[:32], noisy(GLASS, 4)[32:]]), 8),
}


def test_tissue_of_slides_without_glass_or_tissue(tmp_path):
    write_slide(tmp_path / "other.tif", SLIDES["both"][0])
    for pixels, count in SLIDES.values():
        write_slide(tmp_path / "s1.tif", pixels)
        source = source_of(tmp_path, labels=None, outside=None, tissue=0.5)
        assert sum(source.name(i).startswith("s1") for i in range(len(source))) == count
        ok, found = check(tmp_path, labels=None, outside=None, tissue=0.5)
        word = {0: "no tissue", 64: "no glass"}.get(count)
        assert ok
        assert ("s1.tif" in found["note"]) == (word is not None)
        assert word is None or word in found["note"]
