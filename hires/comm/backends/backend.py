"""Defines a backend: what carries messages and collectives among the ranks of a world.

``hires.comm.operations`` brings every collective of ``torch.distributed`` to one of seven, with the
arguments of torch's: barrier, broadcast, all_reduce, reduce, all_gather, reduce_scatter, exchange.
Ranks are ranks of the world, never positions in a group. Tensors are contiguous and on a device of
``devices``; reductions get numbers (no bool, no complex) and a plain operation (no AVG, no
PREMUL_SUM). With ``async_op`` a collective returns its :class:`Work`, else None at its end.
All ranks of a group call its collectives in one order.

A backend has ``join``, ``new_group``, ``isend``, ``irecv`` and ``barrier``, and replaces what its
library does better than an exchange of messages:

    rank 0   irecv from 1, 2   isend to 1, 2   ...   wait: term 0 + term 1 + term 2

A rank posts its receives and sends at once, so nothing has to run between, and an operation may
stay under way while the rank computes. All ranks get the same bits of a reduction.

To write one:

* ``join`` sets ``rank`` and ``everyone``, the handle of all ranks. Ranks find each other in
  ``meeting.part(name, timeout_s)`` (:class:`~hires.comm.backends.rendezvous.WorldMeeting`), a store
  of this backend alone: ``set(key, text)``, ``get(key)``, which waits and returns bytes, and
  ``wait(keys)``. ``meeting.world`` has this rank and the size.
* Handles derive from :class:`Members`. The number of one, from
  :class:`~hires.comm.backends.rendezvous.GroupNumbers`, is the same on all its members, and keeps
  the messages of two groups apart.
* A message returns its :class:`Work`. :func:`~hires.comm.backends.works.wait` waits for a
  condition up to a limit; :class:`~hires.comm.backends.works.JoinedWork` is several works as one,
  and calls a function at their end.
* Errors are those of ``hires.core.errors``. ``PeerError``: another rank is late, has ended, or gave
  another size; the error of the call then says what other ranks call instead, as it does at a
  RuntimeError of a library. ``CommError``: this rank or its machine is at fault. ``ValueError``:
  an argument is.
* Its facts, by which plans and calls are made, are a
  :class:`~hires.core.codecs.BackendFacts`.

Source:
    https://pytorch.org/docs/stable/distributed.html
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from hires.comm.backends.rendezvous import WorldMeeting
from hires.comm.backends.works import Fifo, JoinedWork

SUM = dist.ReduceOp.SUM

HALVES = (torch.float16, torch.bfloat16)
COMBINE: dict[Any, Callable[..., Tensor]] = {
    dist.ReduceOp.SUM: torch.add,
    dist.ReduceOp.PRODUCT: torch.mul,
    dist.ReduceOp.MIN: torch.minimum,
    dist.ReduceOp.MAX: torch.maximum,
    dist.ReduceOp.BAND: torch.bitwise_and,
    dist.ReduceOp.BOR: torch.bitwise_or,
    dist.ReduceOp.BXOR: torch.bitwise_xor,
}
"""Operation -> what it does with two tensors."""

TAGS = 2**31
"""Of torch.distributed."""
RESERVED_TAGS = TAGS - 1024
"""Tags from here on are of the messages of hires itself; users' are lower."""
EXCHANGE_TAG = RESERVED_TAGS
"""Of operations that are composed of messages."""
CHAIN_TAG = RESERVED_TAGS + 1
"""Of broadcasts that pass from rank to rank (:mod:`hires.comm.chain`)."""

Inputs = Sequence[Tensor | None]
"""By position in a group: the tensor for a member, or from it; None: no message."""


class Post(NamedTuple):
    """One side of a message."""

    sends: bool
    tensor: Tensor
    peer: int
    group: Any = None
    tag: int = 0


@dataclass
class Members:
    """The ranks of a group, as a backend sees them: its handles derive from this class."""

    ranks: list[int]
    index: int  # position of this rank among them; -1: it is not one
    timeout_s: float
    places: dict[int, int] = field(init=False)  # rank -> position
    chains: Fifo = field(init=False)  # broadcasts along a chain of the ranks, one at a time

    def __post_init__(self) -> None:
        self.places = {rank: place for place, rank in enumerate(self.ranks)}
        self.chains = Fifo("comm-chain")

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


