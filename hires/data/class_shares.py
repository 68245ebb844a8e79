"""Computes exactly which share of the area of boxes is of which class, given outlines.

    +-----------------+    Boxes are divided until one class covers them all, none touches
    |   ..::|:::..    |    them, or one is left; outlines are clipped on the way, so that
    |  :::::|:::::::  |    each box meets only the corners near it.
    +-----------------+

Where outlines overlap the smallest one counts: a nest of tumour in a whole section is tumour.
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

    shares = np.zeros((len(boxes), num_classes))
    numbers, own = np.array(labels, int), _without_smaller(np.array(shapes, object))
    stack = [(np.arange(len(boxes)), numbers[numbers >= 0], own[numbers >= 0])]
    while stack:
        which, numbers, own = stack.pop()
        (left, top), (right, bottom) = boxes[which, :2].min(0), boxes[which, 2:].max(0)
        own = _clipped(own, np.array([left, top, right, bottom]))
        areas, whole = shapely.area(own), (right - left) * (bottom - top)
        numbers, own, areas = numbers[areas > 0], own[areas > 0], areas[areas > 0]
        if not len(own):
            continue
        if areas.max() >= whole * (1 - 1e-12):
            shares[which, numbers[areas.argmax()]] = 1
        elif len(which) == 1:
            np.add.at(shares, (which, numbers), areas / whole)
        else:
            axis = int(bottom - top > right - left)
            order = which[boxes[which, axis].argsort(kind="stable")]
            parts = np.array_split(order, min(len(order), _PARTS))
            stack += [(part, numbers, own) for part in parts]
    return shares


def _without_smaller(shapes: Shapes) -> Shapes:
    """Returns each shape without those that count where they overlap; of equal ones the later."""
    import shapely

    order = np.lexsort((-np.arange(len(shapes)), shapely.area(shapes)))
    ordered = shapes[order]
    large, small = shapely.STRtree(ordered).query(ordered)  # whose bounds overlap
    ones, starts = np.unique(large[small < large], return_index=True)
    left: Shapes = shapes.copy()
    for one, smaller in zip(ones, np.split(small[small < large], starts[1:]), strict=False):
        shapely.prepare(ordered[one])
        meeting = smaller[shapely.intersects(ordered[one], ordered[smaller])]
        left[order[one]] = shapely.difference(ordered[one], shapely.union_all(ordered[meeting]))
    return left


def _clipped(shapes: Shapes, box: NDArray[np.float64]) -> Shapes:
    """Returns what of each shape is in a box; shapes that lie in it stay as they are."""
    import shapely

    bounds = shapely.bounds(shapes)
    low, high = bounds[:, :2] < box[:2], bounds[:, 2:] > box[2:]
    crossing = low.any(1) | high.any(1)
    clipped: Shapes = shapes.copy()
    clipped[crossing] = shapely.intersection(shapes[crossing], shapely.box(*box))
    return clipped
