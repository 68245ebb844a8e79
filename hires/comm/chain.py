"""Broadcasts a tensor along a chain of ranks in segments, as it is or as codes.

A rank passes a segment on as soon as it has it, so that all links carry at once. Codes are made on
the root alone and passed on as they are: the error is that of one message, however long the chain,
and all ranks decode the same bits. Each decodes a segment while the next one travels.

    root 2   encode 0, send 0 | encode 1, send 1 | ...
    rank 3                      receive 0, send 0, decode 0 | receive 1, send 1, decode 1 | ...
    rank 0                                                    receive 0, decode 0 | ...

Source:
    Zhou et al., "Accelerating broadcast communication with GPU compression for deep learning
    workloads", HiPC 2022.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hires.comm.backends.backend import CHAIN_TAG, Backend, Work
from hires.comm.coding import decode, encode
from hires.core.codecs import Codec

AHEAD = 4
"""Receives that a rank has posted before it waits for the first of them."""
BUFFERS = 2 * AHEAD
"""Segments of codes that a rank has at a time: few enough to stay in its cache."""


ALIGNED = 64
"""Bytes at whose multiples buffers of codes begin."""


class SentPart(NamedTuple):
    """A part of a tensor, and the memory that travels: without a codec the same."""

    numbers: Tensor
    sent: Tensor


class RankChain:
    """The chain over a backend; it takes the arguments of a backend's broadcast, and a codec."""

    def __init__(self, backend: Backend, segment_bytes: int) -> None:
        self._backend, self._segment_bytes = backend, segment_bytes

    def __call__(
        self,
        tensor: Tensor,
        src: int,
        codec: Codec | None = None,
        *,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        """Fills a contiguous tensor with that of rank ``src``.

        With a codec the tensor is flat, and that of the root too becomes what its codes hold.
        """
        backend, among = self._backend, self._backend.members(group)
        parts = segments(tensor.view(-1), self._segment_bytes, codec)
        if backend.is_alone:  # a rehearsal, which counts the buffers
            return backend.broadcast(tensor, src, group, async_op)
        args = parts, among.index - among.place(src), among, group, codec
        # One thread of a rank passes on, in the order of the calls: the messages have one tag.
        if async_op:
            return among.chains.begin(lambda: self._pass_on(*args), [tensor])
        among.chains.run(self._pass_on, *args)
        return None

    def _pass_on(
        self, parts: Sequence[SentPart], place: int, among: Any, group: Any, codec: Codec | None
    ) -> None:
        backend, ranks, index = self._backend, among.ranks, among.index
        before, after = ranks[index - 1], ranks[(index + 1) % len(ranks)]
        is_last = (place + 1) % len(ranks) == 0
        posted, sends, num_posted = deque[Work](), deque[Work](), 0
        is_shared = codec is not None and not is_last  # buffers, from which segments are sent
        first = 0  # segment of the first of the sends

        def free(number: int) -> None:
            # An earlier segment may still be on its way from the buffer of this one.
            nonlocal first
            while is_shared and first <= number - BUFFERS:
                sends.popleft().wait()
                first += 1

        for number, part in enumerate(parts):
            last = min(number + AHEAD, len(parts)) if place else 0
            while num_posted < last:
                free(num_posted)
                posted.append(backend.irecv(parts[num_posted].sent, before, group, CHAIN_TAG))
                num_posted += 1
            if place:
                posted.popleft().wait()
            elif codec is not None:
                free(number)
                encode(codec, part.numbers, part.sent)
            if not is_last:
                sends.append(backend.isend(part.sent, after, group, CHAIN_TAG))
            if codec is not None:
                decode(codec, part.sent, part.numbers)
        for send in sends:
            send.wait()


def segments(flat: Tensor, segment_bytes: int, codec: Codec | None) -> list[SentPart]:
    """Returns a tensor in parts of which as many bytes travel; at least one, of any size.

    Codes are those of whole blocks, one at the least, and share some buffers.
    """
    if codec is None:
        parts = torch.split(flat, max(1, segment_bytes // flat.element_size()))
        return [SentPart(part, part) for part in parts]
    blocks = max(1, segment_bytes // codec.num_bytes(codec.block))
    parts = torch.split(flat, codec.block * blocks)
    most, count = codec.num_bytes(len(parts[0])), min(BUFFERS, len(parts))
    codes = flat.new_empty((count, -(-most // ALIGNED) * ALIGNED), dtype=torch.uint8)
    return [
        SentPart(part, codes[number % BUFFERS, : codec.num_bytes(len(part))])
        for number, part in enumerate(parts)
    ]
