"""Counts the bytes that are alive at once while some code runs, by what they are for.

A mode of torch's dispatcher sees every tensor that an operator returns and counts its storage until
the last tensor that uses it is gone. Real tensors count like those of ``FakeTensorMode``, so a
program can be measured that fits into no memory.
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
"""What memory is for. Every storage is an activation until it is assigned to another part."""

SMALL_ELEMENTS = 20480
"""Largest input of one image that ATen computes without oneDNN (``use_mkldnn``)."""


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
        """Runs an operator and counts the storages of its results."""
        results = func(*args, **(kwargs or {}))
        for item in tree_iter(results):
            if isinstance(item, Tensor):
                self._count(item)
        scratch = _scratch_bytes(func, args, results)
        if scratch:
            self._update_peak(scratch)
        return results

    def assign(self, tensors: Iterable[Tensor | None], part: str) -> None:
        """Moves the storages of tensors to a part; new ones are counted now."""
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
        """Begins a new search for the largest sum."""
        self._peak = 0
        self._update_peak(0)

    def _count(self, tensor: Tensor) -> None:
        if tensor.device.type == "meta":
            return
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._part or not size:
            return
        self._part[key] = "activations", size
        self.now["activations"] += size
        weakref.finalize(storage, self._forget, key).atexit = False
        self._update_peak(0)

    def _forget(self, key: int) -> None:
        """Subtracts a storage that is gone."""
        part, size = self._part.pop(key)
        self.now[part] -= size

    def _update_peak(self, scratch: int) -> None:
        """Keeps the parts of this moment if it is the fullest so far."""
        total = sum(self.now.values()) + scratch
        if total > self._peak:
            self._peak = total
            self.at_peak = {**self.now, "buffers": self.now["buffers"] + scratch}


def _scratch_bytes(func: Any, args: tuple[Any, ...], result: Any) -> int:
    """Returns what a convolution allocates beside its result while it runs."""
    if not facts_of(func._opname).copies_weight:
        return 0
    backward = func is torch.ops.aten.convolution_backward.default
    weight, output = (args[2], args[0]) if backward else (args[1], result)
    if not _uses_onednn(args[1] if backward else args[0], weight):
        if tuple(weight.shape[2:]) == (1, 1):
            return 0
        pixels = output.numel() // output.shape[1]
        return int(pixels * weight[0].numel() * weight.element_size())
    return int(weight.numel() * weight.element_size())


def _uses_onednn(x: Tensor, weight: Tensor) -> bool:
    """Whether ATen computes a convolution with oneDNN: not in float64, nor of one small image."""
    if weight.dtype == torch.float64:
        return False
    large = x.shape[0] > 1 or x.numel() > SMALL_ELEMENTS
    return large or weight.dtype != torch.float32 or min(weight.shape[2:], default=1) > 3
