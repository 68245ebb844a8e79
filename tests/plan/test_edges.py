"""Every rank of a stage gets what it needs of a value exactly once, and gives its gradient back."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from hires.plan.graph import Graph
from hires.plan.layout import Box, edge_of, held_by
from hires.plan.plan import Stage
from hires.plan.rules import SHARDED, TILED, WHOLE
from tests.helpers.graphs import graph_of, node

SHAPE = [4, 2, 7, 5]

SIDES = {
    "one rank": ([1, 1], 1, WHOLE),
    "2x2 tiles": ([2, 2], 1, TILED),
    "1x3 tiles": ([1, 3], 1, TILED),
    "2 shards": ([1, 1], 2, SHARDED),
    "3 shards": ([1, 1], 3, SHARDED),
    "3 tiles that hold all": ([3, 1], 1, WHOLE),
}


def network() -> Graph:
    """Returns a network of one value."""
    return graph_of(node("v", "relu", ["input"], SHAPE), image=(4, 2, 7, 5))


def stage_of(index: int, side: str) -> Stage:
    """Returns a stage whose ranks hold the value in one of the ways."""
    tiles, shards, layout = SIDES[side]
    stage = Stage(index, index, index + 1, list(tiles), 0, shards)
    stage.layout["v"] = layout
    return stage


def cut(box: Box) -> tuple[slice, ...]:
    """Returns the slices of the whole value that a box stands for."""
    return np.s_[box.n0 : box.n1, :, box.r0 : box.r1, box.c0 : box.c1]


@pytest.mark.parametrize(("source", "target"), [*itertools.product(SIDES, SIDES)])
def test_every_number_arrives_once_and_its_gradient_returns_once(source, target):
    graph = network()
    makes, reads = stage_of(0, source), stage_of(1, target)
    edge = edge_of(graph, "v", makes, reads, back=True)
    wanted, held = held_by(graph, reads, "v"), held_by(graph, makes, "v")
    for messages, receiver, boxes, senders in (
        (edge.messages, 1, wanted, held),
        (edge.back, 0, held, wanted),
    ):
        came = [np.zeros(SHAPE) for _ in boxes]
        for message in messages:
            box = Box(*message[2:]) if not edge.whole else Box(*message[2:4], 0, 7, 0, 5)
            sender = senders[message[1 - receiver]]
            assert (sender.n0, sender.r0, sender.c0) <= (box.n0, 4, 7)
            mask = np.zeros(SHAPE)
            mask[cut(sender)] = 1
            assert mask[cut(box)].all()
            came[message[receiver]][cut(box)] += 1
        for count, box in zip(came, boxes, strict=True):
            expected = np.zeros(SHAPE)
            expected[cut(box)] = 1
            assert (count == expected).all()
