"""Composes collectives of messages, for what the library of a backend lacks.

All are one exchange: a rank posts its receives and sends at once, so nothing has to run between,
and an operation may stay under way while the rank computes. Reductions receive the terms of all
ranks and add them up in the order of ranks when the last has come: all ranks get the same bits, and
halves are added in fp32 and rounded once.

    rank 0   irecv from 1, 2   isend to 1, 2   ...   wait: term 0 + term 1 + term 2
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hires.comm.backends.backend_protocol import COMPOSED_TAG, SUM, Backend, Members
from hires.comm.backends.joined_work import JoinedWork
from hires.comm.backends.local_sums import reduce_in_order
from hires.core.errors import CommError


class Composed:
    """Every collective, of a backend's ``isend`` and ``irecv`` between members of a group."""

    def isend(self, tensor: Tensor, dst: int, group: Any = None, tag: int = 0) -> Any:
        """Begins to send a tensor."""
        raise NotImplementedError

    def irecv(self, tensor: Tensor, src: int, group: Any = None, tag: int = 0) -> Any:
        """Begins to receive a tensor."""
        raise NotImplementedError

    def members(self, group: Any) -> Members:
        """Returns the ranks of a handle, or of the world."""
        raise NotImplementedError

    def destroy_group(self, group: Any) -> None:
        """Frees nothing: a group that is only ranks has nothing."""

    def all_reduce(
        self, tensor: Tensor, op: Any = SUM, group: Any = None, async_op: bool = False
    ) -> Any:
        """Sends the tensor to all, and reduces those of all."""
        terms = self._terms(tensor, group)
        given = [tensor] * len(terms)
        return self._exchange(
            terms, given, group, async_op, lambda: reduce_in_order(terms, op, tensor)
        )

    def reduce(
        self, tensor: Tensor, dst: int, op: Any = SUM, group: Any = None, async_op: bool = False
    ) -> Any:
        """Sends the tensor to one rank, which reduces those of all."""
        among = self.members(group)
        root, none = among.place(dst), [None] * len(among.ranks)
        if among.index != root:
            return self._exchange(none, _at(root, tensor, none), group, async_op)
        terms = self._terms(tensor, group)
        given = _at(root, tensor, none)
        return self._exchange(
            terms, given, group, async_op, lambda: reduce_in_order(terms, op, tensor)
        )

    def broadcast(self, tensor: Tensor, src: int, group: Any = None, async_op: bool = False) -> Any:
        """Sends the tensor of one rank to each of the others."""
        among = self.members(group)
        root, none = among.place(src), [None] * len(among.ranks)
        if among.index != root:
            return self._exchange(_at(root, tensor, none), none, group, async_op)
        others = [None if place == root else tensor for place in range(len(none))]
        return self._exchange(none, others, group, async_op)

    def all_gather(
        self, tensor_list: list[Tensor], tensor: Tensor, group: Any = None, async_op: bool = False
    ) -> Any:
        """Sends the tensor to all."""
        return self._exchange(tensor_list, [tensor] * len(tensor_list), group, async_op)

    def all_gather_into_tensor(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any = None, async_op: bool = False
    ) -> Any:
        """The same, into parts of one tensor."""
        size = len(self.members(group).ranks)
        parts = [*output_tensor.view(size, -1).unbind(0)]
        return Composed.all_gather(self, parts, input_tensor.view(-1), group, async_op)

    def reduce_scatter(
        self,
        output: Tensor,
        input_list: list[Tensor],
        op: Any = SUM,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        """Sends each rank its term, and reduces those of all."""
        terms = self._terms(output, group)
        return self._exchange(
            terms, input_list, group, async_op, lambda: reduce_in_order(terms, op, output)
        )

    def reduce_scatter_tensor(
        self,
        output: Tensor,
        input: Tensor,
        op: Any = SUM,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        """The same, of parts of one tensor."""
        parts = [*input.view(len(self.members(group).ranks), -1).unbind(0)]
        return Composed.reduce_scatter(self, output.view(-1), parts, op, group, async_op)

    def all_to_all(
        self,
        output_tensor_list: list[Tensor],
        input_tensor_list: list[Tensor],
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        """Sends each rank its tensor."""
        return self._exchange(output_tensor_list, input_tensor_list, group, async_op)

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: list[int] | None = None,
        input_split_sizes: list[int] | None = None,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        """Sends each rank its rows."""
        size = len(self.members(group).ranks)
        outputs = rows_of(output, output_split_sizes, size)
        inputs = rows_of(input, input_split_sizes, size)
        return self._exchange(outputs, inputs, group, async_op)

    def gather(
        self,
        tensor: Tensor,
        gather_list: list[Tensor] | None = None,
        dst: int = 0,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        """Sends the tensor to one rank."""
        among = self.members(group)
        none = [None] * len(among.ranks)
        given = _at(among.place(dst), tensor, none)
        return self._exchange(gather_list or none, given, group, async_op)

    def scatter(
        self,
        tensor: Tensor,
        scatter_list: list[Tensor] | None = None,
        src: int = 0,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        """Sends each rank its tensor of one rank."""
        among = self.members(group)
        none = [None] * len(among.ranks)
        taken = _at(among.place(src), tensor, none)
        return self._exchange(taken, scatter_list or none, group, async_op)

    def _terms(self, like: Tensor, group: Any) -> list[Tensor]:
        return [torch.empty_like(like) for _ in self.members(group).ranks]

    def _exchange(
        self,
        taken: Sequence[Tensor | None],
        given: Sequence[Tensor | None],
        group: Any,
        async_op: bool,
        then: Callable[[], Any] | None = None,
    ) -> JoinedWork | None:
        # By position in the group: the tensor that comes from a member, and that goes to it.
        among, tag = self.members(group), COMPOSED_TAG
        own = among.index
        works: list[Any] = []
        # Receives first: a blocking send of every rank to every other would wait for each other.
        for place, tensor in enumerate(taken):
            if tensor is not None and place != own:
                works.append(self.irecv(tensor, among.ranks[place], group, tag))
        for place, tensor in enumerate(given):
            if tensor is not None and place != own:
                works.append(self.isend(tensor, among.ranks[place], group, tag))
        into, out_of = taken[own], given[own]
        if into is not None and out_of is not None and into is not out_of:
            into.view(-1).copy_(out_of.view(-1))
        work = JoinedWork(works, then)
        if async_op:
            return work
        work.wait()
        return None


class Alone(Composed):
    """The operations of a group of one rank."""

    def members(self, group: Any) -> Members:
        """Returns this rank."""
        assert isinstance(group, Members)
        return group

    def barrier(self, group: Any = None, async_op: bool = False) -> JoinedWork | None:
        """Returns at once."""
        return JoinedWork(()) if async_op else None


class Messages(Composed):
    """Every collective of a group as messages of a backend, whatever its library has."""

    def __init__(self, backend: Backend, members: Members) -> None:
        self._backend, self._members = backend, members

    def isend(self, tensor: Tensor, dst: int, group: Any = None, tag: int = 0) -> Any:
        """Begins to send a tensor."""
        return self._backend.isend(tensor, dst, group, tag)

    def irecv(self, tensor: Tensor, src: int, group: Any = None, tag: int = 0) -> Any:
        """Begins to receive a tensor."""
        return self._backend.irecv(tensor, src, group, tag)

    def members(self, group: Any) -> Members:
        """Returns the group's ranks."""
        return self._members


def rows_of(tensor: Tensor, sizes: list[int] | None, num_ranks: int) -> list[Tensor]:
    """Returns the rows of a tensor for each rank, as views, see :func:`row_counts`."""
    ends = [0, *itertools.accumulate(row_counts(tensor, sizes, num_ranks))]
    return [tensor[begin:end] for begin, end in itertools.pairwise(ends)]


def row_counts(tensor: Tensor, sizes: list[int] | None, num_ranks: int) -> list[int]:
    """Returns how many rows of a tensor each rank has: ``sizes``, or as many for each.

    CommError: the rows do not divide so.
    """
    rows = len(tensor) if tensor.dim() else 1
    if not sizes:
        if rows % num_ranks:
            raise CommError(f"{rows} rows cannot be divided among {num_ranks} ranks; give sizes")
        return [rows // num_ranks] * num_ranks
    if len(sizes) != num_ranks or sum(sizes) != rows:
        raise CommError(f"split sizes {sizes} do not divide {rows} rows among {num_ranks} ranks")
    return sizes


def _at(place: int, tensor: Tensor, none: list[None]) -> list[Tensor | None]:
    return [*none[:place], tensor, *none[place + 1 :]]
