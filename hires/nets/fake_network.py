"""Exports a network's forward pass without memory: its parameters and images are fake CPU tensors.

    network  --copy-->  the same modules, parameters and buffers without numbers
                        constants (tensors held as attributes) with their numbers
             --torch.export-->  ATen operations of one forward pass

Fake tensors lie on the CPU, so that a forward pass may make tensors of its own without a device.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._functorch import config as functorch_config
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import ExportedProgram
from torch.fx import config as fx_config
from torch.overrides import TorchFunctionMode

from hires.core.errors import ConfigError
from hires.nets.network_call import without_checkpoints
from hires.nets.refusals import traceable

LOUD = ("_subclasses.fake_tensor", "fx.experimental.symbolic_shapes")
"""Modules of torch that print what goes wrong in a trace."""


def export_network(
    model: nn.Module,
    input_shape: list[int],
    training: bool | None,
    dtype: torch.dtype,
    watched: Callable[[nn.Module], contextlib.AbstractContextManager[None]],
    trusted: bool = False,
) -> ExportedProgram:
    """Returns the operations of one forward pass on images (n, C, H, W) of a type.

    The module is left as it was. ``watched`` makes a context around the forward pass of its copy.
    Raises whatever the forward pass raises, and ConfigError for what no graph holds, unless it is
    ``trusted``.
    """
    # A third of the start of a rank that traces nothing: it brings sympy.
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    with functorch_config.patch(fake_tensor_allow_unsafe_data_ptr_access=False):
        fakes = FakeTensorMode(
            shape_env=ShapeEnv(tracked_fakes=[]), allow_non_fake_inputs=True, export=True
        )
    copied = _fake_copy(model, fakes, dtype)
    if training is not None:
        copied.train(training)
    with fakes:
        images = torch.empty(input_shape, dtype=dtype)
    guard = contextlib.nullcontext() if trusted else traceable(copied, copied.training)
    with warnings.catch_warnings(), tracing(TracingContext(fakes)), _plain_calls(), guard:
        warnings.simplefilter("ignore")
        # Where in Python each operation stands is not needed: a fifth of the time of a trace.
        no_stacks = mock.patch.object(fx_config, "do_not_emit_stack_traces", True, create=True)
        with watched(copied), _quiet(), no_stacks:
            return torch.export.export(copied, (images,), strict=False)


def _fake_copy(model: nn.Module, fakes: FakeTensorMode, dtype: torch.dtype) -> nn.Module:
    copies: dict[int, Any] = {}
    with fakes:
        for tensor in (*model.parameters(), *model.buffers()):
            kind = dtype if tensor.is_floating_point() else tensor.dtype
            blank = torch.empty_strided(tensor.shape, tensor.stride(), dtype=kind)
            if isinstance(tensor, nn.Parameter):
                blank = nn.Parameter(blank, requires_grad=tensor.requires_grad)
            copies[id(tensor)] = blank
    with _CopiedConstants(dtype):
        return copy.deepcopy(model, copies)


class _CopiedConstants(TorchFunctionMode):
    # Copies of other tensors keep their numbers and lose their history, with which torch refuses.
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is not Tensor.__deepcopy__:
            return func(*args, **(kwargs or {}))
        tensor, copies = args
        kind = self.dtype if tensor.is_floating_point() else tensor.dtype
        copies[id(tensor)] = tensor.detach().to(kind, copy=True)
        return copies[id(tensor)]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    # Keeps torch from printing the error, which the caller answers in one line, and its trace.
    loggers = [logging.getLogger(f"torch.{name}") for name in LOUD]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


@contextlib.contextmanager
def _plain_calls() -> Iterator[None]:
    # What torch.export would lose or turn into something else: ``tensor.data`` would become a
    # constant, and a checkpointed part (``use_reentrant=True``) would have no gradient.
    with without_checkpoints(), _TraceableCalls():
        yield


_GET_DATA = Tensor.data.__get__  # type: ignore[attr-defined]


class _TraceableCalls(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        func = Tensor.detach if func == _GET_DATA else func
        if func is Tensor.random_ and (len(args) > 2 or "from" in (kwargs or {})):
            # An overload that has the name of a keyword, with which a program is no Python.
            raise ConfigError("the network calls random_(from, to); use torch.randint")
        return func(*args, **(kwargs or {}))
