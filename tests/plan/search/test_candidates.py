"""Are all layouts of a number of ranks listed, each once, and no others?"""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from hires.plan import schedule  # noqa: F401, registers
from hires.plan.checks import check_numbers
from hires.plan.search.candidates import (
    GivenKeys,
    candidate_of,
    nearest_counts,
    orders,
    shapes,
    variants,
)
from tests.helpers.small_plans import config_of

LAYERS = 6


def config(batch=8, image=(16, 16), **parallel):
    return dataclasses.replace(config_of(batch=batch, **parallel), image=[*image])


def described(shape):
    stages = "".join(f"[{n}]" for n in shape.ranks_of_stages)
    return f"{shape.replicas}x{stages}{'<>' if shape.directions == 2 else ''}"


def test_shapes_of_two_ranks():
    found = [described(shape) for shape in shapes(config(), 2, LAYERS)]
    assert found == ["1x[1][1]", "1x[2]", "1x[1][1]<>", "1x[2]<>", "2x[1]"]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6, 8])
def test_every_order_of_every_shape_is_sensible_and_has_the_ranks(ranks):
    base, seen = config(batch=24), set()
    for shape in shapes(base, ranks, LAYERS):
        for order in orders(base, shape):
            for one in variants(base, order):
                assert one not in seen
                seen.add(one)
                changed = one.change.apply(base)
                assert changed is not None, one
                assert changed.parallel.num_ranks == ranks
                assert check_numbers(changed) == []
    assert seen


def test_tiles_that_differ_by_the_names_of_rows_and_columns_are_one_on_a_square_image():
    square = {s.grid for s in shapes(config(), 6, LAYERS) if s.spatial_stages}
    wide = {s.grid for s in shapes(config(image=(16, 32)), 6, LAYERS) if s.spatial_stages}
    assert (3, 2) in square
    assert (2, 3) not in square
    assert {(3, 2), (2, 3), (1, 6)} <= wide


def test_tiles_are_no_smaller_than_a_pixel():
    assert all(max(s.grid) <= 3 for s in shapes(config(image=(3, 3)), 8, 1))


def test_ranks_that_no_layout_has_and_those_next_to_them():
    small = config(batch=2, image=(3, 3))
    assert not [*shapes(small, 13, 1)]
    assert nearest_counts(small, 13, 1, 64) == [12, 18]


@pytest.mark.parametrize("ranks", [2, 4, 6, 9])
def test_shapes_are_all_there_are(ranks):
    base, numbers = config(batch=72, image=(16, 20)), range(1, ranks + 1)
    every = set()
    for replicas, stages, spatial, shards in itertools.product(
        numbers, numbers, range(ranks + 1), numbers
    ):
        if spatial > stages or stages > LAYERS:
            continue
        for rows, cols in itertools.product(numbers, numbers):
            tiled = rows * cols > 1
            if tiled != (spatial > 0) or (stages == spatial and shards > 1):
                continue
            if replicas * (spatial * rows * cols + (stages - spatial) * shards) != ranks:
                continue
            if stages == 1 and not spatial and shards > 1:
                continue  # shards of one stage are replicas
            every.add((replicas, stages, spatial, (rows, cols), shards))
    listed = {
        (s.replicas, s.stages, s.spatial_stages, s.grid, s.local_dp)
        for s in shapes(base, ranks, LAYERS)
    }
    assert listed == every


def test_layout_comes_back_from_its_keys():
    base = config(batch=24)
    for shape in shapes(base, 4, LAYERS):
        for order in orders(base, shape):
            for one in variants(base, order):
                assert candidate_of(one.change.keys) == one


def test_tiles_of_a_large_prime_are_listed_where_nothing_else_is():
    large = config(batch=1, image=(4096, 4096))
    assert {shape.tiles for shape in shapes(large, 67, 1)} == {67}
    assert all(shape.tiles != 67 for shape in shapes(large, 67, 70))
    given = GivenKeys({"parallel.tiles": [67, 1]})
    assert {shape.grid for shape in shapes(large, 67, 70, given)} == {(67, 1)}
