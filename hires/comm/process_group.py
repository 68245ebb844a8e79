"""Makes hires' messages a backend of ``torch.distributed``: ``init_process_group("hires")``.

A process group of torch calls functions of :mod:`hires.comm` of the same names, so that their
routes, log and checks also hold for DDP, FSDP2, DTensor and functional collectives.

    dist.all_reduce  ┐                      ┌ route: backend, algorithm, segment
    DDP, FSDP2       ├> HiresProcessGroup ──┤ log
    wait_tensor      ┘                      └ sequence check

Positions in a group are what torch passes here; ``hires.comm`` takes ranks of the world. This class
has the names of torch 2.11 and of 2.13 (``all_gather_single`` and others).

Source:
    torch/csrc/distributed/c10d/PyProcessGroup.hpp (what C++ calls of a Python process group)
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hires import comm
from hires.comm.argument_checks import require_tag
from hires.comm.comm_world import Group
from hires.comm.point_to_point import start_posts
from hires.comm.torch_work import HiresWork
from hires.core.errors import CommError


def _raises_torch_errors(method: Callable[..., HiresWork]) -> Callable[..., HiresWork]:
    # Scripts catch the errors of torch: a CommError is none of them.
    @functools.wraps(method)
    def call(self: HiresProcessGroup, *args: Any, **kwargs: Any) -> HiresWork:
        try:
            return method(self, *args, **kwargs)
        except CommError as error:
            raise dist.DistBackendError(str(error)) from error

    return call


class HiresProcessGroup(dist.ProcessGroup):
    """Some ranks for ``torch.distributed``, over :mod:`hires.comm`.

    ``route`` is the ``backend=`` of all its operations; None: the table chooses, or the default.
    ``leave`` runs when torch destroys the group.
    """

    def __init__(
        self, group: Group, route: Any = None, leave: Callable[[], None] = lambda: None
    ) -> None:
        super().__init__(group.index, group.size)  # type: ignore[call-arg]
        self._group, self._route, self._leave = group, route, leave
        self._coalesced: list[HiresWork] | None = None
        self._posts: list[comm.P2POp] = []
        self._name = self._described = ""

    def getBackendName(self) -> str:  # noqa: N802, torch's name
        """Returns the name of the backend."""
        return "hires"

    _get_backend_name = getBackendName

    # torch's own keep the names in the backends of a group, and this one has none of those.
    def setGroupName(self, name: str) -> None:  # noqa: N802
        """Keeps the name that torch gives."""
        self._name = name

    def getGroupName(self) -> str:  # noqa: N802
        """Returns the name that torch gave."""
        return self._name

    def setGroupDesc(self, text: str) -> None:  # noqa: N802
        """Keeps what a user calls the group."""
        self._described = text

    def getGroupDesc(self) -> str:  # noqa: N802
        """Returns what a user calls the group."""
        return self._described

    def shutdown(self) -> None:
        """Leaves the group."""
        self._leave()

    def abort(self) -> None:
        """Leaves the group, whatever is under way."""
        self._leave()

    @_raises_torch_errors
    def allreduce(self, tensors: Any, opts: Any = None, *_: Any) -> HiresWork:
        """Reduces a tensor in place."""
        [tensor] = _as_list(tensors)
        return self._call(comm.all_reduce, _blocks(opts), [tensor], tensor, _operation(opts))

    @_raises_torch_errors
    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: Any = None) -> HiresWork:
        """Reduces tensors in place, those of one type as one message."""
        by_type: dict[torch.dtype, list[Tensor]] = {}
        for tensor in tensors:
            by_type.setdefault(tensor.dtype, []).append(tensor)
        flats = [torch.cat([one.reshape(-1) for one in row]) for row in by_type.values()]
        works = [self._call(comm.all_reduce, False, [], flat, _operation(opts)) for flat in flats]

        def split() -> None:
            for row, flat in zip(by_type.values(), flats, strict=True):
                parts = torch.split(flat, [one.numel() for one in row])
                for one, part in zip(row, parts, strict=True):
                    one.copy_(part.view(one.shape))

        return self._noted(HiresWork(works, tensors, split))

    @_raises_torch_errors
    def broadcast(self, tensors: Any, opts: Any = None, *_: Any) -> HiresWork:
        """Fills a tensor with that of a position in the group."""
        [tensor] = _as_list(tensors)
        source = self._rank_at(opts.rootRank if hasattr(opts, "rootRank") else opts or 0)
        return self._call(comm.broadcast, _blocks(opts), [tensor], tensor, source)

    @_raises_torch_errors
    def reduce(self, tensors: Any, opts: Any) -> HiresWork:
        """Reduces into the tensor of a position in the group."""
        [tensor] = _as_list(tensors)
        target = self._rank_at(opts.rootRank)
        return self._call(comm.reduce, _blocks(opts), [tensor], tensor, target, _operation(opts))

    @_raises_torch_errors
    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> HiresWork:
        """Fills one tensor for each member; their sizes may differ."""
        [parts], [tensor] = outputs, _as_list(inputs)
        return self._call(comm.all_gather, _blocks(opts), [parts], parts, tensor)

    @_raises_torch_errors
    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> HiresWork:
        """Fills a tensor with those of all members, one behind the other."""
        return self._call(comm.all_gather_into_tensor, _blocks(opts), [output], output, input)

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> HiresWork:
        """Fills several such tensors."""
        return self._together(self.all_gather_single, outputs, inputs, opts)

    allgather_into_tensor_coalesced = all_gather_single_coalesced  # type: ignore[assignment]

    def allgather_coalesced(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None
    ) -> HiresWork:
        """Gathers several tensors: ``outputs`` has a list of them for each member."""
        lists = [[list(parts)] for parts in zip(*outputs, strict=True)]
        return self._together(self.allgather, lists, [[one] for one in inputs], opts)

    @_raises_torch_errors
    def gather(self, outputs: Any, inputs: Any, opts: Any) -> HiresWork:
        """Fills one tensor for each member at one position."""
        [tensor] = _as_list(inputs)
        parts = outputs[0] if outputs and len(outputs[0]) else None
        target = self._rank_at(opts.rootRank)
        return self._call(comm.gather, _blocks(opts), [parts or []], tensor, parts, target)

    @_raises_torch_errors
    def scatter(self, outputs: Any, inputs: Any, opts: Any) -> HiresWork:
        """Fills a tensor with this member's of one position."""
        [tensor] = _as_list(outputs)
        parts = inputs[0] if inputs and len(inputs[0]) else None
        source = self._rank_at(opts.rootRank)
        return self._call(comm.scatter, _blocks(opts), [tensor], tensor, parts, source)

    @_raises_torch_errors
    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> HiresWork:
        """Reduces one tensor for each member, and leaves this one's."""
        [output], [parts], op = _as_list(outputs), inputs, _operation(opts)
        return self._call(comm.reduce_scatter, _blocks(opts), [output], output, parts, op)

    @_raises_torch_errors
    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> HiresWork:
        """Reduces one part of a tensor for each member, and leaves this one's."""
        return self._call(
            comm.reduce_scatter_tensor, _blocks(opts), [output], output, input, _operation(opts)
        )

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> HiresWork:
        """Reduces several such tensors."""
        return self._together(self.reduce_scatter_single, outputs, inputs, opts)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced  # type: ignore[assignment]

    @_raises_torch_errors
    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: Sequence[int],
        input_split_sizes: Sequence[int],
        opts: Any = None,
    ) -> HiresWork:
        """Sends rows of a tensor to each member."""
        sizes = [*output_split_sizes] or None, [*input_split_sizes] or None
        return self._call(comm.all_to_all_single, _blocks(opts), [output], output, input, *sizes)

    alltoall_base = all_to_all_single

    @_raises_torch_errors
    def alltoall(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> HiresWork:
        """Sends a tensor to each member."""
        return self._call(comm.all_to_all, _blocks(opts), outputs, [*outputs], [*inputs])

    @_raises_torch_errors
    def send(self, tensors: Any, target: int, tag: int = 0) -> HiresWork:
        """Begins to send a tensor to a position in the group."""
        [tensor] = _as_list(tensors)
        require_tag(tag)
        return self._message(comm.isend, tensor, target, tag)

    @_raises_torch_errors
    def recv(self, tensors: Any, source: int, tag: int = 0) -> HiresWork:
        """Begins to fill a tensor from a position in the group."""
        [tensor] = _as_list(tensors)
        require_tag(tag)
        return self._message(comm.irecv, tensor, source, tag)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> HiresWork:
        """Refuses: the result would depend on which message comes first."""
        raise NotImplementedError(
            "a receive from any rank is not in hires, since no order of it can be proved; name src"
        )

    @_raises_torch_errors
    def barrier(self, opts: Any = None, *_: Any) -> HiresWork:
        """Waits for all members."""
        return self._call(comm.barrier, _blocks(opts), [])

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu"), *([torch.device("cuda")] if torch.cuda.is_available() else [])]

    def _start_coalescing(self, device: Any = None) -> None:
        self._coalesced = []

    @_raises_torch_errors
    def _end_coalescing(self, device: Any = None) -> HiresWork:
        works, self._coalesced = self._coalesced or [], None
        posts, self._posts = self._posts, []
        if posts:
            works.append(HiresWork(start_posts(posts), [one.tensor for one in posts]))
        return HiresWork(works, [one for work in works for one in work.result()])

    @_raises_torch_errors
    def _message(self, op: Any, tensor: Tensor, position: int, tag: int) -> HiresWork:
        peer = self._rank_at(position)
        post = comm.P2POp(op, tensor, peer, self._group, tag, self._route)
        # On streams messages that wait for each other must begin together.
        if self._coalesced is not None:
            self._posts.append(post)
            return HiresWork()
        return HiresWork(start_posts([post]), [post.tensor])

    def _call(
        self, function: Callable[..., Any], blocks: bool, results: Sequence[Any], *args: Any
    ) -> HiresWork:
        blocks = blocks and self._coalesced is None
        handle = function(*args, group=self._group, async_op=not blocks, backend=self._route)
        return self._noted(HiresWork([] if handle is None else [handle], results))

    def _noted(self, work: HiresWork) -> HiresWork:
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _together(
        self, method: Callable[..., HiresWork], outputs: Any, inputs: Any, opts: Any
    ) -> HiresWork:
        if opts is not None:
            opts.asyncOp = True  # they are waited for together
        pairs = zip(outputs, inputs, strict=True)
        return HiresWork([method(*pair, opts) for pair in pairs], outputs)

    def _rank_at(self, position: int) -> int:
        return self._group.ranks[position]


def _as_list(tensors: Any) -> Any:
    return [tensors] if isinstance(tensors, Tensor) else tensors


def _blocks(opts: Any) -> bool:
    # C++ leaves it True; torch.distributed sets it.
    return not getattr(opts, "asyncOp", True)


def _operation(opts: Any) -> Any:
    # Of options, or of an operation in their place. The plain name, except where it has a factor.
    op = getattr(opts, "reduceOp", opts)
    if op is None:
        return dist.ReduceOp.SUM
    return op if op == dist.ReduceOp.PREMUL_SUM else getattr(op, "op", op)
