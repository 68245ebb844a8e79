"""Interval arithmetic against brute force: which input rows does an output row depend on?"""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hires.plan.tiling import (
    Axes,
    Axis,
    need_of,
    own_rect,
    own_rects,
    pieces_of_map,
    split,
    window_pieces,
)

SIZES = st.integers(1, 14)
PARTS = st.integers(1, 17)  # also more than there are rows, so that some tiles are empty
GRIDS = st.tuples(st.integers(1, 5), st.integers(1, 5))
Pixels = set[tuple[int, int]]

windows = st.builds(
    Axis,
    kind=st.sampled_from(["window", "transposed"]),
    size_in=SIZES,
    size_out=st.integers(1, 20),
    kernel=st.integers(1, 5),
    stride=st.integers(1, 4),
    padding=st.integers(-3, 6),
    dilation=st.integers(1, 3),
)
interpolations = st.builds(
    lambda kind, size_in, size_out, factor: Axis(
        kind, size_in, size_out, scale=factor or size_in / size_out
    ),
    kind=st.sampled_from(["nearest", "nearest_exact", "linear", "linear_corners", "cubic", "bins"]),
    size_in=SIZES,
    size_out=st.integers(1, 30),
    factor=st.sampled_from([None, 1 / 1.1, 1 / 2.3, 0.5, 2.0, 1 / 0.3]),
)
shuffles = st.builds(
    lambda size_in, factor: Axis("shuffle", size_in, size_in * factor, stride=factor),
    size_in=SIZES,
    factor=st.integers(1, 4),
)
any_axis = st.one_of(windows, interpolations, shuffles)


def dependencies(axis: Axis, out: int) -> set[int]:
    """Input rows that one output row depends on, tap by tap."""
    taps = [axis.dilation * tap for tap in range(axis.kernel)]
    if axis.kind == "window":
        rows = {out * axis.stride - axis.padding + tap for tap in taps}
    elif axis.kind == "transposed":
        rows = {
            row
            for row in range(axis.size_in)
            if any(row * axis.stride - axis.padding + tap == out for tap in taps)
        }
    elif axis.kind == "shuffle":
        rows = {out // axis.stride}
    else:
        rows = {row for row, _ in axis.taps(out)}
    return rows & set(range(axis.size_in))


def pixels(rect: tuple[int, int, int, int]) -> Pixels:
    return set(itertools.product(range(rect[0], rect[1]), range(rect[2], rect[3])))


@settings(deadline=None)
@given(length=st.integers(0, 40), parts=PARTS)
def test_split_covers_everything_once_with_the_larger_parts_first(length, parts):
    intervals = [split(length, parts, index) for index in range(parts)]
    assert [i for a, b in intervals for i in range(a, b)] == list(range(length))
    sizes = [b - a for a, b in intervals]
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) - min(sizes) <= 1


@settings(max_examples=400, deadline=None)
@given(axis=any_axis, data=st.data())
def test_need_holds_every_row_that_the_output_depends_on(axis, data):
    first = data.draw(st.integers(0, axis.size_out))
    end = data.draw(st.integers(first, axis.size_out))
    low, high = axis.need((first, end))
    assert 0 <= low <= high <= axis.size_in
    rows = set().union(*(dependencies(axis, out) for out in range(first, end)))
    assert rows <= set(range(low, high))
    # Where the taps leave no gaps, need begins and ends with a row that is used.
    if axis.dilation == 1 and (axis.kernel >= axis.stride or axis.kind == "shuffle"):
        assert (low, high) == (min(rows), max(rows) + 1) if rows else low == high


@pytest.mark.parametrize(
    ("axis", "out", "expected"),
    [
        # 3x3 convolution, stride 2, padding 1: rows -1..1 for row 0, one row below each cut.
        (Axis("window", 8, 4, kernel=3, stride=2, padding=1), (0, 2), (0, 4)),
        (Axis("window", 8, 4, kernel=3, stride=2, padding=1), (2, 4), (3, 8)),
        (Axis("window", 9, 9, kernel=3, padding=4, dilation=4), (3, 6), (0, 9)),
        (Axis("window", 8, 5, padding=-2), (0, 2), (2, 4)),  # a crop begins further down
        (Axis("window", 4, 7, padding=3), (0, 3), (0, 0)),  # nothing but padding
        (Axis("transposed", 4, 8, kernel=2, stride=2), (2, 6), (1, 3)),
        (Axis("transposed", 4, 10, kernel=1, stride=3), (1, 3), (1, 1)),  # rows of no input
        (Axis("shuffle", 3, 6, stride=2), (1, 4), (0, 2)),
        (Axis("linear", 4, 8, scale=0.5), (3, 5), (1, 3)),
        (Axis("window", 8, 8, kernel=3, padding=1), (5, 5), (0, 0)),  # an empty tile
    ],
)
def test_need_of_common_operations(axis, out, expected):
    assert axis.need(out) == expected


@settings(deadline=None)
@given(axis=interpolations)
def test_interpolation_reads_the_rows_in_order_and_inside_the_image(axis):
    read = [axis.taps(out) for out in range(axis.size_out)]
    assert [taps[0][0] for taps in read] == sorted(taps[0][0] for taps in read)
    for taps in read:
        assert all(0 <= row < axis.size_in for row, _ in taps)
        assert sum(weight for _, weight in taps) == pytest.approx(1)


@settings(max_examples=150, deadline=None)
@given(axes=st.tuples(any_axis, any_axis), grid=GRIDS)
def test_halo_messages_bring_what_is_needed_and_not_owned_from_its_owner(axes: Axes, grid):
    size = [axis.size_in for axis in axes]
    messages = window_pieces(axes, grid)
    assert messages == sorted(messages, key=lambda message: (message[1], message[0]))
    for tile in range(grid[0] * grid[1]):
        own = pixels(own_rect(size, grid, tile))
        needed = pixels(need_of(axes, own_rect([a.size_out for a in axes], grid, tile)))
        received: list[tuple[int, int]] = []
        for source, target, rect in messages:
            if target == tile:
                assert source != tile
                part = pixels(rect)
                assert part
                assert part <= pixels(own_rect(size, grid, source))
                received += part
        assert len(received) == len(set(received)), "a pixel came twice"
        assert set(received) == needed - own


@settings(deadline=None)
@given(size=st.tuples(SIZES, SIZES), source_grid=GRIDS, target_grid=GRIDS)
def test_regrid_moves_every_pixel_once_from_its_owner_to_its_owner(size, source_grid, target_grid):
    moved: list[tuple[int, int]] = []
    for source, target, rect in pieces_of_map(size, source_grid, own_rects(size, target_grid)):
        part = pixels(rect)
        assert part <= pixels(own_rect(size, source_grid, source))
        assert part <= pixels(own_rect(size, target_grid, target))
        moved += part
    assert sorted(moved) == sorted(pixels((0, size[0], 0, size[1])))
