"""How many bytes are alive at once while some code runs, and what are they for?

A mode of torch's dispatcher sees every tensor that an operator makes and counts its storage until
the last tensor that uses it is gone. It counts real tensors and those of ``FakeTensorMode`` alike,
so a program can be measured that would not fit into any memory.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from hires.plan.operators.operator_facts import facts_of

PARTS = ("params", "grads", "optimizer", "activations", "buffers")
"""What memory is for. Everything is an activation until somebody says otherwise."""

SMALL_ELEMENTS = 20480
"""Numbers in one image up to which ATen (``use_mkldnn`` in Convolution.cpp) does without oneDNN."""


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the storages that operators make while the mode is active.

    A convolution through oneDNN holds a copy of its weights in oneDNN's own order, forward and for
    the gradient of its input, and one of the weights' gradient; these come one after the other and
    no operator of torch makes them, so the weights' size is added while a convolution runs. Without
    oneDNN every window is written out as a column.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = dict.fromkeys(PARTS, 0)
        """Bytes that are alive, by part."""
        self.at_peak = dict(self.now)
        """The same at the moment when their sum was largest."""
        self._peak = 0
        self._part: dict[int, tuple[str, int]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Runs an operator and counts what it made."""
        made = func(*args, **(kwargs or {}))
        for item in tree_iter(made):
            if isinstance(item, Tensor):
                self._count(item)
        scratch = _scratch_bytes(func, args, made)
        if scratch:
            self._notice_peak(scratch)
        return made

    def assign(self, tensors: Iterable[Tensor | None], part: str) -> None:
        """Says what tensors are for; those that were never counted are counted now."""
        for tensor in tensors:
            if tensor is not None:
                self._count(tensor)
                key = tensor.untyped_storage()._cdata
                if key in self._part:
                    before, size = self._part[key]
                    self._part[key] = part, size
                    self.now[before] -= size
                    self.now[part] += size

    def forget_peak(self) -> None:
        """Looks for the largest sum from now on."""
        self._peak = 0
        self._notice_peak(0)

    def _count(self, tensor: Tensor) -> None:
        """Counts a tensor's storage, once."""
        if tensor.device.type == "meta":
            return
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._part or not size:
            return
        self._part[key] = "activations", size
        self.now["activations"] += size
        weakref.finalize(storage, self._forget, key).atexit = False
        self._notice_peak(0)

    def _forget(self, key: int) -> None:
        """A storage is gone."""
        part, size = self._part.pop(key)
        self.now[part] -= size

    def _notice_peak(self, scratch: int) -> None:
        """Remembers the moment if it is the fullest so far."""
        total = sum(self.now.values()) + scratch
        if total > self._peak:
            self._peak = total
            self.at_peak = {**self.now, "buffers": self.now["buffers"] + scratch}


def _scratch_bytes(func: Any, args: tuple[Any, ...], made: Any) -> int:
    """Returns what a convolution allocates beside the operators' values while it runs."""
    if not facts_of(func._opname).copies_weight:
        return 0
    backward = func is torch.ops.aten.convolution_backward.default
    weight, output = (args[2], args[0]) if backward else (args[1], made)
    if not _uses_onednn(args[1] if backward else args[0], weight):
        if tuple(weight.shape[2:]) == (1, 1):
            return 0
        pixels = output.numel() // output.shape[1]
        return int(pixels * weight[0].numel() * weight.element_size())
    return int(weight.numel() * weight.element_size())


def _uses_onednn(x: Tensor, weight: Tensor) -> bool:
    """Whether ATen gives a convolution to oneDNN: not in float64, nor one small image alone."""
    if weight.dtype == torch.float64:
        return False
    large = x.shape[0] > 1 or x.numel() > SMALL_ELEMENTS
    return large or weight.dtype != torch.float32 or min(weight.shape[2:], default=1) > 3
