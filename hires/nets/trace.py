"""Traces any network to a graph of ATen operations.

``torch.export`` runs the forward pass once without data and records the operations, so modules and
functional calls look alike, sizes computed from other tensors become numbers, and Python control
flow that depends on shapes is resolved. Nothing is allocated:

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
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._functorch import config as functorch_config
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import ExportedProgram
from torch.fx import config as fx_config
from torch.nn.modules.module import register_module_buffer_registration_hook
from torch.overrides import TorchFunctionMode

from hires.core.config.run_config import RunConfig
from hires.core.errors import ConfigError
from hires.nets.build_network import build_model
from hires.nets.custom import error_line, own_line, without_checkpoints
from hires.nets.graph_export import COUNTER, GraphWriter
from hires.nets.refusals import refuse_gradient_hooks, refuse_means_of_all, traceable
from hires.plan.graph import Graph

LOUD = ("_subclasses.fake_tensor", "fx.experimental.symbolic_shapes")
"""Modules of torch that print what goes wrong in a trace."""


def trace(
    model: nn.Module,
    input_shape: list[int],
    training: bool | None,
    dtype: torch.dtype = torch.float32,
    trusted: bool = False,
) -> Graph:
    """Returns the graph of one forward pass of a module, which is left as it was.

    It takes one microbatch of images, (n, C, H, W), and returns one tensor; ConfigError: why it
    cannot be traced. ``training``: whether it trains; None: each of its modules stays in its mode.
    ``dtype`` is that of images, parameters and buffers. ``trusted``: it may do what no graph holds
    (:mod:`hires.nets.refusals`).
    """
    refuse_means_of_all(model, training)
    assigned: dict[str, Tensor] = {}
    try:
        exported = export_network(model, input_shape, training, dtype, assigned, trusted)
    except ConfigError:
        raise
    except Exception as error:  # torch.export raises whatever the forward pass raises
        raise ConfigError(
            f"the network's forward pass on an input of {input_shape} failed or cannot be traced: "
            f"{_reason(error)}{own_line(error)}"
        ) from error
    # torch lists a tensor of several names under the first.
    first: dict[int, str] = {}
    every = {
        name: tensor
        for named in (model.named_parameters, model.named_buffers)
        for name, tensor in named(remove_duplicate=False)
    }
    names = {name: first.setdefault(id(tensor), name) for name, tensor in every.items()}
    tensors = {name: tensor for name, tensor in every.items() if names[name] == name}
    return GraphWriter(exported, tensors, names, assigned).write(input_shape)


def trace_config(config: RunConfig, model: nn.Module | None = None) -> Graph:
    """Returns the graph of the network and microbatch that a config describes.

    ``model`` is its network, built if it is left out. ConfigError: it cannot be traced.
    """
    samples, size = max(1, config.batch // config.parallel.pieces), (config.height, config.width)
    model = build_model(config.model, config.seed, size) if model is None else model
    training, dtype = config.task.name == "train", getattr(torch, config.image_type)
    if training and not config.model.trusted:
        refuse_gradient_hooks(model)
    shape = [samples, config.model.channels, *size]
    return trace(model, shape, training, dtype, config.model.trusted)


@contextlib.contextmanager
def _assignments(assigned: dict[str, Tensor], model: nn.Module) -> Iterator[None]:
    # Collects what a forward pass assigns to buffers, which torch.export may drop.
    paths = {module: path for path, module in model.named_modules()}

    def keep(module: nn.Module, name: str, buffer: Tensor | None) -> None:
        if module in paths and name != COUNTER and buffer is not None:
            assigned[f"{paths[module]}.{name}".lstrip(".")] = buffer

    handle = register_module_buffer_registration_hook(keep)
    try:
        yield
    finally:
        handle.remove()


def _reason(error: Exception) -> str:
    text = error_line(error)
    if "data-dependent" in text or "DataDependent" in text:
        return (
            "its control flow depends on the values of tensors, as that of `if x.mean() > 0:`; "
            "compute both sides and choose with torch.where(condition, a, b)"
        )
    if "Cannot view a tensor" in text or "view size is not compatible" in text:
        return f"{text}; torch itself refuses it for a tensor that lies so: use reshape"
    if "more than 1 value per channel" in text:
        return f"{text}; a larger batch, fewer microbatches or a larger image give it more"
    return text


def export_network(
    model: nn.Module,
    input_shape: list[int],
    training: bool | None,
    dtype: torch.dtype,
    assigned: dict[str, Tensor],
    trusted: bool = False,
) -> ExportedProgram:
    """Returns the operations of one forward pass on images (n, C, H, W) of a type.

    The module is left as it was; ``assigned`` gets what the forward pass assigns to buffers. Raises
    whatever it raises, and ConfigError for what no graph holds, unless it is ``trusted``.
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
    # A checkpointed part (``use_reentrant=True``) would have no gradient.
    calls = without_checkpoints(), _TraceableCalls()
    with warnings.catch_warnings(), tracing(TracingContext(fakes)), calls[0], calls[1], guard:
        warnings.simplefilter("ignore")
        # Where in Python each operation stands is not needed: a fifth of the time of a trace.
        no_stacks = mock.patch.object(fx_config, "do_not_emit_stack_traces", True, create=True)
        with _assignments(assigned, copied), _quiet(), no_stacks:
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


_GET_DATA = Tensor.data.__get__  # type: ignore[attr-defined]


class _TraceableCalls(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        func = Tensor.detach if func == _GET_DATA else func  # else it would become a constant
        if func is Tensor.random_ and (len(args) > 2 or "from" in (kwargs or {})):
            # An overload that has the name of a keyword, with which a program is no Python.
            raise ConfigError("the network calls random_(from, to); use torch.randint")
        return func(*args, **(kwargs or {}))
