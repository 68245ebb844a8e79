"""All layouts of a number of ranks are listed, each once; what one is expected to take."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
from torch import nn

from hires.nets.trace import trace
from hires.plan.checks import check_numbers
from hires.plan.search.candidates import (
    Candidate,
    GivenKeys,
    LayoutShape,
    candidate_of,
    nearest_counts,
    orders,
    shapes,
    variants,
)
from hires.plan.search.estimate import Estimator
from hires.plan.simulation.simulate import Link, Network
from tests.helpers.small_plans import IMAGE, config_of, forked

LAYERS = 6


def config(batch=8, image=(16, 16), **parallel):
    return dataclasses.replace(config_of(batch=batch, **parallel), image=[*image])


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_every_order_of_every_shape_is_sensible_and_has_the_ranks(ranks):
    base, seen = config(batch=24), set()
    for shape in shapes(base, ranks, LAYERS):
        for order in orders(base, shape):
            for one in variants(base, order):
                assert one not in seen
                assert candidate_of(one.change.keys) == one
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


def test_ranks_that_no_layout_has_and_those_next_to_them():
    small = config(batch=2, image=(3, 3))
    assert not [*shapes(small, 13, 1)]
    assert nearest_counts(small, 13, 1, 64) == [12, 18]


def test_tiles_of_a_large_prime_are_listed_where_nothing_else_is():
    large = config(batch=1, image=(4096, 4096))
    assert {shape.tiles for shape in shapes(large, 67, 1)} == {67}
    assert all(shape.tiles != 67 for shape in shapes(large, 67, 70))
    given = GivenKeys({"parallel.tiles": [67, 1]})
    assert {shape.grid for shape in shapes(large, 67, 70, given)} == {(67, 1)}


NO_TIME = Link()


TILES = LayoutShape(1, 1, 1, (4, 1), 1, 1)


SHARDS = LayoutShape(1, 1, 0, (1, 1), 4, 1)


REPLICAS = LayoutShape(4, 1, 0, (1, 1), 1, 1)


def estimator(network=Network(NO_TIME, NO_TIME), cores=math.inf):  # noqa: B008, it is frozen
    config = config_of(batch=8)
    return Estimator(config, forked(8, True), lambda node, share, back: share, network, 1e12, cores)


@pytest.mark.parametrize("shape", [TILES, SHARDS, REPLICAS], ids=["tiles", "shards", "replicas"])
def test_ranks_that_share_cores_take_longer(shape):
    candidate = Candidate(shape)
    alone_s = estimator(cores=4).estimate(candidate).step_s
    assert estimator(cores=2).estimate(candidate).step_s == pytest.approx(2 * alone_s, rel=1e-3)


def test_stages_of_many_tiles_send_between_nodes():
    """Two stages of four tiles, four ranks on a node: what a stage sends goes to another node."""
    shape = LayoutShape(1, 2, 2, (4, 1), 1, 1)
    slow = Link(0.0, 1.0)
    near = estimator(Network(NO_TIME, slow, 8)).estimate(Candidate(shape)).step_s
    far = estimator(Network(NO_TIME, slow, 4)).estimate(Candidate(shape)).step_s
    assert far > 100 * near


def test_cut_by_seconds_leaves_the_uses_of_a_parameter_together():
    class Repeated(nn.Module):
        """A convolution that is applied twice, between others."""

        def __init__(self):
            super().__init__()
            self.first, self.step = (nn.Conv2d(3, 3, 3, padding=1) for _ in range(2))
            self.last = nn.Conv2d(3, 2, 3, padding=1)

        def forward(self, x):
            return self.last(self.step(self.step(self.first(x))))

    graph = trace(Repeated(), [8, 3, *IMAGE], True)
    last = graph.nodes[-1].name

    def seconds(node, share, back):
        return 1.0 if node.name == last else 0.1

    network = Network(NO_TIME, NO_TIME)
    tied = Estimator(config_of(batch=8), graph, seconds, network, 1e12)
    # By FLOPs it is cut behind the first layer; inside the two uses of one weight it never is.
    assert tied.balanced(Candidate(LayoutShape(1, 2, 0, (1, 1), 1, 1)), "seconds") == (3, 1)


@pytest.mark.parametrize("ranks", [2, 6])
def test_shapes_are_all_there_are(ranks):
    base, numbers = config(batch=72, image=(16, 20)), range(1, ranks + 1)
    every = set()
    for replicas, stages, spatial, shards, rows, cols in itertools.product(
        numbers, numbers, range(ranks + 1), numbers, numbers, numbers
    ):
        tiled = rows * cols > 1
        if spatial > stages or stages > LAYERS or tiled != (spatial > 0):
            continue
        if shards > 1 and stages == max(1, spatial):
            continue  # shards of one stage are replicas
        if replicas * (spatial * rows * cols + (stages - spatial) * shards) == ranks:
            every.add((replicas, stages, spatial, (rows, cols), shards))
    listed = {
        (s.replicas, s.stages, s.spatial_stages, s.grid, s.local_dp)
        for s in shapes(base, ranks, LAYERS)
    }
    assert listed == every
