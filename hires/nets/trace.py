"""Traces any network to a graph of ATen operations.

``torch.export`` runs the forward pass once without data and records the operations, so modules and
functional calls look alike, sizes computed from other tensors become numbers, and Python control
flow that depends on shapes is resolved. Nothing is allocated.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_buffer_registration_hook

from hires.core.config.run_config import RunConfig
from hires.core.errors import ConfigError
from hires.nets.build_network import build_model
from hires.nets.custom import error_line, own_line
from hires.nets.fake_network import export_network
from hires.nets.graph_export import COUNTER, GraphWriter
from hires.nets.refusals import refuse_gradient_hooks, refuse_means_of_all
from hires.plan.graph import Graph


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
    watched = functools.partial(_assignments, assigned)
    try:
        exported = export_network(model, input_shape, training, dtype, watched, trusted)
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
    samples = max(1, config.batch // config.parallel.pieces)
    model = (
        build_model(config.model, config.seed, (config.height, config.width))
        if model is None
        else model
    )
    training, dtype = config.task.name == "train", getattr(torch, config.image_type)
    if training and not config.model.trusted:
        refuse_gradient_hooks(model)
    shape = [samples, config.model.channels, config.height, config.width]
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
