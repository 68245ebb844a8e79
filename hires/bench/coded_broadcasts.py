"""Defines broadcasts of codes for ``hires bench comm --broadcast``, beside the chain of hires.

A way is a route with a codec: ``mpi:segmented:1MiB+bf16`` encodes once, at the root. With
``+bf16@hops`` every rank encodes again what it passes on, as libraries do that compress messages
one by one; hires never does. Results are compared with the codes of what the root has.

Source:
    Zhou et al., "Accelerating broadcast communication with GPU compression for deep learning
    workloads", HiPC 2022 (both, and the chain without codes).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hires import comm
from hires.bench.messages import ROOT, BenchBuffers, Call, MessageCalls
from hires.comm.backends.backend import CHAIN_TAG
from hires.comm.chain import AHEAD, BUFFERS, segments
from hires.comm.coding import decode, encode, usual_codec
from hires.core.codecs import Codec
from hires.engine.device import RankDevice
from hires.plan.routes import Route, parse_route

CODED, HOPS = "+", "@hops"


def route_in(way: str) -> Route:
    """Returns the route of a way, with or without a codec."""
    return parse_route(way.partition(CODED)[0])


class CodedBroadcast(MessageCalls):
    """The calls of a way with a codec in one cell."""

    def __init__(self, way: str, buffers: BenchBuffers, device: RankDevice, fence: Call) -> None:
        route, name = route_in(way), way.partition(CODED)[2]
        codec, numbers = usual_codec(name.removesuffix(HOPS)), buffers.input
        every = comm.default_world().all_ranks

        def once() -> None:
            comm.broadcast_coded(numbers, ROOT, every, backend=route, codec=codec)

        def again() -> None:
            at_every_hop(numbers, every, route, codec)

        call: Callable[[], None] = again if name.endswith(HOPS) else once
        super().__init__(call, buffers, device, fence)
        given = buffers.expected()
        assert given is not None
        # Libraries that encode at every hop leave the root's own numbers as they are.
        keeps = name.endswith(HOPS) and buffers.rank == ROOT
        decoded = decode(codec, encode(codec, given), torch.empty_like(given))
        self._right = given if keeps else decoded

    def num_wrong(self) -> int:
        """Makes a call; returns how many elements are not what the root's codes hold."""
        super().num_wrong()
        # Codes of decoded numbers are the same codes; their scale may round once more.
        off = (self.buffers.output - self._right).abs() > 1e-5 * self._right.abs()
        return int(off.sum())


def at_every_hop(numbers: Tensor, everyone: comm.Group, route: Route, codec: Codec) -> None:
    """Passes flat numbers on from rank 0; each rank decodes a segment and encodes it again."""
    backend = everyone.world.backends[route.backend]
    parts = segments(numbers, route.segment_bytes, codec)
    rank, last = everyone.index, everyone.size - 1
    posted, sends, coming = list[Any](), deque[Any](), 0
    for number, part in enumerate(parts):
        while rank and coming < min(number + AHEAD, len(parts)):
            if rank < last and coming >= BUFFERS:  # one send for each segment before
                sends.popleft().wait()
            posted.append(backend.irecv(parts[coming].sent, rank - 1, None, CHAIN_TAG))
            coming += 1
        if rank:
            posted[number].wait()
            decode(codec, part.sent, part.numbers)
        elif number >= BUFFERS:
            sends.popleft().wait()
        if rank < last:
            encode(codec, part.numbers, part.sent)
            sends.append(backend.isend(part.sent, rank + 1, None, CHAIN_TAG))
    for send in sends:
        send.wait()
