"""Do estimates count the ranks of a layout where they share cores and links?"""

from __future__ import annotations

import math

import pytest

from hires.plan.search.candidates import Candidate, LayoutShape
from hires.plan.search.estimate import Estimator
from hires.plan.simulation.simulate import Link, Network
from tests.helpers.small_plans import config_of, forked

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


def test_layouts_are_estimated_once():
    calls = []
    config = config_of(batch=8)

    def seconds(node, share, back):
        calls.append(node)
        return 1.0

    network = Network(NO_TIME, NO_TIME)
    once = Estimator(config, forked(8, True), seconds, network, 1e12)
    first = once.estimate(Candidate(TILES))
    asked = len(calls)
    assert once.estimate(Candidate(TILES)) is first
    assert len(calls) == asked > 0
