"""An accelerator in Python: ``device=simulated`` of tests finds tensors on the wrong device.

Every operator computes on the CPU, with its bits, but a tensor of the device cannot be mixed with
one of the host, as beside a GPU. Missing events and memory that is freed too early show, too
(:mod:`tests.helpers.simulated_streams`).

To import this module registers the device; :func:`load` changes torch for good, once in a process.

Source:
    https://github.com/pytorch/pytorch, test/test_privateuseone_python_backend.py.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import backend_registration
from torch.utils._pytree import tree_iter, tree_map

from hires.comm.rehearsal import NullBackend
from hires.core.config.run_config import DEVICE_KINDS
from hires.engine.device import DEVICES, Accelerator
from tests.helpers import simulated_streams
from tests.helpers.simulated_streams import (
    SimulatedEvent,
    SimulatedStream,
    current_stream,
    host_of,
)

NAME = "simulated"
_HOST = torch.device("cpu")
_COPY = torch.ops.aten.copy_.default
_INDEXING = ("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index")
_LOWERED = (
    *("mm", "bmm", "addmm", "addbmm", "baddbmm", "matmul", "linear", "linalg_vecdot", "prelu"),
    *("conv1d", "conv2d", "conv3d", "conv_tbc", "_convolution"),
    *("conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "mkldnn_rnn_layer"),
    *("scaled_dot_product_attention", "_native_multi_head_attention"),
)
_PROMOTED = ("cat", "stack", "index_copy")
"""Operators that autocast computes in less precision, and in the widest type of their operands; all
others that it changes it computes in float32."""


class SimulatedTensor(torch.Tensor):
    """A tensor of the device; ``held`` has its numbers, on the CPU."""

    held: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, held: Tensor) -> SimulatedTensor:
        made: SimulatedTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            held.size(),
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=torch.device(NAME, 0),
        )
        made.held = held
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"{NAME}({self.held!r})"

    @property
    def data(self) -> Any:
        """The tensor without its history; what is assigned takes its place."""
        return torch.Tensor.data.__get__(self)  # type: ignore[attr-defined]

    @data.setter
    def data(self, other: Any) -> None:
        torch.Tensor.data.__set__(self, other)  # type: ignore[attr-defined]
        self.held = other.held

    def tolist(self) -> Any:
        """Returns the numbers, as a tensor of any device does."""
        return self.to(_HOST).tolist()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return _compute(func, args, kwargs or {})


class SimulatedModule:
    """``torch.simulated``: the functions of ``torch.cuda`` that hires, and torch itself, call.

    Its operators draw from the CPU's generator, so it has no states of random numbers.
    """

    Stream = SimulatedStream
    Event = SimulatedEvent

    def is_available(self) -> bool:
        return True

    is_initialized = is_available

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def set_device(self, device: Any) -> None:
        """Does nothing: there is one device."""

    def manual_seed_all(self, seed: int) -> None:
        """Does nothing: the CPU's generator has been seeded."""

    def _is_in_bad_fork(self) -> bool:
        return False

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def current_stream(self, device: Any = None) -> SimulatedStream:
        return current_stream()

    @contextlib.contextmanager
    def stream(self, stream: SimulatedStream) -> Iterator[None]:
        """Gives a stream what this thread computes inside."""
        before = simulated_streams.set_current(stream)
        try:
            yield
        finally:
            simulated_streams.set_current(before)

    def synchronize(self, device: Any = None) -> None:
        """Returns when all streams are done; RuntimeError: memory was freed too early."""
        simulated_streams.synchronize_all()
        if (early := simulated_streams.freed_early()) is not None:
            raise early


_libraries: list[torch.library.Library] = []  # what a library registers lives as long as it does


@DEVICES.register(NAME)
class Simulated(Accelerator):
    """The device of a rank."""

    def __init__(self, local_rank: int) -> None:
        super().__init__(load())

    def host_empty(self, shape: Sequence[int], dtype: torch.dtype, **keys: Any) -> Tensor:
        return simulated_streams.pin(torch.empty(shape, dtype=dtype, **keys))

    def keep_for(self, tensor: Tensor, stream: Any) -> None:
        simulated_streams.keep_for(tensor, stream)


if NAME not in DEVICE_KINDS:
    DEVICE_KINDS.append(NAME)
NullBackend.devices += (NAME,)  # which reads and writes nothing


def is_loaded() -> bool:
    """Whether torch has the device in this process."""
    return bool(_libraries)


def load() -> torch.device:
    """Registers the device, once in a process, and returns it."""
    if not _libraries:
        backend_registration._setup_privateuseone_for_python_backend(NAME, SimulatedModule())
        # Operators without a tensor of the device among their operands: factories.
        factories = torch.library.Library("_", "IMPL")  # type: ignore[no-untyped-call]
        factories.fallback(  # type: ignore[no-untyped-call]
            lambda func, *args, **kwargs: _compute(func, args, kwargs), "PrivateUse1"
        )
        factories.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")  # type: ignore[no-untyped-call]
        copies = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
        copies.impl("_copy_from", _copy_from, "PrivateUse1")  # type: ignore[no-untyped-call]
        _libraries.extend((factories, copies, _autocast()))
        for name in ("backward", "grad"):
            setattr(torch.autograd, name, _raising(getattr(torch.autograd, name)))
    return torch.device(NAME, 0)


