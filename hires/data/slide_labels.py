"""Reads what is known of slides: a class for each, or outlines of regions of a class.

    labels.csv                    slide,label           one class a slide
    annotations/*.geojson         QuPath                outlines with a classification
    annotations/*.xml             ASAP, CAMELYON        outlines in groups

The star stands for the name of a slide, without suffix. Outlines are in pixels of level 0.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

import numpy as np
from numpy.typing import NDArray

from hires.core.errors import ConfigError
from hires.core.store.reading import read_named
from hires.data.image_format import MAX_SIDE
from hires.data.sources.folder import reason_of, visible_files
from hires.data.splits import MOST_BYTES

_DETECTIONS = ("detection", "cell", "tile", "PathDetectionObject", "PathCellObject")
"""Objects of QuPath, by the names of its versions, that ``data.detections`` asks for."""
_POINTS = ("dot", "pointset", "measurement")
"""Types of ASAP's annotations that have no area."""
_CORE = ("tma_core", "TMACoreObject")


class Outline(NamedTuple):
    """A part of a slide and its class."""

    label: str | None
    """None: none, as groups that ``data.groups`` leaves out."""
    shape: Any
    """Polygons of shapely, (column, row), valid."""


def match_slides(keys: Iterable[str], names: Sequence[str], where: str) -> dict[str, str]:
    """Returns the key of each slide: its path, its file's name, or one of these without suffix.

    ConfigError, which begins with ``where``: a key names two slides, or two keys one.
    """
    keys = {*keys}
    slides: dict[str, str] = {}
    others: list[tuple[str, str]] = []
    for name in names:
        path = Path(name)
        found = (name, str(path.with_suffix("")), path.name, path.stem)
        own = [key for key in dict.fromkeys(found) if key in keys]
        if own and slides.setdefault(own[0], name) != name:
            raise ConfigError(
                f"{where}: {own[0]!r} names two slides, {slides[own[0]]} and {name}; name each by "
                f"its path"
            )
        others += [(name, key) for key in own[1:]]
    for name, key in others:
        if key not in slides:
            first = next(one for one, slide in slides.items() if slide == name)
            raise ConfigError(f"{where}: {first!r} and {key!r} both name {name}; keep one of them")
    return {name: key for key, name in slides.items()}


def annotation_files(root: Path, pattern: str) -> dict[str, Path]:
    """Returns the files of a pattern below a folder, by what its star stands for."""
    before, _, after = pattern.casefold().partition("*")  # also S1.GeoJSON
    found: dict[str, Path] = {}
    for path in map(Path, visible_files(root)):
        name = path.relative_to(root).as_posix()
        if name.casefold().startswith(before) and name.casefold().endswith(after):
            slide = name[len(before) : len(name) - len(after)]
            if found.setdefault(slide, path) != path:
                raise ConfigError(
                    f"data.labels={pattern}: {found[slide]} and {path} are of one slide"
                )
    if not found:
        raise ConfigError(f"data.labels={pattern}: no such files below data.path={root}")
    return found


def read_annotations(path: Path, detections: bool = False) -> tuple[list[Outline], Counter[str]]:
    """Returns the regions of a GeoJSON or ASAP file, of QuPath's ``detections``, too.

    Behind them stands how many shapes are no region, by the reason. ConfigError: it is no such
    file, or an outline has a corner that is no place on a slide.
    """
    import shapely

    outlines, left_out = list[Outline](), Counter[str]()
    try:
        text = read_named(path, MOST_BYTES).lstrip("\ufeff")
        shapes = _asap(text) if path.suffix.lower() == ".xml" else _geojson(text, detections)
        for label, shape, reason in shapes:
            if not reason:
                valid = shapely.make_valid(shape, method="structure", keep_collapsed=False)
                parts = shapely.get_parts(shapely.get_parts(valid))  # of a collection in one, too
                parts = parts[shapely.area(parts) > 0]
                if len(parts) and label:
                    one = parts[0] if len(parts) == 1 else shapely.union_all(parts)
                    outlines.append(Outline(label, one))
                    continue
                reason = "without a class" if len(parts) else "without area"
            left_out[reason] += 1
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError,
            ElementTree.ParseError, shapely.errors.ShapelyError) as error:  # fmt: skip
        raise ConfigError(f"the annotations {path} cannot be read: {reason_of(error)}") from None
    return outlines, left_out


_Shapes = Iterator[tuple[str | None, Any, str]]
"""Class, shape of shapely, and why this is no region."""


def _geojson(text: str, detections: bool) -> _Shapes:
    import shapely

    held = json.loads(text)
    features = held.get("features", [held]) if isinstance(held, dict) else held
    for number, feature in enumerate(features):
        is_feature = "geometry" in feature
        facts = (feature.get("properties") or {}) if is_feature else {}
        geometry = feature["geometry"] if is_feature else feature
        kind = facts.get("objectType") or facts.get("object_type") or feature.get("id")
        if kind in _CORE or (kind in _DETECTIONS and not detections):
            yield None, None, str(kind)
            continue
        shape = shapely.from_geojson(json.dumps(geometry)) if geometry else shapely.Polygon()
        _require_places(shapely.get_coordinates(shape))
        yield _class_of(facts, number), shape, ""


def _class_of(facts: dict[str, Any], number: int) -> str | None:
    """Returns the classification as QuPath shows it, else ``label``; never the object's name."""
    label = facts.get("classification") or facts.get("label")
    if isinstance(label, dict):
        names = label.get("names")
        label = ": ".join(names) if names else label.get("name")
    if not isinstance(label, str | None):
        raise ValueError(f"feature {number} has the class {label!r}, which is no text")
    return label


def _asap(text: str) -> _Shapes:
    import shapely

    if "<!DOCTYPE" in text:  # its entities may grow without bounds
        raise ValueError("it declares a document type, which no file of ASAP does")
    root = ElementTree.fromstring(text)
    if root.tag != "ASAP_Annotations":
        raise ValueError(
            f"it is of <{root.tag}>, not of ASAP; open it in QuPath or another program that reads "
            f"it, as Aperio ImageScope's, and export GeoJSON"
        )
    for annotation in root.iter("Annotation"):
        kind, label = annotation.get("Type", "Polygon"), annotation.get("PartOfGroup")
        corners = [one.attrib for one in annotation.iter("Coordinate")]
        corners.sort(key=lambda corner: float(corner.get("Order", 0)))
        ring = np.array([(corner["X"], corner["Y"]) for corner in corners], float)
        _require_places(ring.reshape(-1, 2))
        shape = shapely.Polygon(ring if len(ring) > 2 else ())
        reason = f"without area ({kind})" if kind.lower() in _POINTS else ""
        yield None if label == "None" else label, shape, reason


def _require_places(corners: NDArray[np.float64]) -> None:
    """Raises a ValueError if a corner of (n, 2) is no place on any slide; nan is none."""
    far = corners[~(np.abs(corners) <= MAX_SIDE).all(1)]
    if len(far):
        raise ValueError(f"a corner at {tuple(far[0].tolist())} is off any slide")