class Backend:
    """The collectives as messages; the messages are those of each backend."""

    devices: tuple[str, ...] = ("cpu",)
    """Kinds of device whose memory it reads and writes; tensors of others go through the host's."""
    gathers_quickly = False
    """Whether its own gather of small tensors takes less time than messages."""
    is_alone = False
    """Whether its messages reach no other rank."""

    rank = 0
    """This rank in the world; ``join`` sets it."""
    everyone: Any = None
    """The handle of all ranks, while this rank is part of the world; ``join`` sets it."""

    def join(self, meeting: WorldMeeting, timeout_s: float) -> None:
        """Joins the world of a meeting; ``timeout_s``: longest wait for another rank, also later.

        It sets ``rank`` and ``everyone``.
        CommError or RuntimeError: a rank does not come, or what it needs is not here.
        """
        raise NotImplementedError

    def is_initialized(self) -> bool:
        """Whether this rank is part of the world."""
        return self.everyone is not None

    def destroy_process_group(self) -> None:
        """Leaves the world."""
        self.everyone = None

    def abort(self) -> None:
        """Leaves the world without the other ranks; what is under way ends."""
        if self.is_initialized():
            self.destroy_process_group()

    def new_group(self, ranks: list[int], timeout: datetime.timedelta | None = None) -> Any:
        """Returns the handle of ascending ranks, which its members make in one order.

        A rank that is not among them gets a handle of no use. ``timeout``: longest wait in it.
        """
        raise NotImplementedError

    def destroy_group(self, group: Any) -> None:
        """Frees what a handle of :meth:`new_group` has; nothing of it is under way any more."""

    def limit_s(self, timeout: datetime.timedelta | None) -> float:
        """Returns the longest wait in a new group, in seconds; by default that of the world."""
        limit: float = self.everyone.timeout_s if timeout is None else timeout.total_seconds()
        return limit

    def members(self, group: Any) -> Any:
        """Returns a handle, or that of the world; ValueError: this rank is not a member."""
        among = self.everyone if group is None else group
        if among is None or among.index < 0:
            raise ValueError(f"rank {self.rank} is not a member of the group")
        return among

    def isend(self, tensor: Tensor, dst: int, group: Any = None, tag: int = 0) -> Any:
        """Begins to send a tensor, which must stay unchanged; returns its ``Work``.

        Messages of a group with one tag between two ranks keep their order, others may pass.
        """
        raise NotImplementedError

    def irecv(self, tensor: Tensor, src: int, group: Any = None, tag: int = 0) -> Any:
        """Begins to fill a tensor with a message of its size; returns its ``Work``."""
        raise NotImplementedError

    def begin_together(self, posts: Sequence[Post]) -> list[Any]:
        """Begins messages of one group that may wait for each other; returns the work of each."""
        # Receives first: a blocking send of every rank to every other would wait for each other.
        works: dict[int, Any] = {}
        for begin, sends in ((self.irecv, False), (self.isend, True)):
            for at, post in enumerate(posts):
                if post.sends == sends:
                    works[at] = begin(*post[1:])
        return [works[at] for at in range(len(posts))]

    def barrier(self, group: Any = None, async_op: bool = False) -> Any:
        """Waits for all ranks of a group, or of the world."""
        raise NotImplementedError

    def all_reduce(
        self, tensor: Tensor, op: Any = SUM, group: Any = None, async_op: bool = False
    ) -> Any:
        """Reduces a tensor in place, the same bits on all ranks."""
        terms = self._terms(tensor, group)
        inputs = [tensor] * len(terms)
        return self.exchange(
            terms, inputs, group, async_op, lambda: reduce_in_order(terms, op, tensor)
        )

    def reduce(
        self, tensor: Tensor, dst: int, op: Any = SUM, group: Any = None, async_op: bool = False
    ) -> Any:
        """Reduces a tensor into that of rank ``dst``; the others' may keep any numbers."""
        among = self.members(group)
        root, none = among.place(dst), [None] * len(among.ranks)
        if among.index != root:
            return self.exchange(none, at(root, tensor, none), group, async_op)
        terms = self._terms(tensor, group)
        return self.exchange(
            terms,
            at(root, tensor, none),
            group,
            async_op,
            lambda: reduce_in_order(terms, op, tensor),
        )

    def broadcast(self, tensor: Tensor, src: int, group: Any = None, async_op: bool = False) -> Any:
        """Fills a tensor with that of rank ``src``."""
        among = self.members(group)
        root, none = among.place(src), [None] * len(among.ranks)
        if among.index != root:
            return self.exchange(at(root, tensor, none), none, group, async_op)
        others = [None if place == root else tensor for place in range(len(none))]
        return self.exchange(none, others, group, async_op)

    def all_gather(
        self, outputs: Sequence[Tensor], tensor: Tensor, group: Any = None, async_op: bool = False
    ) -> Any:
        """Fills one tensor for each rank of a group, in its order; sizes may differ."""
        return self.exchange(outputs, [tensor] * len(outputs), group, async_op)

    def reduce_scatter(
        self,
        output: Tensor,
        inputs: Sequence[Tensor],
        op: Any = SUM,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        """Reduces one tensor for each rank into that rank's ``output``; sizes may differ."""
        terms = self._terms(output, group)
        return self.exchange(
            terms, inputs, group, async_op, lambda: reduce_in_order(terms, op, output)
        )

    def exchange(
        self,
        outputs: Inputs,
        inputs: Inputs,
        group: Any = None,
        async_op: bool = False,
        then: Callable[[], Any] | None = None,
    ) -> Any:
        """Sends a tensor to each member and fills one from each; ``then`` runs once, at the end."""
        among = self.members(group)
        posts = [
            Post(sends, tensor, among.ranks[place], group, EXCHANGE_TAG)
            for sends, tensors in ((False, outputs), (True, inputs))
            for place, tensor in enumerate(tensors)
            if tensor is not None and place != among.index
        ]
        works = self.begin_together(posts) if posts else []
        into, out_of = outputs[among.index], inputs[among.index]
        if into is not None and out_of is not None and into is not out_of:
            into.view(-1).copy_(out_of.view(-1))
        return finished(JoinedWork(works, then), async_op)

    def _terms(self, like: Tensor, group: Any) -> list[Tensor]:
        return [torch.empty_like(like) for _ in self.members(group).ranks]


class Messages(Backend):
    """Every collective of a group as messages of a backend, whatever its library has.

    Of a group of one rank, too, which has none.
    """

    def __init__(self, backend: Backend, members: Members) -> None:
        self._members = members
        self.begin_together = backend.begin_together  # type: ignore[method-assign]

    def members(self, group: Any) -> Members:
        """Returns the group's ranks."""
        return self._members

    def barrier(self, group: Any = None, async_op: bool = False) -> JoinedWork | None:
        """Returns at once, in a group of one rank; in others no route leads here."""
        return JoinedWork(()) if async_op else None


def at(place: int, tensor: Tensor, none: Sequence[None]) -> list[Tensor | None]:
    """Returns a tensor at a position of a group, and None at the others."""
    return [*none[:place], tensor, *none[place + 1 :]]


def row_of(tensors: Sequence[Tensor]) -> Tensor | None:
    """Returns contiguous tensors of one size and type as one; None: they do not lie in a row."""
    first, size = tensors[0], tensors[0].numel()
    storage, begin = first.untyped_storage()._cdata, first.storage_offset()
    for place, one in enumerate(tensors):
        if one.storage_offset() != begin + place * size or one.untyped_storage()._cdata != storage:
            return None
    return first.as_strided((size * len(tensors),), (1,))


def finished(work: Any, async_op: bool) -> Any:
    """Returns a work that is under way with ``async_op``, else None once it is complete."""
    if async_op:
        return work
    work.wait()
    return None


def reduce_in_order(terms: Sequence[Tensor], op: Any, out: Tensor) -> None:
    """Writes the reduction of one tensor of every rank, in rank order; all have one shape and type.

    Terms are combined left to right, so that the bits are the same wherever it is done; fp16 and
    bf16 in fp32, rounded once. ``out`` may be one of them.
    """
    combine, halves = COMBINE[op], out.dtype in HALVES
    total = terms[0].float() if halves else terms[0]
    for position, term in enumerate(terms[1:]):
        given = term.float() if halves else term
        # The first sum makes a tensor of its own; the others are added to that.
        total = combine(total, given, out=total) if position else combine(total, given)
    out.copy_(total)
