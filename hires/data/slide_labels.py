"""Reads what is known of slides: a class for each, or outlines of regions of a class.

    labels.csv                    slide,label           one class a slide
    annotations/*.geojson         QuPath                outlines with a classification
    annotations/*.xml             ASAP, CAMELYON        outlines in groups

The star stands for the name of a slide, without suffix. Outlines are in pixels of level 0.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

import numpy as np
from numpy.typing import NDArray

from hires.core.errors import ConfigError
from hires.core.store.reading import read_named
from hires.data.image_format import Size
from hires.data.text_tables import MOST_BYTES

Ring = list[tuple[float, float]]
"""Corners of an outline, (column, row), in pixels of level 0."""


class Outline(NamedTuple):
    """A part of a slide that has a class."""

    label: str
    corners: Ring
    holes: list[Ring]


def of_slide(values: Mapping[str, Any], name: str) -> str | None:
    """Returns under which key a slide stands: its path, its file's name, or that without suffix."""
    path = Path(name)
    keys = (name, str(path.with_suffix("")), path.name, path.stem)
    return next((key for key in keys if key in values), None)


def annotation_files(root: Path, pattern: str) -> dict[str, Path]:
    """Returns the files of a pattern below a folder, by what its star stands for."""
    before, _, after = pattern.partition("*")
    found = {}
    for path in sorted(root.rglob(f"*{after}")):
        name = path.relative_to(root).as_posix()
        if path.is_file() and name.startswith(before):
            found[name[len(before) : len(name) - len(after)]] = path
    if not found:
        raise ConfigError(f"data.labels={pattern}: no such files below data.path={root}")
    return found


def read_regions(path: Path) -> list[Outline]:
    """Returns the regions of a GeoJSON or ASAP file.

    ConfigError: it is none, or a region has no class.
    """
    reader = _asap if path.suffix.lower() == ".xml" else _geojson
    try:
        return [*reader(path)]
    except (OSError, ValueError, KeyError, TypeError, IndexError, ElementTree.ParseError) as error:
        reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
        raise ConfigError(f"the annotations {path} cannot be read: {reason}") from None


def _geojson(path: Path) -> Iterator[Outline]:
    held = json.loads(read_named(path, MOST_BYTES))
    features = held.get("features", [held]) if isinstance(held, dict) else held
    for number, feature in enumerate(features):
        known = feature.get("properties") or {}
        named = known.get("classification") or {}
        label = named.get("name") if isinstance(named, dict) else named
        label = label or known.get("label") or known.get("name")
        if not isinstance(label, str) or not label:
            raise ConfigError(
                f"the annotations {path}: feature {number} has no class; set its classification in "
                f"QuPath, or properties.label"
            )
        shape = feature["geometry"]
        polygons = {"Polygon": [shape["coordinates"]], "MultiPolygon": shape["coordinates"]}
        if shape["type"] not in polygons:
            raise ConfigError(
                f"the annotations {path}: feature {number} is a {shape['type']}, which has no "
                f"area; keep polygons"
            )
        for rings in polygons[shape["type"]]:
            corners, *holes = [[(float(x), float(y)) for x, y, *_ in ring] for ring in rings]
            yield Outline(label, corners, holes)


def _asap(path: Path) -> Iterator[Outline]:
    for annotation in ElementTree.fromstring(read_named(path, MOST_BYTES)).iter("Annotation"):
        label = annotation.get("PartOfGroup") or ""
        if label in ("", "None"):
            raise ConfigError(
                f"the annotations {path}: {annotation.get('Name')!r} is in no group; give it one "
                f"in ASAP"
            )
        corners = [one.attrib for one in annotation.iter("Coordinate")]
        yield Outline(label, [(float(c["X"]), float(c["Y"])) for c in corners], [])


def class_map(
    regions: Sequence[Outline], names: Sequence[str], slide: Size, cells: Size
) -> NDArray[np.int32]:
    """Returns the class of each cell of a slide, (h, w), -1 outside of all regions.

    Of regions that overlap the last one counts. ``slide`` is the size of level 0.
    """
    from PIL import Image, ImageDraw

    found = np.full(cells, -1, np.int32)
    down, across = cells[0] / slide[0], cells[1] / slide[1]
    for region in regions:
        drawn = Image.new("1", (cells[1], cells[0]))
        pen = ImageDraw.Draw(drawn)
        for ring, inside in ((region.corners, 1), *((hole, 0) for hole in region.holes)):
            if len(ring) > 2:
                pen.polygon([(x * across - 0.5, y * down - 0.5) for x, y in ring], fill=inside)
        found[np.asarray(drawn)] = names.index(region.label)
    return found
