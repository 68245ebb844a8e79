"""Defines what a backend must have: the functions of torch.distributed that hires calls.

Names, arguments and meaning are those of torch.distributed. Ranks are always ranks of the world,
never positions in a group. Tensors are contiguous and on a device that the backend reaches;
reductions get numbers (no bool, no complex) and a plain operation (no AVG, no PREMUL_SUM): what is
else is brought to that by ``hires.comm.operations``.

A backend that derives from :class:`hires.comm.backends.composed.Composed` needs ``new_group``,
``isend``, ``irecv`` and ``barrier`` only, and replaces what its library does better.

Source:
    https://pytorch.org/docs/stable/distributed.html
"""

from __future__ import annotations

import datetime
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor

SUM = dist.ReduceOp.SUM

TAGS = 2**31
"""Of torch.distributed."""
RESERVED_TAGS = TAGS - 1024
"""Tags from here on are of the messages of hires itself; users' are lower."""
COMPOSED_TAG = RESERVED_TAGS
"""Of operations that are composed of messages."""
MEETING_TAG = RESERVED_TAGS + 1
"""Of ranks that make a communicator."""
BARRIER_TAG = RESERVED_TAGS + 2
"""Of a monitored barrier."""


@dataclass
class Members:
    """The ranks of a group, as a backend sees them: its handles derive from this class."""

    ranks: list[int]
    index: int  # position of this rank among them; -1: it is not one
    timeout_s: float
    places: dict[int, int] = field(init=False)  # rank -> position

    def __post_init__(self) -> None:
        self.places = {rank: place for place, rank in enumerate(self.ranks)}

    def place(self, rank: int) -> int:
        """Returns the position of a rank; ValueError: it is not a member."""
        try:
            return self.places[rank]
        except KeyError:
            raise ValueError(f"rank {rank} is not among ranks {self.ranks}") from None


class Work(Protocol):
    """An operation under way; its tensors belong to the backend until it is complete."""

    def wait(self, timeout: datetime.timedelta = ...) -> Any:
        """Returns when it is complete; RuntimeError or CommError: it failed, or is late.

        The limit is ``timeout``, or that of the group.
        """

    def is_completed(self) -> bool:
        """Whether it is complete; never waits."""
        ...


class Backend(Protocol):
    """Carries tensors between the ranks of a world, see the module's docstring.

    One that finds out when it starts whether its library reads the memory of GPUs also has
    ``reaches(method, dtype)``: whether that operation does, for tensors of that type.

    Every collective returns its ``Work`` with ``async_op``, else None once it is complete. A rank
    calls the collectives of a group in the same order as the others do.
    """

    def is_initialized(self) -> bool:
        """Whether this rank has joined the world, and has not left it."""
        ...

    def get_rank(self) -> int:
        """Returns this rank."""
        ...

    def new_group(
        self,
        ranks: list[int] | None = None,
        timeout: datetime.timedelta | None = None,
        members_only: bool = False,
    ) -> Any:
        """Returns the handle of some ranks, or of all; all ranks of the world call it in one order.

        With ``members_only`` the members alone call it. A rank that is not among them gets a
        handle of no use. ``timeout``: longest wait in it.
        """

    def destroy_group(self, group: Any) -> None:
        """Frees what a handle of :meth:`new_group` has; nothing of it is under way any more."""

    def isend(self, tensor: Tensor, dst: int, group: Any = None, tag: int = 0) -> Any:
        """Begins to send a tensor, which must stay unchanged; returns its ``Work``.

        Messages of a group with one tag between two ranks keep their order, others may pass.
        """

    def irecv(self, tensor: Tensor, src: int, group: Any = None, tag: int = 0) -> Any:
        """Begins to fill a tensor with a message of its size; returns its ``Work``."""

    def all_reduce(
        self, tensor: Tensor, op: Any = SUM, group: Any = None, async_op: bool = False
    ) -> Any:
        """Reduces a tensor in place, the same bits on all ranks."""

    def reduce(
        self, tensor: Tensor, dst: int, op: Any = SUM, group: Any = None, async_op: bool = False
    ) -> Any:
        """Reduces a tensor into that of rank ``dst``; the others' may keep any numbers.

        Those of a backend whose ``keeps_terms`` is True keep their own.
        """

    def broadcast(self, tensor: Tensor, src: int, group: Any = None, async_op: bool = False) -> Any:
        """Fills a tensor with that of rank ``src``."""

    def all_gather(
        self, tensor_list: list[Tensor], tensor: Tensor, group: Any = None, async_op: bool = False
    ) -> Any:
        """Fills one tensor for each rank of a group, in its order; sizes may differ."""

    def all_gather_into_tensor(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any = None, async_op: bool = False
    ) -> Any:
        """Fills a tensor with those of all ranks, one after the other."""

    def reduce_scatter(
        self,
        output: Tensor,
        input_list: list[Tensor],
        op: Any = SUM,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        """Reduces one tensor for each rank into that rank's ``output``; sizes may differ."""

    def reduce_scatter_tensor(
        self,
        output: Tensor,
        input: Tensor,
        op: Any = SUM,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        """Reduces a tensor, and leaves on each rank its equal part."""

    def all_to_all(
        self,
        output_tensor_list: list[Tensor],
        input_tensor_list: list[Tensor],
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        """Sends one tensor to each rank, and fills one from each; sizes may differ."""

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: list[int] | None = None,
        input_split_sizes: list[int] | None = None,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        """The same with rows of one tensor: equal parts, or those of the split sizes."""

    def gather(
        self,
        tensor: Tensor,
        gather_list: list[Tensor] | None = None,
        dst: int = 0,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        """Fills one tensor for each rank, on rank ``dst``; sizes may differ."""

    def scatter(
        self,
        tensor: Tensor,
        scatter_list: list[Tensor] | None = None,
        src: int = 0,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        """Sends each rank its tensor of rank ``src``; sizes may differ."""

    def barrier(self, group: Any = None, async_op: bool = False) -> Any:
        """Waits for all ranks of a group, or of the world."""

    def destroy_process_group(self) -> None:
        """Leaves the world."""


class StreamBackend(Backend, Protocol):
    """A backend whose messages pass streams of a device in the order of posting, without tags."""

    has_streams: bool

    def new_channel(self, ranks: list[int]) -> Any:
        """Returns the handle of a communicator for messages alone, made as a group is."""

    def abort(self) -> None:
        """Ends what is under way, so that neither the device nor this process waits for it."""
