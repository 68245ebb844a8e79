"""Carries out collectives by their dispatch; notes them in the log and the check.

Tensors that the backend does not reach, or that are not contiguous, are carried by others.
"""

from __future__ import annotations

import bisect
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from hires.comm.comm_world import activity, unlogged
from hires.comm.dispatch import Dispatch
from hires.comm.handles import FAILURES, Handle, failure
from hires.core.errors import CommError
from hires.core.ranks.timeline import COLLECTIVE
from hires.plan.traffic import CALLED

P = ParamSpec("P")
T = TypeVar("T")


def start(
    call: Dispatch,
    args: Sequence[Any],
    after: Sequence[Callable[[], Any]],
    async_op: bool,
    issued: float,
    num_bytes: int,
    agreed: Any = None,
) -> Handle | None:
    """Carries out a collective; returns its handle with ``async_op``, else None when complete.

    ``agreed``: its root or reduction, which is the same on all ranks.
    """
    world, number = call.group.world, -1
    check = world.check
    if check is not None and call.channel is not None and call.facts is not None:
        number = check.note(call.channel, call.facts, agreed)
    log = world.log if len(call.ranks) > 1 and not unlogged.on else None
    if async_op:
        try:
            work = call.method(*args, group=call.handle, async_op=True)
        except FAILURES as error:
            raise failure(call.what, error, world, call.backend, number) from error
        handle = Handle(work, call, after, number=number)
        if log is not None:
            handle.keep_in(log, num_bytes, issued)
        return handle
    recorder = call.group.recorder
    begin = recorder.clock.now() if recorder is not None else None
    operation = CALLED[call.operation]
    outer = activity.begin(call.what, -1, -1, call.ranks, number, operation)
    try:
        call.method(*args, group=call.handle)
        for one in after:
            one()
    except FAILURES as error:
        raise failure(call.what, error, world, call.backend, number) from error
    finally:
        activity.end(outer)
    if log is not None:
        log.note_blocking(call.operation, call.way, num_bytes, issued)
    if world.streams is not None:
        world.streams.add(call.what, call.ranks, operation)
    if recorder is not None and recorder.action:
        recorder.note(COLLECTIVE, begin, call.label)
    return None


def in_normal_mode(call: Callable[P, T]) -> Callable[P, T]:
    """Runs an operation outside of torch.inference_mode: no other thread may fill its tensors."""

    @functools.wraps(call)
    def run(*args: P.args, **named: P.kwargs) -> T:
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False):
                return call(*args, **named)
        return call(*args, **named)

    return run


def is_dense(tensor: Tensor) -> bool:
    """Whether any thread may fill a tensor, contiguous, and neither negated nor conjugated."""
    is_lazy = tensor.is_neg() or tensor.is_conj()
    return tensor.is_contiguous() and not (is_lazy or tensor.is_inference())


def needs_none(call: Dispatch, tensor: Tensor) -> bool:
    """Whether the backend takes a tensor as it is: the quick answer, for the host's memory."""
    is_near = call.reaches_cpu and tensor.is_cpu and not tensor.requires_grad
    return is_near and tensor.numel() > 1 and is_dense(tensor)


def apart(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> list[Tensor]:
    """Returns dense tensors to send, copied where a target would overwrite them before.

    CommError: two targets share memory.
    """
    if any(isinstance(one, FakeTensor) for one in sources):
        return [*sources]  # of a rehearsal, which has no memory
    spans = sorted((one.data_ptr(), one.data_ptr() + one.nbytes) for one in targets if one.nbytes)
    if any(end > begin for (_, end), (begin, _) in itertools.pairwise(spans)):
        raise CommError("two of the outputs share memory; give each rank one of its own")
    ends = [end for _, end in spans]

    def is_apart(begin: int, end: int) -> bool:
        place = bisect.bisect_right(ends, begin)  # the first span that ends behind it
        return place == len(spans) or spans[place][0] >= end

    return [
        one if is_apart(one.data_ptr(), one.data_ptr() + one.nbytes) else one.clone()
        for one in sources
    ]


def _dense(tensor: Tensor) -> Tensor:
    dense = tensor.resolve_conj().resolve_neg().contiguous()
    return dense.clone() if dense.is_inference() else dense


def _fill(tensor: Tensor, copy: Tensor) -> None:
    with torch.inference_mode(tensor.is_inference()):
        tensor.copy_(copy)


def require_own_memory(tensor: Tensor) -> None:
    """Raises CommError where numbers of a tensor to fill share memory."""
    # Each number has a place of its own if every dim steps over all that the shorter steps reach.
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride <= reach and tensor.numel():
            raise CommError(
                "numbers of an output share memory, as those that were expanded or overlap; "
                "give its contiguous() copy"
            )
        reach += stride * (size - 1)


class Carriers:
    """Contiguous tensors in the backend's reach that stand for the caller's in one operation."""

    __slots__ = ("_call", "after")

    def __init__(self, call: Dispatch) -> None:
        self._call = call
        self.after: list[Callable[[], Any]] = []
        """Steps that follow the completion of the operation."""

    def source(self, tensor: Tensor) -> Tensor:
        """Returns a tensor that the backend reads in the place of this one."""
        return self._carried(tensor, reads=True, writes=False)

    def target(self, tensor: Tensor) -> Tensor:
        """Returns a tensor that the backend fills in the place of this one."""
        return self._carried(tensor, reads=False, writes=True)

    def in_place(self, tensor: Tensor) -> Tensor:
        """Returns a tensor that the backend reads and fills in the place of this one."""
        return self._carried(tensor, reads=True, writes=True)

    def _carried(self, tensor: Tensor, reads: bool, writes: bool) -> Tensor:
        staging = self._call.staging
        if tensor.requires_grad:
            tensor = tensor.detach()  # messages have no gradients, and may fill leaves
        if writes:
            require_own_memory(tensor)
        if self._call.reaches_cpu if tensor.is_cpu else tensor.device.type in staging.reaches:
            if is_dense(tensor):
                # One number or none may have any stride, but a view as bytes needs stride 1.
                size = tensor.numel()
                return tensor if size > 1 else tensor.view(-1).as_strided((size,), (1,))
            copy = _dense(tensor)
            if writes:
                self.after.append(lambda: _fill(tensor, copy))
            return copy
        dense = _dense(tensor)
        if writes and dense is not tensor:
            self.after.insert(0, lambda: _fill(tensor, dense))
        staged = staging.of([dense])
        assert staged is not None
        if reads:
            staged.fetch()
        self.after.insert(0, staged.put if writes else staged.drop)
        return staged.parts[0]
