"""Carries nothing: operations complete at once, leave their tensors as they are, and are counted.

A rehearsal runs one rank on it, without the other ranks. Memory stays alive as with a real backend:
a message keeps its tensor until its handle is dropped, and gloo's own scratch memory is allocated
while an operation runs. So the memory of a rank is counted without the other ranks, and under
``FakeTensorMode`` without any memory.
"""

from __future__ import annotations

import collections
import datetime
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hires.comm.backends.backend import SUM, Backend, Inputs, Members
from hires.comm.backends.rendezvous import WorldMeeting

SEGMENT_BYTES = 2**20
"""Largest piece in which gloo's ring all-reduce passes a tensor on; it keeps two of them."""


class NullWork:
    """An operation that is complete; it keeps its tensors alive as long as a real one would."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        """Returns at once."""
        return True

    def is_completed(self) -> bool:
        """Whether it is complete: yes."""
        return True


class NullBackend(Backend):
    """A backend whose messages go nowhere."""

    devices: tuple[str, ...] = ("cpu", "cuda", "meta")
    is_alone = True

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank
        self.counts: collections.Counter[str] = collections.Counter()
        """Operation -> how often it was called."""
        self.bytes: collections.Counter[str] = collections.Counter()
        """Operation -> bytes of the tensors that this rank gave."""
        self.on_receive: Callable[[Tensor], None] | None = None
        """Called with every tensor that a receive would fill."""

    def join(self, meeting: WorldMeeting, timeout_s: float) -> None:
        """Needs no other rank."""
        self.rank = meeting.world.rank

    def new_group(self, ranks: list[int], timeout: datetime.timedelta | None = None) -> Members:
        """Makes nothing."""
        return Members(ranks, ranks.index(self.rank) if self.rank in ranks else -1, 0.0)

    def members(self, group: Any) -> Members:
        """Returns a handle, or this rank."""
        return group or self.new_group([self.rank])

    def isend(self, tensor: Tensor, dst: int, group: Any = None, tag: int = 0) -> Any:
        """Sends nothing."""
        return self._end("send", [tensor], True)

    def irecv(self, tensor: Tensor, src: int, group: Any = None, tag: int = 0) -> Any:
        """Leaves the tensor as it is."""
        if self.on_receive is not None:
            self.on_receive(tensor)
        return self._end("recv", [tensor], True)

    def all_reduce(
        self, tensor: Tensor, op: Any = SUM, group: Any = None, async_op: bool = False
    ) -> NullWork | None:
        """Leaves the tensor as it is."""
        # Counted, and freed; beside a GPU it lies on the host, as the buffer of the message does.
        tensor.new_empty(2 * min(SEGMENT_BYTES, tensor.nbytes), dtype=torch.uint8)
        return self._end("all_reduce", [tensor], async_op)

    def reduce(
        self, tensor: Tensor, dst: int, op: Any = SUM, group: Any = None, async_op: bool = False
    ) -> NullWork | None:
        """Leaves the tensor as it is."""
        return self._end("reduce", [tensor], async_op)

    def broadcast(
        self, tensor: Tensor, src: int, group: Any = None, async_op: bool = False
    ) -> NullWork | None:
        """Leaves the tensor as it is."""
        return self._end("broadcast", [tensor], async_op)

    def all_gather(
        self, outputs: Sequence[Tensor], tensor: Tensor, group: Any = None, async_op: bool = False
    ) -> NullWork | None:
        """Leaves the outputs as they are; gloo gathers them in one piece first."""
        tensor.new_empty(sum(part.nbytes for part in outputs), dtype=torch.uint8)
        return self._end("all_gather", [tensor, *outputs], async_op)

    def reduce_scatter(
        self,
        output: Tensor,
        inputs: Sequence[Tensor],
        op: Any = SUM,
        group: Any = None,
        async_op: bool = False,
    ) -> NullWork | None:
        """Leaves the output as it is; gloo sums a copy of the inputs."""
        output.new_empty(sum(part.nbytes for part in inputs), dtype=torch.uint8)
        return self._end("reduce_scatter", [*inputs, output], async_op)

    def exchange(
        self,
        outputs: Inputs,
        inputs: Inputs,
        group: Any = None,
        async_op: bool = False,
        then: Callable[[], Any] | None = None,
    ) -> NullWork | None:
        """Leaves the outputs as they are."""
        tensors = [one for one in (*inputs, *outputs) if one is not None]
        return self._end("exchange", tensors, async_op)

    def barrier(self, group: Any = None, async_op: bool = False) -> NullWork | None:
        """Returns at once."""
        return self._end("barrier", (), async_op)

    def _end(self, operation: str, tensors: Sequence[Tensor], async_op: bool) -> NullWork | None:
        self.counts[operation] += 1
        self.bytes[operation] += tensors[0].nbytes if tensors else 0
        return NullWork(tensors) if async_op else None
