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
from typing import Any, NamedTuple

from hires.plan.graph import Rect

ROWS, COLUMNS = 0, 1


class Factor(NamedTuple):
    """A part of a dim."""

    size: int
    axis: int | None = None
    """``ROWS`` or ``COLUMNS`` of a map; None: neither."""
    parts: int = 1
    """Tiles that share them; 1: every tile holds all."""


Dim = tuple[Factor, ...]
"""Factors of one dim; a size of 1 adds none, and neighbours that may be merged are one."""
Dims = tuple[Dim, ...]


def map_dims(shape: Sequence[int], grid: Sequence[int]) -> Dims:
    """Returns the dims of an ordinary map (n, C, H, W) on a grid of tiles."""
    image = zip(shape[2:], (ROWS, COLUMNS), grid, strict=True)
    factors = (
        Factor(n, axis, parts) if max(n, parts) > 1 else Factor(n) for n, axis, parts in image
    )
    return (Factor(shape[0]),), (Factor(shape[1]),), *((factor,) for factor in factors)


def whole_dims(shape: Sequence[int]) -> Dims:
    """Returns the dims of a value that is not cut."""
    return tuple((Factor(size),) for size in shape)


def pack(dims: Dims) -> list[list[list[int | None]]]:
    """Returns dims as lists for JSON."""
    return [[list(factor) for factor in dim] for dim in dims]


def unpack(lists: Sequence[Sequence[Sequence[Any]]]) -> Dims:
    """Returns the dims that :func:`pack` wrote."""
    return tuple(tuple(Factor(*factor) for factor in dim) for dim in lists)


def divided(dims: Dims, grid: Sequence[int]) -> Dims | None:
    """Returns dims as the tiles of a grid share them; None if their map lacks what is cut."""
    axes = {factor.axis for dim in dims for factor in dim}
    if any(parts > 1 and axis not in axes for axis, parts in enumerate(grid)):
        return None
    return tuple(
        tuple(f if f.axis is None else f._replace(parts=grid[f.axis]) for f in dim) for dim in dims
    )


def axes_of(dims: Dims) -> set[int]:
    """Returns which of rows and columns tiles cut."""
    return {f.axis for dim in dims for f in dim if f.axis is not None and f.parts > 1}


def is_cut(dim: Dim) -> bool:
    """Whether tiles hold a part of a dim."""
    return any(factor.parts > 1 for factor in dim)


def shape_of(dims: Dims) -> list[int]:
    """Returns the shape of the complete value."""
    return [*map(_size, dims)]


def local_shape(dims: Dims, rect: Rect) -> list[int]:
    """Returns the shape of the part that holds a rectangle of the map."""
    return [math.prod(local_size(factor, rect) for factor in dim) for dim in dims]


def local_factors(dims: Dims, rect: Rect) -> list[int]:
    """Returns the size of every factor, of all dims in order, in a rectangle of the map."""
    return [local_size(factor, rect) for dim in dims for factor in dim]


def regrouped(dims: Dims, shape: Sequence[int]) -> Dims | None:
    """Returns the dims after a reshape; None if tiles would not hold their part of the result."""
    factors = [factor for dim in dims for factor in dim]
    if 0 in shape or any(factor.size == 1 < factor.parts for factor in factors):
        return None
    left = [*reversed(_normal(factors))]  # the outermost last
    result: list[Dim] = []
    for size in shape:
        own: list[Factor] = []
        while size > 1:
            factor = left.pop()
            if size % factor.size:
                halves = _halves(factor, size)
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
    """Returns the order of all factors in a map: an uncut first one, others, rows, columns."""
    axes = [factor.axis for dim in dims for factor in dim]
    return sorted(range(len(axes)), key=lambda i: (-1 if axes[i] is None else axes[i], i))


def map_shape(dims: Dims) -> list[int]:
    """Returns (n, C, H, W): a value's map, where uncut rows or columns are channels."""
    shape = [1, 1, 1, 1]
    for index, factor in enumerate(factor for dim in dims for factor in dim):
        place = (0 if index == 0 else 1) if factor.axis is None else 2 + factor.axis
        shape[place] *= factor.size
    return shape


