"""The device of a rank: everything that differs between the CPU and an accelerator is here.

``device`` names it; another kind is a class here, registered under its name. A rank has one:

    place      tensors of the rank: weights, constants, images, what messages fill
    uploads    microbatches, copied from pinned memory while the rank computes
    clock      of the time line: when the device did what it was given, not when it was given
    memory     peak of what tensors needed, and what the whole device holds

All other modules take the device from their operands, or from ``Context.device``.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from hires.core.config.run_config import RunConfig
from hires.core.errors import ConfigError
from hires.core.ranks.timeline import HostClock
from hires.core.registry import Registry

T = TypeVar("T", bound=Tensor)
Dtype = torch.dtype
HOST = torch.device("cpu")
DEVICES: Registry[Callable[[int], RankDevice]] = Registry("device")
"""``device`` -> opens it for the rank of a number among those of its machine."""


def open_device(name: str, local_rank: int) -> RankDevice:
    """Returns the device of a rank; ConfigError: this machine does not have it."""
    return DEVICES[name](local_rank)


@contextlib.contextmanager
def arithmetic_restored() -> Iterator[None]:
    """Leaves what :meth:`RankDevice.set_arithmetic` changes for all of a process as it was."""
    of_products = "tf32", "fp16_reduced_precision_reduction", "bf16_reduced_precision_reduction"
    settings: list[tuple[Any, str]] = [
        *((torch.backends.cuda.matmul, f"allow_{name}") for name in of_products),
        *((torch.backends.cudnn, name) for name in ("deterministic", "allow_tf32")),
    ]
    before = [getattr(*setting) for setting in settings]
    try:
        yield
    finally:
        for setting, value in zip(settings, before, strict=True):
            setattr(*setting, value)


def prepare_arithmetic(config: RunConfig, device: RankDevice, rank: int) -> None:
    """Lets a device use TF32 or forbids it; ConfigError: it has none."""
    name = config.precision.name
    if name == "tf32" and not device.has_tf32:
        raise ConfigError(
            f"precision=tf32 needs NVIDIA GPUs of compute capability 8 or above, and rank {rank} "
            f"has none; use precision=fp32"
        )
    device.set_tf32(name == "tf32")


def to_host(tensor: Tensor) -> Tensor:
    """Returns a tensor on the host: itself, or a copy of the same strides."""
    return tensor.detach().to(HOST)


class RankDevice:
    """A device, and what a rank does with it; this one is the CPU."""

    torch = HOST  # as torch names it
    has_tf32 = False
    """Whether float32 products may be computed in TF32."""

    def place(self, tensor: T) -> T:
        """Returns a tensor, perhaps a parameter, on the device, of the same strides."""
        if tensor.device == self.torch:
            return tensor
        moved = tensor.detach().to(self.torch)
        if isinstance(tensor, nn.Parameter):
            moved = nn.Parameter(moved, requires_grad=tensor.requires_grad)
        return moved  # type: ignore[return-value]

    def place_module(self, module: nn.Module) -> nn.Module:
        """Moves the parameters and buffers of a module to the device; returns it."""
        return module.to(self.torch)

    def host_empty(self, shape: Sequence[int], dtype: Dtype, **keys: Any) -> Tensor:
        """Returns a tensor of the host without numbers, from which the device copies fastest."""
        return torch.empty(shape, dtype=dtype, **keys)

    def autocast(self, dtype: Dtype | None) -> contextlib.AbstractContextManager[Any]:
        """Returns a context that lowers matrix products to a type, if it is one."""
        return torch.autocast(self.torch.type, dtype=dtype, enabled=dtype is not None)

    def set_arithmetic(self) -> None:
        """Sets for this process how products and sums are computed on the device."""

    def set_tf32(self, allowed: bool) -> None:
        """Allows float32 products in TF32, or forbids them, as it is at first."""
        assert not allowed or self.has_tf32, "this device has no TF32"

    def synchronize(self) -> None:
        """Returns when the device has done all that it was given."""

    def clock(self) -> HostClock:
        """Returns what the time line reads."""
        return HostClock()

    def uploads(self) -> Uploads | None:
        """Returns what moves microbatches to the device; None: they are there."""
        return None

    def reset_peak(self) -> None:
        """Begins a new search for the largest memory."""

    def memory(self) -> dict[str, int]:
        """Returns what an accelerator needed, in bytes; nothing of the CPU.

        ``peak_bytes`` of tensors and ``reserved_bytes`` of the allocator, at most; of the whole
        device, for all processes, ``used_bytes`` now, of ``total_bytes``.
        """
        return {}


DEVICES.register("cpu")(lambda local_rank: RankDevice())


class Accelerator(RankDevice):
    """A device with memory and streams of its own, as ``torch.cuda`` describes them."""

    def __init__(self, device: torch.device) -> None:
        self.torch = device
        self.module: Any = torch.get_device_module(device)

    def synchronize(self) -> None:
        """Returns when the device has done all that it was given."""
        self.module.synchronize(self.torch)

    def clock(self) -> HostClock:
        """Returns the times of events on the device's stream."""
        return EventClock(self)

    def uploads(self) -> Uploads:
        """Returns what moves microbatches to the device, for one loader."""
        return Uploads(self)

    def keep_for(self, tensor: Tensor, stream: Any) -> None:
        """Keeps the memory of a tensor until a stream that uses it, too, has done so."""
        raise NotImplementedError


