"""How long do messages take on links of known latency and bandwidth?"""

from __future__ import annotations

import dataclasses

import pytest

from hires.plan.simulation.simulate import Link, Network

NETWORK = Network(near=Link(1.0, 10.0), far=Link(5.0, 2.0), ranks_per_node=2)


def test_ranks_fill_one_node_after_the_other():
    assert [NETWORK.node_of(rank) for rank in range(5)] == [0, 0, 1, 1, 2]
    assert NETWORK.link([0, 1]) is NETWORK.near
    assert NETWORK.link([0, 1, 2]) is NETWORK.far


def test_ranks_of_a_node_share_the_way_out_but_not_the_ways_inside():
    assert set(NETWORK.lanes(0, 2)) & set(NETWORK.lanes(1, 3)) == {("out", 0, 0), ("in", 1, 0)}
    assert not set(NETWORK.lanes(0, 1)) & set(NETWORK.lanes(1, 0))


@pytest.mark.parametrize(
    ("ranks", "seconds"),
    [
        ([0], 0.0),
        ([0, 1], 1.0 + 2.0),  # one round, one message of 20 bytes
        ([0, 1, 2, 3], 2 * 5.0 + 3 * 10.0),  # two rounds, three messages, between nodes
    ],
)
def test_gather_is_rounds_of_latency_and_what_comes_from_the_others(ranks, seconds):
    assert NETWORK.gather_s(ranks, 20) == seconds


def test_all_reduce_sends_nearly_twice_its_bytes():
    assert NETWORK.reduce_s([0, 1, 2, 3], 20) == 2 * 2 * 5.0 + 2 * 3 / 4 * 10.0


def test_small_collectives_may_have_a_latency_of_their_own_within_a_node():
    network = Network(Link(1.0), Link(5.0), 2, small_latency_s=0.25)
    assert network.gather_s([0, 1], 0) == 0.25
    assert network.gather_s([1, 2], 0) == 5.0


def test_ranks_that_share_cores_copy_their_messages_in_turns():
    crowded = dataclasses.replace(NETWORK, crowd=3.0)
    assert crowded.message_s(0, 1, 20, None) == (3 * 2.0, 3 * 1.0)
    assert crowded.gather_s([0, 1], 20) == 3 * NETWORK.gather_s([0, 1], 20)
    assert crowded.reduce_s([0, 1, 2], 20) == 3 * NETWORK.reduce_s([0, 1, 2], 20)
