"""Computes exactly which share of the area of boxes is of which class, given outlines.

    +-----------------+    Boxes are divided until one class covers them all, none touches
    |   ..::|:::..    |    them, or the outlines near them have few corners; outlines are
    |  :::::|:::::::  |    clipped on the way, so that each box meets only the corners near it.
    +-----------------+

Where outlines overlap the smallest one counts: a nest of tumour in a whole section is tumour.
The area of what lies inside of a larger outline is taken off its area.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Shapes = NDArray[Any]
"""(n,): polygons of shapely."""
_PARTS = 4
"""Boxes are divided into so many parts; with fewer each corner is clipped more often."""
_FEW_BOXES, _FEW_CORNERS = 4096, 256
"""So many boxes are compared with shapes of so few corners at once."""


def class_shares(
    shapes: Sequence[Any], labels: Sequence[int], num_classes: int, boxes: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Returns the share of each class in the area of each box, (n, ``num_classes``).

    Args:
        shapes: valid polygons of shapely.
        labels: the class of each; of those below 0 the area has no class.
        num_classes: labels are below it.
        boxes: (n, 4): left, top, right and bottom, in the unit of the shapes.
    """
    import shapely

    # The last column is of area without a class, which the label -1 stands for.
    shares = np.zeros((len(boxes), num_classes + 1))
    numbers = np.maximum(np.array(labels, int), -1)
    parts, outer = _disjoint(np.array(shapes, object), numbers)
    counts = np.flatnonzero((numbers >= 0) | (outer >= 0))
    stack = [(np.arange(len(boxes)), counts, parts[counts])]
    while stack:
        which, index, own = stack.pop()
        (left, top), (right, bottom) = boxes[which, :2].min(0), boxes[which, 2:].max(0)
        own = _clipped(own, np.array([left, top, right, bottom]))
        areas, whole = shapely.area(own), (right - left) * (bottom - top)
        index, own, areas = index[areas > 0], own[areas > 0], areas[areas > 0]
        if not len(own):
            continue
        if len(own) == 1 and areas[0] >= whole * (1 - 1e-12):
            shares[which, numbers[index]] = 1
        elif len(which) <= _FEW_BOXES and shapely.get_num_coordinates(own).max() <= _FEW_CORNERS:
            cells = shapely.box(*boxes[which].T)
            part, cell = shapely.STRtree(cells).query(own)  # whose bounds overlap
            areas = shapely.area(shapely.intersection(own[part], cells[cell]))
            areas /= shapely.area(cells)[cell]
            np.add.at(shares, (which[cell], numbers[index[part]]), areas)
            np.subtract.at(shares, (which[cell], outer[index[part]]), areas)
        elif len(which) == 1:
            np.add.at(shares, (which, numbers[index]), areas / whole)
            np.subtract.at(shares, (which, outer[index]), areas / whole)
        else:
            axis = int(bottom - top > right - left)
            order = which[boxes[which, axis].argsort(kind="stable")]
            groups = np.array_split(order, min(len(order), _PARTS))
            stack += [(group, index, own) for group in groups]
    return shares[:, :num_classes]


def _disjoint(shapes: Shapes, labels: NDArray[np.int_]) -> tuple[Shapes, NDArray[np.int_]]:
    """Returns what is left of each shape, and the label of which it takes the area away.

    Of shapes that overlap the smaller one counts, of equal ones the later. What is left of a shape
    is without the others that count there, but for those that lie inside of it and meet no border:
    cells of an annotated region would be as many holes. Their area is taken off the label of the
    smallest shape around them, which is returned for them, and -1 for others.
    """
    import shapely

    order = np.lexsort((-np.arange(len(shapes)), shapely.area(shapes)))
    ordered = shapes[order]
    large, small = shapely.STRtree(ordered).query(ordered)  # whose bounds overlap
    large, small = large[small < large], small[small < large]
    shapely.prepare(ordered[np.unique(large)])
    meets = shapely.intersects(ordered[large], ordered[small])
    large, small = large[meets], small[meets]
    inside = shapely.contains_properly(ordered[large], ordered[small])
    around = np.full(len(shapes), len(shapes))
    np.minimum.at(around, small[inside], large[inside])
    is_island = around < len(shapes)
    is_cut = ~inside & ~shapely.touches(ordered[large], ordered[small])
    is_island[small[is_cut]] = is_island[large[is_cut]] = False
    while True:  # what is cut out of an island is cut out of what is around that, too
        cuts = is_cut | (inside & (around[small] == large) & ~is_island[small])
        if not is_island[large[cuts]].any():
            break
        is_island[large[cuts]] = False
    left: Shapes = shapes.copy()
    starts = np.flatnonzero(np.diff(large[cuts], prepend=-1))
    for one, smaller in zip(large[cuts][starts], np.split(small[cuts], starts[1:]), strict=False):
        left[order[one]] = shapely.difference(ordered[one], shapely.union_all(ordered[smaller]))
    outer = np.full(len(shapes), -1)
    islands = np.flatnonzero(is_island)
    outer[order[islands]] = labels[order[around[islands]]]
    return left, outer


def _clipped(shapes: Shapes, box: NDArray[np.float64]) -> Shapes:
    """Returns what of each shape is in a box; shapes that lie in it stay as they are."""
    import shapely

    bounds = shapely.bounds(shapes)
    low, high = bounds[:, :2] < box[:2], bounds[:, 2:] > box[2:]
    crossing = low.any(1) | high.any(1)
    clipped: Shapes = shapes.copy()
    clipped[crossing] = shapely.intersection(shapes[crossing], shapely.box(*box))
    return clipped
