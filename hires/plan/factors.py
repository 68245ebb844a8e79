"""Follows the rows and columns of a map through operators that move, split or merge its dims.

Every dim of a value is a list of factors, outermost first. A factor that is the rows or the columns
of a map is cut by tiles; of the others every tile holds all:

    (n, C, H, W)                     [n] [C] [H] [W]
    flatten(2).transpose(1, 2)       [n] [H W] [C]              a tile holds its pixels, row by row
    view(n, H/7, 7, W/7, 7, C)       [n] [H/7] [7] [W/7] [7] [C]        rows and columns of windows
    permute, reshape                 [n H/7 W/7] [49] [C]               7x7 pixels are channels now
    view(n, g, C/g, H, W)            [n] [g] [C/g] [H] [W]

Rows may be split where all tiles have equally many and the inner part divides them, so that the
outer part is rows of a smaller map, cut at the same borders:

    12 rows on 2 tiles      | 0 1 2 3 4 5 | 6 7 8 9 10 11 |
    [4] [3]: rows of 3      | 0 0 0 1 1 1 | 2 2 2 3  3  3 |      4 rows on 2 tiles

So every tiled value is a map (n, C, H, W) whose dims lie in another order: its *map shape* has all
uncut factors but the first in the channels. Messages, crops and halos are made of that map.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

from hires.plan.graph import Rect

ROWS, COLUMNS = 0, 1


class Factor(NamedTuple):
    """A part of a dim."""

    size: int
    axis: int | None = None
    """``ROWS`` or ``COLUMNS`` of the map, if tiles cut them; None: every tile holds all."""


Dim = tuple[Factor, ...]
"""Factors of one dim, in normal form: an uncut dim is one factor, and what may be merged is."""
Dims = tuple[Dim, ...]


def map_dims(shape: Sequence[int], grid: Sequence[int]) -> Dims:
    """Returns the dims of an ordinary map (n, C, H, W) on a grid of tiles."""
    axes = (None, None, *(axis if grid[axis] > 1 else None for axis in (ROWS, COLUMNS)))
    return tuple((Factor(size, axis),) for size, axis in zip(shape, axes, strict=True))


def whole_dims(shape: Sequence[int]) -> Dims:
    """Returns the dims of a value that is not cut."""
    return tuple((Factor(size),) for size in shape)


def is_cut(dim: Dim) -> bool:
    """Whether tiles hold a part of a dim."""
    return any(factor.axis is not None for factor in dim)


def shape_of(dims: Dims) -> list[int]:
    """Returns the shape of the complete value."""
    return [math.prod(factor.size for factor in dim) for dim in dims]


def local_shape(dims: Dims, rect: Rect) -> list[int]:
    """Returns the shape of the part that holds a rectangle of the map."""
    return [math.prod(_local(factor, rect) for factor in dim) for dim in dims]


def local_factors(dims: Dims, rect: Rect) -> list[int]:
    """Returns the size of every factor, of all dims in order, in a rectangle of the map."""
    return [_local(factor, rect) for dim in dims for factor in dim]


def regrouped(dims: Dims, shape: Sequence[int], grid: Sequence[int]) -> Dims | None:
    """Returns the dims after a reshape; None if tiles would not hold their part of the result."""
    if 0 in shape or any(f.size == 1 for dim in dims for f in dim if f.axis is not None):
        return None
    left = [*reversed(_normal([factor for dim in dims for factor in dim], grid))]  # outermost last
    result: list[Dim] = []
    for size in shape:
        own: list[Factor] = []
        while size > 1:
            factor = left.pop()
            if size % factor.size:
                halves = _halves(factor, size, grid)
                if halves is None:
                    return None
                factor, inner = halves
                left.append(inner)
            own.append(factor)
            size //= factor.size
        result.append(tuple(own) or (Factor(1),))
    pairs = itertools.chain.from_iterable(map(itertools.pairwise, result))
    uneven = any(outer.axis is not None and inner.axis is None for outer, inner in pairs)
    return None if uneven else tuple(result)


def map_order(dims: Dims) -> list[int]:
    """Returns the order of all factors in which the map has them: [first], others, rows, columns.

    The first is that of the first dim, if it is not cut.
    """
    axes = [factor.axis for dim in dims for factor in dim]
    return sorted(range(len(axes)), key=lambda i: (-1 if axes[i] is None else axes[i], i))


def map_shape(dims: Dims) -> list[int]:
    """Returns (n, C, H, W): a value's map, where uncut rows or columns are channels."""
    shape = [1, 1, 1, 1]
    for index, factor in enumerate(factor for dim in dims for factor in dim):
        place = (0 if index == 0 else 1) if factor.axis is None else 2 + factor.axis
        shape[place] *= factor.size
    return shape


def is_map(dims: Dims, grid: Sequence[int]) -> bool:
    """Whether a value is an ordinary map (n, C, H, W)."""
    return len(dims) == 4 and dims == map_dims(shape_of(dims), grid)


def aligned(operands: Sequence[Dims], rank: int) -> Dims | None:
    """Returns the dims of a result of so many dims to which tiled operands are broadcast.

    None if the pixels of two operands do not lie alike.
    """
    result: list[Dim] = [(Factor(1),)] * rank
    for dims in operands:
        for place, dim in enumerate(dims, start=rank - len(dims)):
            other = result[place]
            if other == (Factor(1),):
                result[place] = dim
            elif dim not in ((Factor(1),), other):
                return None
    axes = [factor.axis for dim in result for factor in dim if factor.axis is not None]
    return tuple(result) if len(axes) == len(set(axes)) else None


def cropped(shape: Sequence[int], to: Dims) -> Dims:
    """Returns the dims of a whole operand that is broadcast to a tiled result.

    Its dims of full size are cut as those of the result.
    """
    own = to[len(to) - len(shape) :]
    sizes = zip(shape, own, shape_of(own), strict=True)
    return tuple(dim if size == full else (Factor(size),) for size, dim, full in sizes)


def _local(factor: Factor, rect: Rect) -> int:
    if factor.axis is None:
        return factor.size
    return rect[2 * factor.axis + 1] - rect[2 * factor.axis]


def _normal(factors: Sequence[Factor], grid: Sequence[int]) -> list[Factor]:
    """Merges each factor with the one inside it, if it is whole and no tile's border moves."""
    merged: list[Factor] = []
    for factor in factors:
        outer = merged[-1] if merged else Factor(1)
        even = outer.axis is None or outer.size % grid[outer.axis] == 0
        if merged and factor.axis is None and (even or factor.size == 1):
            merged[-1] = Factor(outer.size * factor.size, outer.axis)
        elif outer == Factor(1) and merged:
            merged[-1] = factor
        else:
            merged.append(factor)
    return merged


def _halves(factor: Factor, size: int, grid: Sequence[int]) -> tuple[Factor, Factor] | None:
    """Splits a factor into an outer one of some size and an inner one, if no tile's border cuts."""
    inner, rest = divmod(factor.size, size)
    if rest or (factor.axis is not None and size % grid[factor.axis]):
        return None
    return Factor(size, factor.axis), Factor(inner)