def _autocast() -> torch.library.Library:
    # Operators change their types as they do on the CPU.
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    for full_name in torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCPU"):
        name = full_name.removeprefix("aten::")
        if name != full_name:
            kind, _, overload = name.partition(".")
            function = getattr(getattr(torch.ops.aten, kind), overload or "default")
            library.impl(name, _with_casts(function, kind), "AutocastPrivateUse1")  # type: ignore[no-untyped-call]
    return library


def _with_casts(function: Any, kind: str) -> Callable[..., Any]:
    key = torch._C._parse_dispatch_key("AutocastPrivateUse1")
    assert key is not None
    own_key = torch._C.DispatchKeySet(key)

    def run(*args: Any, **kwargs: Any) -> Any:
        wanted = torch.get_autocast_dtype(NAME)
        if kind in _PROMOTED:
            given = {t.dtype for t in tree_iter((args, kwargs)) if _can_be_cast(t)}
            wanted = torch.float32 if torch.float32 in given else wanted
        elif kind not in _LOWERED:
            wanted = torch.float32
        with torch._C._ExcludeDispatchKeyGuard(own_key):
            args, kwargs = tree_map(
                lambda t: t.to(wanted) if _can_be_cast(t) else t, (args, kwargs)
            )
            return function(*args, **kwargs)

    return run


def _can_be_cast(item: Any) -> bool:
    real = isinstance(item, SimulatedTensor) and item.is_floating_point()
    return real and item.dtype != torch.float64


def _compute(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    operands: list[Tensor] = []
    devices: list[torch.device] = []
    host_args = [_on_host(arg, operands, devices) for arg in args]
    host_kwargs = {key: _on_host(arg, operands, devices) for key, arg in kwargs.items()}
    _require_one_device(func, operands, args)
    if (early := simulated_streams.freed_early()) is not None:
        _raise_later(early)
    stream = current_stream()
    simulated_streams.note_use([t for t in operands if isinstance(t, SimulatedTensor)], stream)
    if func is _COPY and _may_be_late(*args, **kwargs):
        stream.begin(host_args[0], host_args[1])
        return args[0]
    stream.finish()
    makes_own = devices[0].type == NAME if devices else True
    changed = {id(host_of(one)): one for one in operands}  # an operator in place returns an operand
    return _wrapped(func(*host_args, **host_kwargs), changed, makes_own)


# These two call themselves, so they are no closures: a cycle would keep the operands' memory.
def _on_host(item: Any, operands: list[Tensor], devices: list[torch.device]) -> Any:
    # As tree_map, but operators have only lists inside their arguments, and it is slow.
    if isinstance(item, Tensor):
        operands.append(item)
        return item.held if isinstance(item, SimulatedTensor) else item
    if isinstance(item, (list, tuple)):
        return [_on_host(one, operands, devices) for one in item]
    if isinstance(item, torch.device):
        devices.append(item)
        return _HOST
    return item


def _wrapped(item: Any, changed: dict[int, Tensor], makes_own: bool) -> Any:
    if isinstance(item, (list, tuple)):
        return type(item)(_wrapped(one, changed, makes_own) for one in item)
    if not isinstance(item, Tensor):
        return item
    if id(item) in changed:
        return changed[id(item)]
    if not makes_own:
        return item
    simulated_streams.note_home(item)
    return SimulatedTensor(item)


def _copy_from(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    # What torch.tensor() ends in, which keeps Python's tensors out of its copy.
    copied: Tensor = _compute(_COPY, (target, source, non_blocking), {})
    return copied


def _require_one_device(func: Any, operands: list[Tensor], args: tuple[Any, ...]) -> None:
    # As beside a GPU: a tensor of the host may be an index, or one number of an operator that goes
    # from element to element.
    if func is _COPY:
        return
    kind = func._schema.name.removeprefix("aten::")
    indices = {id(index) for index in args[1]} if kind in _INDEXING else set()
    takes_numbers = bool(indices) or torch.Tag.pointwise in func.tags
    for one in operands:
        is_number = takes_numbers and one.dim() == 0
        if not (isinstance(one, SimulatedTensor) or id(one) in indices or is_number):
            _raise_later(
                RuntimeError(
                    f"{kind} got tensors of two devices, {NAME}:0 and {one.device}: that of the "
                    f"shape {list(one.shape)} is on the host"
                )
            )


def _raise_later(error: RuntimeError) -> None:
    # At once, if no backward pass runs.
    if torch._C._current_graph_task_id() == -1:
        raise error
    _errors.append(error)


_errors: list[RuntimeError] = []  # of the backward pass that runs now


def _raising(run: Callable[..., Any]) -> Callable[..., Any]:
    # Errors of a backward pass come when it is over: inside one, torch asks Python for the device
    # while the error is under way, and that ends the process.
    @functools.wraps(run)
    def run_and_raise(*args: Any, **kwargs: Any) -> Any:
        if torch._C._current_graph_task_id() != -1:  # inside another backward pass
            return run(*args, **kwargs)
        _errors.clear()
        made = run(*args, **kwargs)
        for error in _errors:
            raise error
        return made

    return run_and_raise


def _may_be_late(target: Tensor, source: Tensor, non_blocking: bool = False) -> bool:
    host = source if isinstance(target, SimulatedTensor) else target
    return non_blocking and simulated_streams.is_pinned(host)
