"""Carries tensors of GPUs with NCCL, called directly: without torch's process groups.

What the MCR-DL papers call pure NCCL. Each communicator has a stream of its own. An operation waits
there for what the caller's stream has computed, and the caller's stream waits for it, so that no
host waits (R6):

    caller's stream         compute . event a ............ wait for b . compute
    communicator's stream             wait for a . NCCL . event b

Messages have no tags: they pass each communicator in the order of posting, those of one
:meth:`NcclDirectBackend.batch_isend_irecv` together. Tensors of the host are copied to the GPU and
back. Types and reductions that NCCL lacks are gathered and added by each rank.

**It has never run on a GPU.** Tests run it on a small C library with NCCL's interface.
"""

from __future__ import annotations

import ctypes
import datetime
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hires.comm.backends import rendezvous
from hires.comm.backends.backend_protocol import SUM
from hires.comm.backends.composed import rows_of
from hires.comm.backends.local_sums import reduce_in_order
from hires.comm.backends.nccl_calls import BYTE, NcclCalls, NcclCommunicator, NcclPlace, StreamWork
from hires.comm.backends.nccl_library import (
    UNIQUE_ID_BYTES,
    NcclConfig,
    NcclLibrary,
    UniqueId,
    shipped_library,
)
from hires.core.errors import CommError
from hires.core.ranks.world import World

_ABORT_S = 10.0


class DirectMessage(NamedTuple):
    """One side of a message: ``op`` is the backend's ``isend`` or ``irecv``."""

    op: Callable[..., Any]
    tensor: Tensor
    peer: int
    group: NcclCommunicator | None = None
    tag: int = 0