def is_map(dims: Dims) -> bool:
    """Whether tiles hold a value as an ordinary map (n, C, H, W)."""
    if len(dims) != 4 or is_cut(dims[0]) or is_cut(dims[1]):
        return False
    image = ((dims[2], ROWS), (dims[3], COLUMNS))
    return all(len(dim) == 1 and dim[0].axis == axis for dim, axis in image if is_cut(dim))


def order_of_map(dims: Dims) -> list[int] | None:
    """Returns the order in which four dims are a map; None if rows and columns are no dims."""
    axes = [dim[0].axis for dim in dims]
    image = sorted(axis for axis in axes if axis is not None)
    if len(dims) != 4 or any(len(dim) > 1 for dim in dims) or image != [ROWS, COLUMNS]:
        return None
    others = [place for place, axis in enumerate(axes) if axis is None]
    return [*others, axes.index(ROWS), axes.index(COLUMNS)]


def as_map(dims: Dims) -> Dims:
    """Returns the dims of an ordinary map as :func:`map_dims` has them."""
    grid = [math.prod(factor.parts for factor in dim) for dim in dims[2:]]
    return map_dims(shape_of(dims), grid)


def aligned(operands: Sequence[Dims], rank: int) -> Dims | None:
    """Returns the dims to which operands in tiles are broadcast; None: they do not lie alike."""
    result: list[Dim] = [(Factor(1),)] * rank
    for dims in operands:
        for place, dim in enumerate(dims, start=rank - len(dims)):
            both = merged(result[place], dim)
            if both is None:
                return None
            result[place] = both
    return with_each_axis_once(result)


def merged(dim: Dim, other: Dim) -> Dim | None:
    """Returns the dim to which two of aligned operands are broadcast; None: they lie apart."""
    if dim == other or other == (Factor(1),):
        return dim
    if dim == (Factor(1),):
        return other
    if is_cut(dim) or is_cut(other):
        return None
    return dim if any(factor.axis is not None for factor in dim) else other


def with_each_axis_once(dims: Sequence[Dim]) -> Dims | None:
    """Returns dims where rows that are there twice are plain again; None if both are cut."""
    seen: dict[int, int] = {}  # axis -> tiles that share it
    result: list[Dim] = []
    for dim in dims:
        own: list[Factor] = []
        for factor in dim:
            again = factor.axis is not None and factor.axis in seen
            if again and max(factor.parts, seen[factor.axis or 0]) > 1:
                return None
            if factor.axis is not None:
                seen[factor.axis] = factor.parts
            own.append(Factor(factor.size) if again else factor)
        result.append(tuple(_normal(own)))
    return tuple(result)


def cropped(shape: Sequence[int], to: Dims) -> Dims:
    """Returns the dims of a whole operand of a tiled result, whose full dims are cut alike."""
    own = to[len(to) - len(shape) :]
    sizes = zip(shape, own, shape_of(own), strict=True)
    return tuple(dim if size == full else (Factor(size),) for size, dim, full in sizes)


def local_size(factor: Factor, rect: Rect) -> int:
    """Returns how much of a factor a rectangle of the map holds."""
    if factor.axis is None:
        return factor.size
    return rect[2 * factor.axis + 1] - rect[2 * factor.axis]


def _size(dim: Dim) -> int:
    return math.prod(factor.size for factor in dim)


def _normal(factors: Sequence[Factor]) -> list[Factor]:
    """Merges each factor with the one inside it, if that is plain and no tile's border moves."""
    found: list[Factor] = []
    for factor in factors:
        outer = found[-1] if found else None
        if outer is None or outer == Factor(1):
            found[-1:] = [factor]
        elif factor.axis is None and (factor.size == 1 or outer.size % outer.parts == 0):
            found[-1] = outer._replace(size=outer.size * factor.size)
        else:
            found.append(factor)
    return found


def _halves(factor: Factor, size: int) -> tuple[Factor, Factor] | None:
    """Splits a factor into an outer one of some size and an inner one, if no tile's border cuts."""
    inner, rest = divmod(factor.size, size)
    if rest or size % factor.parts:
        return None
    return factor._replace(size=size), Factor(inner)
