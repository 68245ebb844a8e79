"""Replaces tensors that a backend cannot take by dense ones in its reach."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from hires.comm.dispatch import Dispatch


def is_dense(tensor: Tensor) -> bool:
    """Whether a tensor is contiguous, and neither lazily negated nor conjugated."""
    return tensor.is_contiguous() and not (tensor.is_neg() or tensor.is_conj())


def needs_none(call: Dispatch, tensor: Tensor) -> bool:
    """Whether the backend takes a tensor as it is: the quick answer, for the host's memory."""
    is_near = call.reaches_cpu and tensor.is_cpu and not tensor.requires_grad
    return is_near and tensor.numel() > 1 and is_dense(tensor)


def _dense(tensor: Tensor) -> Tensor:
    return tensor.resolve_conj().resolve_neg().contiguous()


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
        if self._call.reaches_cpu if tensor.is_cpu else tensor.device.type in staging.reaches:
            if is_dense(tensor):
                # One number or none may have any stride, but a view as bytes needs stride 1.
                size = tensor.numel()
                return tensor if size > 1 else tensor.view(-1).as_strided((size,), (1,))
            copy = _dense(tensor)
            if writes:
                self.after.append(lambda: tensor.copy_(copy))
            return copy
        dense = _dense(tensor)
        if writes and dense is not tensor:
            self.after.insert(0, lambda: tensor.copy_(dense))
        staged = staging.of([dense])
        assert staged is not None
        if reads:
            staged.fetch()
        self.after.insert(0, staged.put if writes else staged.drop)
        return staged.parts[0]