@DEVICES.register("cuda")
class Cuda(Accelerator):
    """An NVIDIA GPU: of those that the rank sees, in turn."""

    def __init__(self, local_rank: int) -> None:
        if not torch.cuda.is_available():
            why = "torch is built for CPUs" if torch.version.cuda is None else "torch finds no GPU"
            raise ConfigError(f"device=cuda: {why}; `hires doctor` says more, or use device=cpu")
        super().__init__(torch.device("cuda", local_rank % torch.cuda.device_count()))
        torch.cuda.set_device(self.torch)
        self.has_tf32 = torch.cuda.get_device_capability(self.torch) >= (8, 0)
        self.set_arithmetic()

    def set_arithmetic(self) -> None:
        """Lets fp32 be fp32, and repeated runs compute the same bits, as far as cuDNN chooses."""
        self.set_tf32(False)
        torch.backends.cudnn.deterministic = True
        # Parts of a product are added in fp32, as the bounds of `hires verify` say.
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False

    def host_empty(self, shape: Sequence[int], dtype: Dtype, **keys: Any) -> Tensor:
        """Returns a tensor in pinned memory."""
        return torch.empty(shape, dtype=dtype, pin_memory=True, **keys)

    def set_tf32(self, allowed: bool) -> None:
        """Allows float32 products in TF32, or forbids them, as it is at first."""
        super().set_tf32(allowed)
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = allowed

    def reset_peak(self) -> None:
        """Begins a new search for the largest memory."""
        torch.cuda.reset_peak_memory_stats(self.torch)

    def memory(self) -> dict[str, int]:
        """Returns what the allocator gave out and reserved at most, and what the GPU holds now."""
        free, total = torch.cuda.mem_get_info(self.torch)
        return {
            "peak_bytes": int(torch.cuda.max_memory_allocated(self.torch)),
            "reserved_bytes": int(torch.cuda.max_memory_reserved(self.torch)),
            "used_bytes": total - free,
            "total_bytes": total,
        }

    def keep_for(self, tensor: Tensor, stream: Any) -> None:
        """Keeps the memory of a tensor until a stream that uses it, too, has done so."""
        tensor.record_stream(stream)


class EventClock(HostClock):
    """Times on a device, which the host is ahead of: of events, marks in this thread's stream."""

    def __init__(self, device: Accelerator) -> None:
        self._device = device

    def begin_step(self) -> tuple[Any, float]:
        """Returns the mark of a step's begin, and its time, when all earlier work is done."""
        self._device.synchronize()
        return self.now(), time.perf_counter()

    def now(self) -> Any:
        """Returns the mark of this place in the stream."""
        event = self._device.module.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, begin: Any, mark: Any) -> float:
        """Returns the time from one mark to a later one in s."""
        self._device.synchronize()
        return 1e-3 * float(begin.elapsed_time(mark))


class Uploads:
    """Copies tensors from pinned memory to a device, on a stream of its own.

        thread of the loader    read k+1 | begin            read k+2 | begin
        copy stream                        copy k+1 . event            copy k+2 . event
        compute stream          compute k ............... wait | compute k+1 ........

    The memory of a copied tensor belongs to the copy stream, so the compute stream is named to the
    allocator, too. Pinned memory is kept by torch until its copy is done.
    """

    def __init__(self, device: Accelerator) -> None:
        self._device, self._stream = device, device.module.Stream()

    def begin(self, tensors: Sequence[Tensor | None]) -> tuple[list[Tensor | None], Any]:
        """Begins to copy tensors; returns them on the device, and an event behind the copies."""
        target = self._device.torch
        with self._device.module.stream(self._stream):
            moved = [None if t is None else t.to(target, non_blocking=True) for t in tensors]
            event = self._device.module.Event()
            event.record(self._stream)
        return moved, event

    def finish(self, moved: Sequence[Tensor | None], event: Any) -> None:
        """Lets what this thread computes from now on wait for the copies."""
        computes = self._device.module.current_stream(self._device.torch)
        computes.wait_event(event)
        for tensor in (one for one in moved if one is not None):
            self._device.keep_for(tensor, computes)
