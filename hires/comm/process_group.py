"""Makes hires' messages a backend of ``torch.distributed``: ``init_process_group("hires")``.

A process group of torch calls functions of :mod:`hires.comm` of the same names, so that their
routes, log and checks also hold for DDP, FSDP2, DTensor and functional collectives.

    dist.all_reduce  ┐                      ┌ route: backend, algorithm, segment
    DDP, FSDP2       ├> HiresProcessGroup ──┤ log
    wait_tensor      ┘                      └ sequence check

Positions in a group are what torch passes here; ``hires.comm`` takes ranks of the world.

Source:
    torch/csrc/distributed/c10d/PyProcessGroup.hpp (what C++ calls of a Python process group)
"""

from __future__ import annotations

import contextlib
import datetime
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from hires import comm
from hires.comm.argument_checks import require_tag
from hires.comm.backends.works import run_in_thread
from hires.comm.comm_world import Group
from hires.comm.point_to_point import start_posts
from hires.core.errors import CommError


@contextlib.contextmanager
def _torch_errors() -> Iterator[None]:
    # Scripts catch the errors of torch: a CommError is none of them.
    try:
        yield
    except CommError as error:
        raise dist.DistBackendError(str(error)) from error


_NO_LIMIT = datetime.timedelta(0)


class HiresWork(dist.Work):
    """Operations that are under way as one.

    ``handles`` are those of :mod:`hires.comm` or of this class, ``results`` the tensors that they
    fill, perhaps in lists; ``then`` runs once when all are complete.
    """

    def __init__(
        self,
        handles: Sequence[Any] = (),
        results: Sequence[Any] = (),
        then: Callable[[], None] | None = None,
    ) -> None:
        super().__init__()
        self._handles, self._results, self._then = [*handles], [*results], then
        self._future: Future[Any] | None = None
        self._ended: threading.Event | None = None  # once a thread waits for its future
        self._error: Exception | None = None  # of that thread

    def wait(self, timeout: datetime.timedelta | None = _NO_LIMIT) -> bool:
        """Returns True when it is complete; ``timeout`` 0 or None: within that of the group.

        Raises:
            DistBackendError: it failed, or is late.
        """
        limit = timeout if timeout and timeout > _NO_LIMIT else None
        if self._ended is not None:
            limit_s = limit.total_seconds() if limit else None
            if not self._ended.wait(limit_s):
                raise dist.DistBackendError(f"{self._what()} took over {limit_s:g} s")
            if self._error is not None:
                raise self._error
            return True
        with _torch_errors():
            for handle in self._handles:
                handle.wait(*[limit] if limit else ())
        self._end()
        return True

    def finish(self) -> None:
        """Waits in a thread of its own; DistBackendError: it failed."""
        with _torch_errors():
            for handle in self._handles:
                handle.finish()
        self._end()

    def _what(self) -> str:
        parts = (h._what() if isinstance(h, HiresWork) else h.call.what for h in self._handles)
        return ", ".join(dict.fromkeys(parts))

    def _end(self) -> None:
        then, self._then = self._then, None
        if then is not None:
            then()

    def synchronize(self) -> None:
        """Waits."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether it ended, well or not."""
        if self._ended is not None:
            return self._ended.is_set()
        return all(handle.is_completed() for handle in self._handles)

    def is_success(self) -> bool:
        """Whether it ended well."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> Exception | None:
        """Returns why it failed; None: it has not, or is under way."""
        if self._ended is not None:  # the thread has not ended, or says how
            return self._error if self._ended.is_set() else None
        errors = (handle.exception() for handle in self._handles)
        return next((error for error in errors if error is not None), None)

    def result(self) -> list[Any]:
        """Returns the tensors that it fills."""
        return self._results

    def get_future(self) -> Future[Any]:
        """Returns the future of the tensors that it fills.

        A thread of its own waits for it, so that its callbacks may wait for other operations, as
        PowerSGD's do; for tensors of a device, whose streams are those of this thread, this one
        does.
        """
        if self._future is None:
            rows = (one if isinstance(one, list | tuple) else [one] for one in self._results)
            places = {one.device for row in rows for one in row if isinstance(one, Tensor)}
            gpus: list[Any] = [place for place in places if place.type == "cuda"]
            future = Future[Any](devices=gpus)
            if any(place.type != "cpu" for place in places):
                with contextlib.suppress(dist.DistBackendError):  # the future raises it
                    self.wait()
            if self.is_completed():
                self._settle(future)
            else:
                ended = threading.Event()
                run_in_thread(lambda: self._settle(future, ended))
                self._ended = ended
            # An error that is set is a value to torch's C++: DistributedDataParallel would take it
            # for tensors, and end by SIGSEGV. One that a callback raises is an error.
            self._future = future.then(self._outcome)
        return self._future

    def _outcome(self, _: Future[Any]) -> list[Any]:
        if self._error is not None:
            raise self._error
        return self._results

    def _settle(self, future: Future[Any], ended: threading.Event | None = None) -> None:
        try:
            self.finish()
        except Exception as error:
            self._error = error
        if ended is not None:
            ended.set()
        future.set_result(self._results)


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

    abort = shutdown

    def allreduce(self, tensors: Any, opts: Any = None, *_: Any) -> HiresWork:
        """Reduces a tensor in place."""
        [tensor] = _as_list(tensors)
        return self._call(comm.all_reduce, opts, [tensor], tensor, _operation(opts))

    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: Any = None) -> HiresWork:
        """Reduces tensors in place, those of one type as one message."""
        by_type: dict[torch.dtype, list[Tensor]] = {}
        for tensor in tensors:
            by_type.setdefault(tensor.dtype, []).append(tensor)
        flats = [torch.cat([one.reshape(-1) for one in row]) for row in by_type.values()]
        works = [self._call(comm.all_reduce, None, [], flat, _operation(opts)) for flat in flats]

        def split() -> None:
            for row, flat in zip(by_type.values(), flats, strict=True):
                parts = torch.split(flat, [one.numel() for one in row])
                for one, part in zip(row, parts, strict=True):
                    one.copy_(part.view(one.shape))

        return self._noted(HiresWork(works, tensors, split))

    def broadcast(self, tensors: Any, opts: Any = None, *_: Any) -> HiresWork:
        """Fills a tensor with that of a position in the group."""
        [tensor] = _as_list(tensors)
        source = self._rank_at(opts.rootRank if hasattr(opts, "rootRank") else opts or 0)
        return self._call(comm.broadcast, opts, [tensor], tensor, source)

    def reduce(self, tensors: Any, opts: Any) -> HiresWork:  # type: ignore[override]
        """Reduces into the tensor of a position in the group."""
        [tensor] = _as_list(tensors)
        target = self._rank_at(opts.rootRank)
        return self._call(comm.reduce, opts, [tensor], tensor, target, _operation(opts))

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> HiresWork:
        """Fills one tensor for each member; their sizes may differ."""
        [parts], [tensor] = outputs, _as_list(inputs)
        return self._call(comm.all_gather, opts, [parts], parts, tensor)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> HiresWork:
        """Fills a tensor with those of all members, one behind the other."""
        return self._call(comm.all_gather_into_tensor, opts, [output], output, input)

    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> HiresWork:
        """Fills several such tensors."""
        return self._together(self.all_gather_single, outputs, inputs, opts)

    def allgather_coalesced(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None
    ) -> HiresWork:
        """Gathers several tensors: ``outputs`` has a list of them for each member."""
        lists = [[list(parts)] for parts in zip(*outputs, strict=True)]
        return self._together(self.allgather, lists, [[one] for one in inputs], opts)

    def gather(self, outputs: Any, inputs: Any, opts: Any) -> HiresWork:  # type: ignore[override]
        """Fills one tensor for each member at one position."""
        [tensor] = _as_list(inputs)
        parts = outputs[0] if outputs and len(outputs[0]) else None
        target = self._rank_at(opts.rootRank)
        return self._call(comm.gather, opts, [parts or []], tensor, parts, target)

    def scatter(self, outputs: Any, inputs: Any, opts: Any) -> HiresWork:  # type: ignore[override]
        """Fills a tensor with this member's of one position."""
        [tensor] = _as_list(outputs)
        parts = inputs[0] if inputs and len(inputs[0]) else None
        source = self._rank_at(opts.rootRank)
        return self._call(comm.scatter, opts, [tensor], tensor, parts, source)

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> HiresWork:  # type: ignore[override]
        """Reduces one tensor for each member, and leaves this one's."""
        [output], [parts], op = _as_list(outputs), inputs, _operation(opts)
        return self._call(comm.reduce_scatter, opts, [output], output, parts, op)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> HiresWork:
        """Reduces one part of a tensor for each member, and leaves this one's."""
        return self._call(
            comm.reduce_scatter_tensor, opts, [output], output, input, _operation(opts)
        )

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> HiresWork:
        """Reduces several such tensors."""
        return self._together(self.reduce_scatter_single, outputs, inputs, opts)

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
        return self._call(comm.all_to_all_single, opts, [output], output, input, *sizes)

    def alltoall(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> HiresWork:
        """Sends a tensor to each member."""
        return self._call(comm.all_to_all, opts, outputs, [*outputs], [*inputs])

    def send(self, tensors: Any, target: int, tag: int = 0) -> HiresWork:
        """Begins to send a tensor to a position in the group."""
        return self._message(comm.isend, tensors, target, tag)

    def recv(self, tensors: Any, source: int, tag: int = 0) -> HiresWork:
        """Begins to fill a tensor from a position in the group."""
        return self._message(comm.irecv, tensors, source, tag)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> HiresWork:
        """Refuses: the result would depend on which message comes first."""
        raise NotImplementedError(
            "a receive from any rank is not in hires, since no order of it can be proved; name src"
        )

    def barrier(self, opts: Any = None, *_: Any) -> HiresWork:
        """Waits for all members."""
        return self._call(comm.barrier, opts, [])

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu"), *([torch.device("cuda")] if torch.cuda.is_available() else [])]

    def _start_coalescing(self, device: Any = None) -> None:
        self._coalesced = []

    def _end_coalescing(self, device: Any = None) -> HiresWork:
        works, self._coalesced = self._coalesced or [], None
        posts, self._posts = self._posts, []
        if posts:
            with _torch_errors():
                works.append(HiresWork(start_posts(posts), [one.tensor for one in posts]))
        return HiresWork(works, [one for work in works for one in work.result()])

    def _message(self, op: Any, tensors: Any, position: int, tag: int) -> HiresWork:
        [tensor], peer = _as_list(tensors), self._rank_at(position)
        with _torch_errors():
            require_tag(tag)
        post = comm.P2POp(op, tensor, peer, self._group, tag, self._route)
        # On streams messages that wait for each other must begin together.
        if self._coalesced is not None:
            self._posts.append(post)
            return HiresWork()
        with _torch_errors():
            return HiresWork(start_posts([post]), [post.tensor])

    def _call(
        self, function: Callable[..., Any], opts: Any, results: Sequence[Any], *args: Any
    ) -> HiresWork:
        # C++ leaves asyncOp True; torch.distributed sets it.
        blocks = not getattr(opts, "asyncOp", True) and self._coalesced is None
        with _torch_errors():
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


def _operation(opts: Any) -> Any:
    # Of options, or of an operation in their place. The plain name, except where it has a factor.
    op = getattr(opts, "reduceOp", opts)
    if op is None:
        return dist.ReduceOp.SUM
    return op if op == dist.ReduceOp.PREMUL_SUM else getattr(op, "op", op)
