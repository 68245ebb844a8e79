"""Models how long messages take: latency and bandwidth, within a node and between nodes."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Link:
    """What lies between two ranks."""

    latency_s: float = 0.0
    bytes_per_s: float = math.inf

    def travel_s(self, num_bytes: float) -> float:
        """Returns for how long a message keeps the link busy; it arrives a latency later."""
        return num_bytes / self.bytes_per_s


@dataclass(frozen=True)
class Network:
    """The links of a machine whose ranks fill one node after the other.

    Ranks of one node have a link of their own in each direction between any two of them. All ranks
    of a node share one way out of it and one way in.
    """

    near: Link = Link()
    """Between ranks of one node."""
    far: Link = Link()
    """Between nodes."""
    ranks_per_node: int = 2**31
    small_latency_s: float | None = None
    """Of a message of a small collective within a node; unset: that of the link."""

    def node_of(self, rank: int) -> int:
        """Returns the node that a rank is on."""
        return rank // self.ranks_per_node

    def link(self, ranks: list[int]) -> Link:
        """Returns the slowest link among some ranks."""
        return self.near if len({self.node_of(rank) for rank in ranks}) == 1 else self.far

    def lanes(self, source: int, target: int) -> list[tuple[str, int, int]]:
        """Returns what a message occupies, one message at a time each."""
        here, there = self.node_of(source), self.node_of(target)
        if here == there:
            return [("near", source, target)]
        return [("out", here, 0), ("in", there, 0)]

    def gather_s(self, ranks: list[int], num_bytes: float) -> float:
        """Returns how long an all-gather takes from its last member's arrival.

        Args:
            ranks: its members.
            num_bytes: what each hands in; each receives that of all others.
        """
        link = self.link(ranks)
        latency_s = link.latency_s
        if link is self.near and self.small_latency_s is not None:
            latency_s = self.small_latency_s
        return _rounds(len(ranks)) * latency_s + (len(ranks) - 1) * link.travel_s(num_bytes)

    def reduce_s(self, ranks: list[int], num_bytes: float) -> float:
        """Returns how long an all-reduce takes from its last member's arrival.

        It sends the least that any algorithm can, 2 (n - 1) / n of the bytes, in a number of rounds
        that is twice the logarithm.
        """
        link = self.link(ranks)
        share = 2 * (len(ranks) - 1) / len(ranks)
        return 2 * _rounds(len(ranks)) * link.latency_s + share * link.travel_s(num_bytes)


def _rounds(num_ranks: int) -> int:
    """Returns the rounds of pairwise exchanges after which every rank has the data of all."""
    return (num_ranks - 1).bit_length()
