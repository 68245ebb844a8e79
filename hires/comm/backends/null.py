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

from hires.comm.backends.backend_protocol import SUM, Members
from hires.comm.backends.composed import Composed

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


class NullBackend(Composed):
    """The functions of torch.distributed, for a rank whose messages go nowhere."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.counts: collections.Counter[str] = collections.Counter()
        """Operation -> how often it was called."""
        self.bytes: collections.Counter[str] = collections.Counter()
        """Operation -> bytes of the tensors that this rank gave."""
        self.on_receive: Callable[[Tensor], None] | None = None
        """Called with every tensor that a receive would fill."""

    def get_rank(self) -> int:
        """Returns the rank."""
        return self.rank

    def is_initialized(self) -> bool:
        """There is no world to leave."""
        return False

    def destroy_process_group(self) -> None:
        """Leaves nothing."""

    def new_group(
        self,
        ranks: list[int] | None = None,
        timeout: datetime.timedelta | None = None,
        members_only: bool = False,
    ) -> Members:
        """Makes nothing."""
        members = ranks or [self.rank]
        return Members(members, members.index(self.rank) if self.rank in members else -1, 0.0)

    def members(self, group: Any) -> Members:
        """Returns a handle, or this rank."""
        return group or self.new_group()

    def isend(self, tensor: Tensor, dst: int, group: Any = None, tag: int = 0) -> NullWork:
        """Sends nothing."""
        self._count("send", tensor)
        return NullWork([tensor])

    def irecv(self, tensor: Tensor, src: int, group: Any = None, tag: int = 0) -> NullWork:
        """Leaves the tensor as it is."""
        self._count("recv", tensor)
        if self.on_receive is not None:
            self.on_receive(tensor)
        return NullWork([tensor])

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
        self, tensor_list: list[Tensor], tensor: Tensor, group: Any = None, async_op: bool = False
    ) -> NullWork | None:
        """Leaves the parts as they are; gloo gathers them in one piece first."""
        tensor.new_empty(sum(part.nbytes for part in tensor_list), dtype=torch.uint8)
        return self._end("all_gather", [tensor, *tensor_list], async_op)

    def all_gather_into_tensor(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any = None, async_op: bool = False
    ) -> NullWork | None:
        """Leaves the output as it is."""
        parts = [output_tensor]
        return self.all_gather(parts, input_tensor, group, async_op)

    def reduce_scatter(
        self,
        output: Tensor,
        input_list: list[Tensor],
        op: Any = SUM,
        group: Any = None,
        async_op: bool = False,
    ) -> NullWork | None:
        """Leaves the output as it is."""
        return self._end("reduce_scatter", [*input_list, output], async_op)

    def reduce_scatter_tensor(
        self,
        output: Tensor,
        input: Tensor,
        op: Any = SUM,
        group: Any = None,
        async_op: bool = False,
    ) -> NullWork | None:
        """Leaves the output as it is; gloo sums a copy of the input."""
        return self._end("reduce_scatter", [torch.empty_like(input), output], async_op)

    def all_to_all(
        self,
        output_tensor_list: list[Tensor],
        input_tensor_list: list[Tensor],
        group: Any = None,
        async_op: bool = False,
    ) -> NullWork | None:
        """Leaves the outputs as they are."""
        return self._end("all_to_all", [*input_tensor_list, *output_tensor_list], async_op)

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: list[int] | None = None,
        input_split_sizes: list[int] | None = None,
        group: Any = None,
        async_op: bool = False,
    ) -> NullWork | None:
        """Leaves the output as it is."""
        return self._end("all_to_all", [input, output], async_op)

    def gather(
        self,
        tensor: Tensor,
        gather_list: list[Tensor] | None = None,
        dst: int = 0,
        group: Any = None,
        async_op: bool = False,
    ) -> NullWork | None:
        """Leaves the parts as they are."""
        return self._end("gather", [tensor, *(gather_list or ())], async_op)

    def scatter(
        self,
        tensor: Tensor,
        scatter_list: list[Tensor] | None = None,
        src: int = 0,
        group: Any = None,
        async_op: bool = False,
    ) -> NullWork | None:
        """Leaves the tensor as it is."""
        return self._end("scatter", [tensor, *(scatter_list or ())], async_op)

    def barrier(self, group: Any = None, async_op: bool = False) -> NullWork | None:
        """Returns at once."""
        self.counts["barrier"] += 1
        return NullWork(()) if async_op else None

    def _count(self, operation: str, tensor: Tensor) -> None:
        self.counts[operation] += 1
        self.bytes[operation] += tensor.nbytes

    def _end(self, operation: str, tensors: list[Tensor], async_op: bool) -> NullWork | None:
        self._count(operation, tensors[0])
        return NullWork(tensors) if async_op else None
