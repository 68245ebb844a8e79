"""Counts the bytes of tensors that are alive at once, by what they are for.

    operator --> result --> storage counted as an activation, or as the part it is assigned to
                                    '--> the last tensor on it is gone: counted no more

A mode of torch sees every operator. Scratch memory, which no operator returns, is added while the
operator runs.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from hires.plan.graph import Node
from hires.plan.operators.operator_facts import facts_of

PARTS = ("params", "grads", "optimizer", "activations", "buffers")
"""What memory is for. Every storage is an activation until it is assigned to another part."""
SMALL_ELEMENTS = 20480
"""Largest input of one image that ATen computes without oneDNN (``use_mkldnn``)."""


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes that are alive at once while the mode is active, by what they are for.

    The storage of every tensor that an operator returns counts until the last tensor on it is gone.
    """

    def __init__(self, on_gpu: bool = False) -> None:
        """``on_gpu``: all this would lie on a GPU, else in host memory."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._on_gpu = on_gpu
        self.now = dict.fromkeys(PARTS, 0)  # bytes that are alive, by part
        self.at_peak = dict(self.now)  # the same when their sum was largest
        self._peak = 0
        self.waiting = 0
        """Most that was alive of activations and buffers when the rank waited for others."""
        self._part: dict[int, tuple[str, int]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Runs an operator and counts the storages of its results."""
        results = func(*args, **(kwargs or {}))
        for item in tree_iter(results):
            if isinstance(item, Tensor):
                self._count(item)
        if facts_of(func._opname).copies_weight:
            of_gpu = self._on_gpu
            self._update_peak(_workspace(func, args) if of_gpu else _scratch(func, args, results))
        return results

    @property
    def peak_bytes(self) -> int:
        """The largest sum of all parts so far."""
        return self._peak

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

    def keep_workspaces(self, nodes: Iterable[Node], sizes: Sequence[int]) -> None:
        """Adds what cuBLAS keeps from its first products on; convolutions are those of cuDNN."""
        facts = map(facts_of, {node.kind for node in nodes})
        if self._on_gpu and any(f.multiplies and not f.window for f in facts):
            self.now["workspace"] = sum(sizes)

    def note_wait(self) -> None:
        """Notes what is alive while the rank waits for others."""
        self.waiting = max(self.waiting, self.now["activations"] + self.now["buffers"])

    def forget_peak(self) -> None:
        """Begins a new search for the largest sum."""
        self._peak = self.waiting = 0
        self.note_wait()
        self._update_peak(0)

    def _count(self, tensor: Tensor) -> None:
        if tensor.device.type == "meta":
            return
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._part or not size:  # a view, or the result of an operator in place
            return
        self._part[key] = "activations", size
        self.now["activations"] += size
        # Also while a message is under way: NullBackend's handles keep its tensor.
        weakref.finalize(storage, self._forget, key).atexit = False
        self._update_peak(0)

    def _forget(self, key: int) -> None:
        part, size = self._part.pop(key)
        self.now[part] -= size

    def _update_peak(self, scratch: int) -> None:
        total = sum(self.now.values()) + scratch
        if total > self._peak:
            self._peak = total
            kind = "workspace" if self._on_gpu else "buffers"
            self.at_peak = {**self.now, kind: self.now.get(kind, 0) + scratch}


def _scratch(func: Any, args: tuple[Any, ...], result: Any) -> int:
    # A convolution through oneDNN holds a copy of its weights in oneDNN's own order, forward and
    # for the gradient of its input, and one of the weights' gradient. These come one after the
    # other and no operator of torch makes them, so the weights' size is added while it runs.
    # Without oneDNN every window is written out as a column: not in float64, nor of a small image.
    backward = func is torch.ops.aten.convolution_backward.default
    sum_before = func._overloadname == "binary"
    weight, output = (args[2], args[0]) if backward else (args[1 + sum_before], result)
    x, kernel = args[1] if backward else args[0], tuple(weight.shape[2:])
    large = x.shape[0] > 1 or x.numel() > SMALL_ELEMENTS
    suits = large or weight.dtype != torch.float32 or min(kernel, default=1) > 3
    if suits and weight.dtype != torch.float64:
        return int(weight.nbytes)
    if kernel == (1, 1):
        return 0
    pixels = output.numel() // output.shape[1]
    return int(pixels * weight[0].numel() * weight.element_size())


def _workspace(func: Any, args: tuple[Any, ...]) -> int:
    # cuDNN chooses its algorithms by rules of its own. Those for channels-last maps hold copies of
    # the weights in an order of theirs, and of the weights' gradient in single precision.
    backward = func is torch.ops.aten.convolution_backward.default
    weight = args[2] if backward else args[1]
    return int(weight.nbytes + backward * 4 * weight.numel())
