"""Matches slides with what is known of them: a class for each slide, or outlines of a class.

A patch has the class of its slide, or the one whose outlines cover at least half of its area. Where
outlines overlap the smallest one counts: a nest of tumour in a whole section is tumour. What stands
out on the way (files of no slide, outlines off their slide) is a finding.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hires.core.config.data_config import DataConfig
from hires.core.errors import ConfigError
from hires.data import slide_labels
from hires.data.image_format import Size
from hires.data.source import ERROR, NOTE, WARNING, DataFinding
from hires.data.splits import read_table

_HALF = 0.5 - 1e-9
"""Share of a patch that outlines of one class have to cover, less what rounding may take."""
_KEY = "data.labels"
_PARTS = 4
"""Boxes are divided into so many parts; with fewer each corner is clipped more often."""
_FEW_BOXES, _FEW_CORNERS = 4096, 256
"""So many boxes are compared with shapes of so few corners at once."""


class SlideClasses:
    """The classes of slides or of their patches.

    Args:
        data: its labels, groups, detections, outside and cut.
        root: folder of the slides.
        slides: paths in it of those that are read.
        everything: paths of all slides below it, in other parts, too.
    """

    def __init__(
        self, data: DataConfig, root: Path, slides: Sequence[str], everything: Sequence[str]
    ) -> None:
        self._data, self._root, self._slides = data, root, slides
        self._everything = everything
        self.names: tuple[str, ...] = ("slides",)
        self.of_slide: list[int] = [0] * len(slides)  # where patches have none of their own
        self.outlines: dict[str, list[slide_labels.Outline]] = {}
        self._findings: list[DataFinding] = []
        self._noted: dict[tuple[str, str], list[str]] = {}
        if data.labels is not None and "*" in data.labels:
            self._read_annotations(data.labels)
        elif data.labels is not None:
            self._read_table(root / data.labels)

    def _keys(self, values: Mapping[str, Any], where: str) -> dict[str, str]:
        """Returns the key of each slide; a finding names keys of no slide, in any part."""
        keys = slide_labels.match_slides(values, self._everything, where)
        if unused := sorted({*values} - {*keys.values()}):
            severity = WARNING if keys else ERROR
            text = f"{where}: of no slide; name them as slides are"
            self._findings.append(DataFinding(severity, text, unused, _KEY))
        return keys

    def _read_table(self, path: Path) -> None:
        table = read_table(path, "slide", "label", "data.labels")
        self.names = tuple(sorted({*table.values()}))
        keys = self._keys(table, f"data.labels={path}")
        for number, name in enumerate(self._slides):
            if name not in keys:
                raise ConfigError(
                    f"data.labels={path} has no line for the slide {name}; add it, or take the "
                    f"slide out of data.path"
                )
            self.of_slide[number] = self.names.index(table[keys[name]])

    def _read_annotations(self, pattern: str) -> None:
        if self._data.cut == "whole":
            raise ConfigError(
                f"data.cut=whole has one class a slide, which data.labels={pattern} does not say; "
                f"use a file with the columns slide,label"
            )
        files = slide_labels.annotation_files(self._root, pattern)
        keys = self._keys(files, f"data.labels={pattern}")
        groups = {str(name): label for name, label in self._data.groups.items()}
        outlines: dict[str, list[slide_labels.Outline]] = {}
        left_out, seen, severity = [], set[str](), NOTE
        for key, path in files.items():
            regions, others = slide_labels.read_annotations(path, self._data.detections)
            seen |= {one.label for one in regions if one.label}
            outlines[key] = [
                one._replace(label=groups.get(str(one.label), one.label)) for one in regions
            ]
            if others:
                counts = ", ".join(f"{count} {why}" for why, count in others.items())
                left_out.append(f"{path.relative_to(self._root)}: {counts}")
                severity = severity if regions else WARNING
        outside = {self._data.outside} if self._data.outside else set()
        labels = {one.label for regions in outlines.values() for one in regions if one.label}
        self.names = tuple(sorted(labels | outside))
        if not labels:
            why = f" ({left_out[0]})" if left_out else ""
            raise ConfigError(
                f"data.labels={pattern}: these files have no outline with a class{why}; annotate "
                f"some, set their classification in QuPath or their group in ASAP"
            )
        if left_out:
            text = "outlines that are left out (data.detections=true takes those of detections)"
            self._findings.append(DataFinding(severity, text, left_out, _KEY))
        if unknown := sorted({*groups} - seen):
            text = f"data.groups: in no outline; there are {', '.join(sorted(seen))}"
            self._findings.append(DataFinding(WARNING, text, unknown, _KEY))
        for name in self._slides:
            if name not in keys and not outside:
                raise ConfigError(
                    f"the slide {name} has no annotations {pattern}; add them, or say by "
                    f"data.outside=CLASS what slides and patches without them are"
                )
            self.outlines[name] = outlines.get(keys.get(name, ""), [])

    def of_patches(
        self, number: int, finest: Size, slide: Size, places: list[tuple[int, int]], size: Size
    ) -> list[int]:
        """Returns the class of each patch of a slide; -1: it has none.

        ``places`` and ``size`` of patches are in pixels of the level that is read, which has the
        size ``slide``; outlines are in those of level 0, which has the size ``finest``.
        """
        if not self.outlines:
            return [self.of_slide[number]] * len(places)
        outlines = self.outlines[self._slides[number]]
        outside = self.names.index(self._data.outside) if self._data.outside else -1
        if not outlines or not places:
            return [outside] * len(places)
        down, across = (fine / own for fine, own in zip(finest, slide, strict=True))
        row, col = np.array(places, np.float64).T
        shapes = [outline.shape for outline in outlines]
        boxes = [col * across, row * down, (col + size[1]) * across, (row + size[0]) * down]
        labels = [-1 if one.label is None else self.names.index(one.label) for one in outlines]
        self._find_astray(number, shapes, finest)
        shares = class_shares(shapes, labels, len(self.names), np.stack(boxes, 1))
        classes: list[int] = np.where(shares.max(1) < _HALF, outside, shares.argmax(1)).tolist()
        return classes

    def _find_astray(self, number: int, shapes: list[Any], finest: Size) -> None:
        """Notes outlines that lie off their slide by more than half of their area."""
        import shapely

        slide, areas = shapely.box(0, 0, finest[1], finest[0]), shapely.area(shapes)
        on_slide = shapely.area(shapely.intersection(shapes, slide))
        if count := int((on_slide < areas / 2).sum()):
            severity = WARNING if on_slide.any() else ERROR
            text = "outlines lie off their slide by more than half of their area"
            counts = f"{count} of {len(areas)}; it has {finest[0]} x {finest[1]} pixels"
            self.note(number, severity, text, f": {counts}")

    def note(self, number: int, severity: str, text: str, more: str = "") -> None:
        """Adds a slide to the finding of a text."""
        self._noted.setdefault((severity, text), []).append(f"{self._slides[number]}{more}")

    def findings(self, cut: Collection[int], slides: Collection[int]) -> list[DataFinding]:
        """Returns what stands out, with the classes that are not among those of ``cut`` patches.

        ``slides`` are those whose patches were asked for.
        """
        findings = [*self._findings]
        findings += [DataFinding(*key, names, _KEY) for key, names in self._noted.items()]
        classes = {self.names[label] for label in cut}
        missing = [name for name in self.names if name not in classes]
        if missing and cut and self._data.labels is not None:
            # Where the slides have outlines, but every patch is outside, these were for nothing.
            lists = [self.outlines.get(self._slides[number], []) for number in slides]
            labels = {one.label for outlines in lists for one in outlines} - {None}
            severity = ERROR if labels and not labels & classes else WARNING
            text = "classes without a patch; outlines must cover half of one: use a smaller image"
            text = text if self.outlines else "classes without a patch"
            findings.append(DataFinding(severity, text, missing, _KEY))
        return findings


def class_shares(
    shapes: Sequence[Any], labels: Sequence[int], num_classes: int, boxes: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Returns the exact share of each class in the area of each box, (n, ``num_classes``).

    Boxes are divided until one outline covers them all, none touches them, or those near them have
    few corners; outlines are clipped on the way, so that each box meets only the corners near it.

    Args:
        shapes: valid polygons of shapely; of those that overlap the smallest counts, of equal ones
            the later.
        labels: the class of each; the area of those below 0 has no class.
        num_classes: labels are below it.
        boxes: (n, 4): left, top, right and bottom, in the unit of the shapes.
    """
    import shapely

    order = np.lexsort((-np.arange(len(shapes)), shapely.area(shapes)))
    numbers = np.maximum(np.array(labels, int), -1)[order]
    shares = np.zeros((len(boxes), num_classes + 1))  # the last column is of the label -1
    stack = [(np.arange(len(boxes)), np.arange(len(shapes)), np.array(shapes, object)[order])]
    while stack:
        which, index, parts = stack.pop()
        (left, top), (right, bottom) = boxes[which, :2].min(0), boxes[which, 2:].max(0)
        bounds = shapely.bounds(parts)
        crossing = (bounds[:, :2] < (left, top)).any(1) | (bounds[:, 2:] > (right, bottom)).any(1)
        clip = shapely.box(left, top, right, bottom)
        parts = parts.copy()
        parts[crossing] = shapely.intersection(parts[crossing], clip)
        areas, whole = shapely.area(parts), (right - left) * (bottom - top)
        index, parts, areas = index[areas > 0], parts[areas > 0], areas[areas > 0]
        if not len(parts):
            continue
        is_small = shapely.get_num_coordinates(parts).max() <= _FEW_CORNERS
        if areas[0] >= whole * (1 - 1e-12):
            shares[which, numbers[index[0]]] = 1
        elif len(which) == 1 or (len(which) <= _FEW_BOXES and is_small):
            cells = shapely.box(*boxes[which].T)
            part, cell = shapely.STRtree(cells).query(parts)  # whose bounds overlap
            pieces = _disjoint(shapely.intersection(parts[part], cells[cell]), cell)
            areas = shapely.area(pieces) / shapely.area(cells)[cell]
            np.add.at(shares, (which[cell], numbers[index[part]]), areas)
        else:
            axis = int(bottom - top > right - left)
            ordered = which[boxes[which, axis].argsort(kind="stable")]
            groups = np.array_split(ordered, min(len(ordered), _PARTS))
            stack += [(group, index, parts) for group in groups]
    return shares[:, :num_classes]


def _disjoint(pieces: NDArray[Any], cells: NDArray[np.int_]) -> NDArray[Any]:
    """Returns what of each piece no earlier one of its cell covers."""
    import shapely

    later, earlier = shapely.STRtree(pieces).query(pieces)
    overlaps = (earlier < later) & (cells[earlier] == cells[later])
    later, earlier = later[overlaps], earlier[overlaps]
    left: NDArray[Any] = pieces.copy()
    starts = np.flatnonzero(np.diff(later, prepend=-1))
    for one, others in zip(later[starts], np.split(earlier, starts[1:]), strict=False):
        left[one] = shapely.difference(pieces[one], shapely.union_all(pieces[others]))
    return left