class NcclDirectBackend:
    """The functions of torch.distributed on NCCL's own."""

    has_streams = True

    def __init__(
        self,
        library: NcclLibrary | None = None,
        device: torch.device | None = None,
        device_module: Any = None,
    ) -> None:
        """Loads NCCL: that of torch. ``device_module`` has its streams and events: torch.cuda."""
        where = device or torch.device("cuda")
        self.library = library or shipped_library()
        self._place = NcclPlace(
            self.library, where, device_module or torch.get_device_module(where)
        )
        self._made: list[NcclCommunicator] = []
        self._is_joined = False

    def join(self, world: World, store: Any, timeout_s: float) -> None:
        """Joins the world; CommError: a rank does not come, or NCCL fails."""
        self._rank, self._store, self._timeout_s = world.rank, store, timeout_s
        if self._place.device.type == "cuda":
            own = torch.device("cuda", torch.cuda.current_device())
            self._place = self._place._replace(device=own)
        self._numbers = rendezvous.GroupNumbers()
        self._all = self._communicator([*range(world.size)], timeout_s)
        self._is_joined = True

    def is_initialized(self) -> bool:
        """Whether this rank is part of the world."""
        return self._is_joined

    def get_rank(self) -> int:
        """Returns this rank."""
        return self._rank

    def new_group(
        self,
        ranks: list[int] | None = None,
        timeout: datetime.timedelta | None = None,
        members_only: bool = False,
    ) -> NcclCommunicator:
        """Makes a communicator of some ranks, which meet in the store without the others."""
        timeout_s = self._timeout_s if timeout is None else timeout.total_seconds()
        return self._communicator(sorted(ranks or self._all.ranks), timeout_s)

    def new_channel(self, ranks: list[int]) -> NcclCommunicator:
        """Makes a communicator for messages alone."""
        return self.new_group(ranks)

    def destroy_group(self, group: NcclCommunicator) -> None:
        """Ends a communicator, when what is under way on it has ended; all its ranks do."""
        if group.is_open:
            self.library("ncclCommFinalize", group.comm)
            self.library.settle(group.comm, group.timeout_s, "the end of NCCL")
            self.library("ncclCommDestroy", group.comm)
            group.is_open = False
            self._made.remove(group)

    def destroy_process_group(self) -> None:
        """Leaves the world; all ranks do."""
        self._is_joined = False
        for group in [*self._made]:
            self.destroy_group(group)

    def abort(self) -> None:
        """Ends what is under way on all communicators, whose kernels would run for ever."""
        self._is_joined = False

        def end() -> None:
            for group in self._open():
                group.is_open = False
                self.library("ncclCommAbort", group.comm)

        # In a thread, since ncclCommAbort may wait for a network that is gone.
        thread = threading.Thread(target=end, daemon=True)
        thread.start()
        thread.join(_ABORT_S)

    def all_reduce(
        self, tensor: Tensor, op: Any = SUM, group: Any = None, async_op: bool = False
    ) -> StreamWork | None:
        """Reduces a tensor in place."""
        with self._run([tensor], [tensor], group, async_op) as run:
            [one] = run.of(tensor)
            if (known := run.reduction(one.dtype, op)) is None:
                reduce_in_order(run.gathered(one), op, one)
            else:
                run.call("ncclAllReduce", one, one, one.numel(), *known)
        return run.work

    def reduce(
        self, tensor: Tensor, dst: int, op: Any = SUM, group: Any = None, async_op: bool = False
    ) -> StreamWork | None:
        """Reduces a tensor into that of rank ``dst``."""
        with self._run([tensor], [tensor], group, async_op) as run:
            [one], root = run.of(tensor), run.group.place(dst)
            if (known := run.reduction(one.dtype, op)) is None:
                terms = run.gathered(one)
                if root == run.group.index:
                    reduce_in_order(terms, op, one)
            else:
                run.call("ncclReduce", one, one, one.numel(), *known, root)
        return run.work

    def broadcast(
        self, tensor: Tensor, src: int, group: Any = None, async_op: bool = False
    ) -> StreamWork | None:
        """Fills a tensor with that of rank ``src``."""
        with self._run([tensor], [tensor], group, async_op) as run:
            [one] = run.of(tensor)
            run.call("ncclBroadcast", one, one, one.nbytes, BYTE, run.group.place(src))
        return run.work

    def all_gather(
        self, tensor_list: list[Tensor], tensor: Tensor, group: Any = None, async_op: bool = False
    ) -> StreamWork | None:
        """Fills one tensor for each rank: as many broadcasts in one call, so sizes may differ."""
        with self._run([tensor], tensor_list, group, async_op) as run:
            [one], parts = run.of(tensor), run.of(*tensor_list)
            with run.together():
                for place, part in enumerate(parts):
                    given = one if place == run.group.index else part
                    run.call("ncclBroadcast", given, part, part.nbytes, BYTE, place)
        return run.work

    def all_gather_into_tensor(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any = None, async_op: bool = False
    ) -> StreamWork | None:
        """Fills a tensor with those of all ranks."""
        with self._run([input_tensor], [output_tensor], group, async_op) as run:
            given, filled = run.of(input_tensor, output_tensor)
            run.call("ncclAllGather", given, filled, given.nbytes, BYTE)
        return run.work

    def reduce_scatter(
        self,
        output: Tensor,
        input_list: list[Tensor],
        op: Any = SUM,
        group: Any = None,
        async_op: bool = False,
    ) -> StreamWork | None:
        """Reduces one tensor for each rank: as many reductions in one call, so sizes may differ."""
        with self._run(input_list, [output], group, async_op) as run:
            [filled], terms, own = run.of(output), run.of(*input_list), run.group.index
            if (known := run.reduction(filled.dtype, op)) is None:
                parts = [filled.new_empty(filled.shape) for _ in terms]
                run.exchange(parts, terms)
                reduce_in_order(parts, op, filled)
            else:
                with run.together():
                    for place, term in enumerate(terms):
                        into = filled if place == own else term
                        run.call("ncclReduce", term, into, term.numel(), *known, place)
        return run.work

    def reduce_scatter_tensor(
        self,
        output: Tensor,
        input: Tensor,
        op: Any = SUM,
        group: Any = None,
        async_op: bool = False,
    ) -> StreamWork | None:
        """Reduces a tensor, and leaves on each rank its equal part."""
        with self._run([input], [output], group, async_op) as run:
            term, filled = run.of(input, output)
            if (known := run.reduction(filled.dtype, op)) is None:
                parts = [filled.new_empty(filled.shape) for _ in run.group.ranks]
                run.exchange(parts, [*term.view(len(parts), *filled.shape)])
                reduce_in_order(parts, op, filled)
            else:
                run.call("ncclReduceScatter", term, filled, filled.numel(), *known)
        return run.work

    def all_to_all(
        self,
        output_tensor_list: list[Tensor],
        input_tensor_list: list[Tensor],
        group: Any = None,
        async_op: bool = False,
    ) -> StreamWork | None:
        """Sends one tensor to each rank, and fills one from each, in one group call."""
        with self._run(input_tensor_list, output_tensor_list, group, async_op) as run:
            run.exchange(run.of(*output_tensor_list), run.of(*input_tensor_list))
        return run.work

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: list[int] | None = None,
        input_split_sizes: list[int] | None = None,
        group: Any = None,
        async_op: bool = False,
    ) -> StreamWork | None:
        """The same with rows of one tensor."""
        with self._run([input], [output], group, async_op) as run:
            given, filled = run.of(input, output)
            size = len(run.group.ranks)
            outputs = rows_of(filled, output_split_sizes, size)
            run.exchange(outputs, rows_of(given, input_split_sizes, size))
        return run.work

    def gather(
        self,
        tensor: Tensor,
        gather_list: list[Tensor] | None = None,
        dst: int = 0,
        group: Any = None,
        async_op: bool = False,
    ) -> StreamWork | None:
        """Fills one tensor for each rank, on rank ``dst``."""
        with self._run([tensor], gather_list or [], group, async_op) as run:
            root, nothing = run.group.place(dst), [None] * len(run.group.ranks)
            given: list[Tensor | None] = [*nothing]
            given[root] = run.of(tensor)[0]
            run.exchange(run.of(*gather_list) if gather_list else nothing, given)
        return run.work

    def scatter(
        self,
        tensor: Tensor,
        scatter_list: list[Tensor] | None = None,
        src: int = 0,
        group: Any = None,
        async_op: bool = False,
    ) -> StreamWork | None:
        """Sends each rank its tensor of rank ``src``."""
        with self._run(scatter_list or [], [tensor], group, async_op) as run:
            root, nothing = run.group.place(src), [None] * len(run.group.ranks)
            taken: list[Tensor | None] = [*nothing]
            taken[root] = run.of(tensor)[0]
            run.exchange(taken, run.of(*scatter_list) if scatter_list else nothing)
        return run.work

    def isend(self, tensor: Tensor, dst: int, group: Any = None, tag: int = 0) -> StreamWork:
        """Begins to send a tensor, behind what this rank posted before on the communicator."""
        return self.batch_isend_irecv([DirectMessage(self.isend, tensor, dst, group)])[0]

    def irecv(self, tensor: Tensor, src: int, group: Any = None, tag: int = 0) -> StreamWork:
        """Begins to fill a tensor with a message."""
        return self.batch_isend_irecv([DirectMessage(self.irecv, tensor, src, group)])[0]

    def batch_isend_irecv(self, p2p_op_list: Sequence[DirectMessage]) -> list[StreamWork]:
        """Begins messages of one communicator that progress together, as one group call."""
        ops = [*p2p_op_list]
        given = [one.tensor for one in ops if one.op == self.isend]
        taken = [one.tensor for one in ops if one.op != self.isend]
        with self._run(given, taken, ops[0].group, True) as run, run.together():
            for one in ops:
                name = "ncclSend" if one.op == self.isend else "ncclRecv"
                run.message(name, run.of(one.tensor)[0], run.group.place(one.peer))
        assert run.work is not None
        return [run.work]

    def P2POp(  # noqa: N802 (torch's name)
        self, op: Any, tensor: Tensor, peer: int, group: Any = None, tag: int = 0
    ) -> DirectMessage:
        """Returns one side of a message, for a batch."""
        return DirectMessage(op, tensor, peer, group, tag)

    def barrier(self, group: Any = None, async_op: bool = False) -> StreamWork | None:
        """Waits for all ranks of a group, on the host."""
        work = self.all_reduce(
            torch.zeros(1, device=self._place.device), group=group, async_op=True
        )
        assert work is not None
        if async_op:
            return work
        work.wait(datetime.timedelta(seconds=(group or self._all).timeout_s))
        return None

    def _open(self) -> Iterator[NcclCommunicator]:
        return (group for group in self._made if group.is_open)

    def _communicator(self, ranks: list[int], timeout_s: float) -> NcclCommunicator:
        if self._rank not in ranks:
            return NcclCommunicator(ranks, -1, timeout_s)
        group = NcclCommunicator(ranks, ranks.index(self._rank), timeout_s)
        key, own = f"communicator {self._numbers.next(ranks)}", UniqueId()
        if group.index == 0:
            self.library("ncclGetUniqueId", ctypes.byref(own))
            self._store.set(key, bytes(own))
        text = bytes(self._store.get(key))
        if len(text) != UNIQUE_ID_BYTES:
            raise CommError(f"the number of an NCCL communicator came as {len(text)} bytes")
        group.comm, config = ctypes.c_void_p(), NcclConfig.non_blocking()
        self.library(
            "ncclCommInitRankConfig",
            ctypes.byref(group.comm),
            len(ranks),
            UniqueId.from_buffer_copy(text),
            group.index,
            ctypes.byref(config),
        )
        self.library.settle(group.comm, timeout_s, f"the start of NCCL among ranks {ranks}")
        group.stream, group.is_open = self._place.module.Stream(), True
        self._made.append(group)
        return group

    @contextmanager
    def _run(
        self, given: Sequence[Tensor], taken: Sequence[Tensor], group: Any, async_op: bool
    ) -> Iterator[NcclCalls]:
        # The block posts NCCL's calls on the communicator's stream, between two events.
        among = self._all if group is None else group
        if not among.is_open:
            raise ValueError(f"rank {self._rank} is not among ranks {among.ranks}")
        module, run = self._place.module, NcclCalls(self._place, among)
        back = [(one, run.carry(one)) for one in taken if run.is_away(one)]
        for one in given:
            run.carry(one)
        before = module.Event()
        before.record(module.current_stream())
        among.stream.wait_event(before)
        with module.stream(among.stream):
            yield run
        for one in (*given, *taken):
            carried = run.of(one)[0]
            if carried.device.type == "cuda":
                carried.record_stream(among.stream)  # its memory is not reused before it is over
        after = module.Event()
        after.record(among.stream)
        work = StreamWork(self._place, among, after)
        work.back = back
        if async_op:
            run.work = work
        else:
            work.wait()


def join(world: World, timeout_s: float) -> NcclDirectBackend:
    """Joins the world with the library that torch ships; CommError: there is none, or no GPU."""
    backend = NcclDirectBackend()
    if not torch.cuda.is_available():
        raise CommError("comm.backend=nccl_direct needs a GPU, and torch sees none; use gloo")
    backend.join(world, rendezvous.store(world, timeout_s, "nccl_direct"), timeout_s)
    return backend
