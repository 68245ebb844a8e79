"""Tiles follow every reshape, and a tile that follows the rules makes its part of every node."""

from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hires.parallel.map_views import from_map, tile_of, to_map
from hires.plan.factors import (
    COLUMNS,
    ROWS,
    Dims,
    Factor,
    aligned,
    cropped,
    is_map,
    local_shape,
    map_dims,
    map_shape,
    regrouped,
    shape_of,
)
from hires.plan.graph import Rect
from hires.plan.tiling import own_rects


def rects(dims: Dims, grid: tuple[int, int]) -> list[Rect]:
    """What each tile owns of a value's map."""
    return own_rects(map_shape(dims)[2:], grid)


def random_shape(total: int, choose: random.Random) -> list[int]:
    """Sizes of a few dims that hold so many numbers."""
    sizes = []
    while total > 1 and len(sizes) < 5:
        sizes.append(choose.choice([n for n in range(1, total + 1) if total % n == 0]))
        total //= sizes[-1]
    return [*sizes, total]


def regroup(shape: list[int], choose: random.Random) -> list[int]:
    """A new shape: dims are merged with the next ones and divided anew."""
    sizes, left = [], list(shape)
    while left:
        count = choose.randint(1, len(left))
        sizes += random_shape(math.prod(left[:count]), choose)
        left = left[count:]
    return sizes if len(sizes) <= 10 else [math.prod(shape)]


@settings(max_examples=300, deadline=None)
@given(
    size=st.tuples(st.integers(2, 12), st.integers(2, 12)),
    grid=st.sampled_from([(2, 1), (1, 2), (2, 2), (3, 2), (1, 4)]),
    seed=st.integers(0, 2**30),
)
def test_any_chain_of_reshapes_and_permutations_keeps_pixels_in_their_tiles(size, grid, seed):
    choose = random.Random(seed)
    whole = torch.arange(2 * 6 * math.prod(size)).view(2, 6, *size)
    dims: Dims = map_dims(whole.shape, grid)
    tiles = [tile_of(whole, dims, rect) for rect in rects(dims, grid)]
    for _ in range(6):
        order = choose.sample(range(len(dims)), len(dims))
        if choose.random() < 0.5:
            whole, dims = whole.permute(order), tuple(dims[place] for place in order)
            tiles = [tile.permute(order) for tile in tiles]
        else:
            shape = regroup(list(whole.shape), choose)
            later = regrouped(dims, shape)
            if later is None:
                continue
            whole, dims = whole.reshape(shape), later
            both = zip(tiles, rects(dims, grid), strict=True)
            tiles = [tile.reshape(local_shape(dims, rect)) for tile, rect in both]
        assert shape_of(dims) == list(whole.shape)
        everything = to_map(whole, dims, (0, map_shape(dims)[2], 0, map_shape(dims)[3]))
        for tile, rect in zip(tiles, rects(dims, grid), strict=True):
            assert torch.equal(tile, tile_of(whole, dims, rect))
            part = to_map(tile, dims, rect)
            assert torch.equal(part, everything[:, :, rect[0] : rect[1], rect[2] : rect[3]])
            assert torch.equal(from_map(part, dims, rect), tile)


R, C = ROWS, COLUMNS


def test_windows_of_swin_and_back():
    grid = (2, 2)
    dims = regrouped(map_dims([3, 8, 28, 28], grid), [3, 8, 4, 7, 4, 7])
    assert dims is not None
    windows = tuple(dims[place] for place in (0, 2, 4, 3, 5, 1))
    merged = regrouped(windows, [3 * 16, 49, 8])
    assert merged == (
        (Factor(3), Factor(4, R, 2), Factor(4, C, 2)),
        (Factor(49),),
        (Factor(8),),
    )
    back = regrouped(merged, [3, 4, 4, 7, 7, 8])
    assert back is not None
    image = regrouped(tuple(back[place] for place in (0, 5, 1, 3, 2, 4)), [3, 8, 28, 28])
    assert image == map_dims([3, 8, 28, 28], grid)
    assert is_map(image)


def test_windows_across_a_border_are_refused():
    # 21 rows on 2 tiles: 11 and 10. A window of 7 rows would be cut.
    grid = (2, 1)
    assert regrouped(map_dims([1, 8, 21, 21], grid), [1, 8, 3, 7, 3, 7]) is None
    assert regrouped(map_dims([1, 8, 21, 21], (1, 3)), [1, 8, 3, 7, 3, 7]) is not None


@pytest.mark.parametrize(
    ("operands", "expected"),
    [
        ([["n", "H", "W", "c"], ["c"]], ["n", "H", "W", "c"]),
        ([["n", "HW", "c"], ["n", "HW", 1]], ["n", "HW", "c"]),
        ([["HW", 1], [1, "HW"]], None),  # every pixel with every other one
        ([["n", "H", "W", "c"], ["n", "W", "H", "c"]], None),
    ],
)
def test_operands_align_where_their_pixels_lie_alike(operands, expected):
    named = {
        "n": (Factor(2),),
        "c": (Factor(4),),
        "H": (Factor(8, R, 2),),
        "W": (Factor(8, C, 2),),
        "HW": (Factor(8, R, 2), Factor(8, C, 2)),
        1: (Factor(1),),
    }
    dims = [tuple(named[one] for one in names) for names in operands]
    result = aligned(dims, max(map(len, dims)))
    assert result == (None if expected is None else tuple(named[one] for one in expected))


def test_whole_operand_is_cut_where_it_has_a_number_for_every_pixel():
    tokens = ((Factor(2),), (Factor(8, R, 2), Factor(6, C, 2)), (Factor(4),))
    assert cropped([1, 48, 4], tokens) == ((Factor(1),), *tokens[1:])
    assert cropped([4], tokens) == ((Factor(4),),)
    assert cropped([1, 4], tokens) == ((Factor(1),), (Factor(4),))
