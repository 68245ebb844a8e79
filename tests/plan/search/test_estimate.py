"""Do estimates count the ranks of a layout where they share cores and links?"""

from __future__ import annotations

import math

import pytest
from torch import nn

from hires.nets.trace import trace
from hires.plan.search.candidates import Candidate, LayoutShape
from hires.plan.search.estimate import Estimator
from hires.plan.simulation.simulate import Link, Network
from tests.helpers.small_plans import IMAGE, config_of, forked

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
