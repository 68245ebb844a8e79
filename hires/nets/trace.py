"""Traces any network to a graph of ATen operations.

``torch.export`` runs the forward pass once without data and records the operations, so modules and
functional calls look alike, sizes computed from other tensors become numbers, and Python control
flow that depends on shapes is resolved. Nothing is allocated.

The front end, which imports no torch, runs ``python -m hires.nets.trace`` as a process: a request
``{"trace": config}`` is one line of JSON on standard input, the reply ``{"graph": ...}`` or
``{"error": ...}`` one line on standard output.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_buffer_registration_hook

from hires.core.config.run_config import RunConfig, from_dict
from hires.core.errors import ConfigError, HiresError
from hires.nets.build_network import build_model
from hires.nets.graph_export import COUNTER, GraphWriter, written
from hires.nets.network_sources import noting_imports, source_hashes
from hires.plan.graph import Graph

LARGER = (2, 4)
"""Factors by which an image is enlarged to find out whether a network refuses only its size."""

Answer = Callable[[dict[str, Any]], dict[str, Any]]
"""Answers one request of the front end."""


def trace(model: nn.Module, input_shape: list[int], training: bool) -> Graph:
    """Returns the graph of one forward pass.

    Args:
        model: any module of one image tensor that returns one tensor; it is left as it was.
        input_shape: (n, C, H, W) of one microbatch.
        training: whether norms use the batch's statistics and dropout drops.

    Raises:
        ConfigError: the module cannot be traced; the message tells why.
    """
    images = torch.empty(input_shape, device="meta")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            copied = copy.deepcopy(model).to("meta").train(training)
            with _refused_assignments(copied):
                exported = torch.export.export(copied, (images,), strict=False)
    except ConfigError:
        raise
    except Exception as error:  # torch.export raises whatever the forward pass raises
        raise ConfigError(
            f"the network's forward pass on an input of {input_shape} failed or cannot be traced: "
            f"{_reason(error)}"
        ) from error
    names = _first_names(model.named_parameters(remove_duplicate=False))
    names |= _first_names(model.named_buffers(remove_duplicate=False))
    every: dict[str, Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return GraphWriter(exported, every, names, input_shape).write()


def trace_config(config: RunConfig) -> Graph:
    """Returns the graph of the network and microbatch that a config describes."""
    pieces = config.parallel.pieces
    samples = max(1, config.batch // pieces)
    with noting_imports():
        model = build_model(config.model, config.seed)
    shape = [samples, config.model.channels, config.height, config.width]
    training = config.task.name == "train"
    try:
        return trace(model, shape, training)
    except ConfigError as error:
        works = _larger_image(model, shape, training)
        raise ConfigError(f"{error}{f'; {works} works' if works else ''}") from error


def _larger_image(model: nn.Module, shape: list[int], training: bool) -> str:
    """Returns a larger size of image that the network accepts, or nothing."""
    samples, channels, *size = shape
    for factor in LARGER:
        height, width = (factor * length for length in size)
        try:
            trace(model, [samples, channels, height, width], training)
        except ConfigError:
            continue
        return f"image={height}" if height == width else f"image=[{height},{width}]"
    return ""


def main(answers: dict[str, Answer] | None = None) -> int:
    """Answers the front end until its input ends; requests and replies are one line of JSON each.

    All other output, of a user's network or of a library below Python, goes to standard error.

    Args:
        answers: by the name of the request, as ``{name: value}``; unset: ``trace`` only.
    """
    functions = answers or {"trace": answer}
    with os.fdopen(os.dup(1), "w") as output:
        os.dup2(2, 1)
        for line in sys.stdin:
            [(name, values)] = json.loads(line).items()
            output.write(json.dumps(functions[name](values)) + "\n")
            output.flush()
    return 0


def answer(values: dict[str, Any]) -> dict[str, Any]:
    """Returns the graph of a config with its sources, or the error that its user should read."""
    try:
        config = from_dict(values)
        graph = trace_config(config).to_dict()
        sources = source_hashes() if config.model.name == "custom" else {}
        return {"graph": graph, "sources": sources}
    except HiresError as error:
        return {"error": {"type": type(error).__name__, "text": str(error)}}


@contextlib.contextmanager
def _refused_assignments(model: nn.Module) -> Iterator[None]:
    """Refuses a forward pass that assigns to a buffer, which torch.export may silently drop."""
    paths = {module: path for path, module in model.named_modules()}

    def refuse(module: nn.Module, name: str, buffer: Tensor | None) -> None:
        if module in paths and name != COUNTER:
            raise written(f"{paths[module]}.{name}".lstrip("."))

    handle = register_module_buffer_registration_hook(refuse)
    try:
        yield
    finally:
        handle.remove()


def _first_names(named: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
    """Returns for every name of a tensor its first name, under which torch lists it.

    On the meta device two names of one tensor become two tensors.
    """
    first: dict[int, str] = {}
    return {name: first.setdefault(id(tensor), name) for name, tensor in named}


def _reason(error: Exception) -> str:
    """Returns the reason why a forward pass could not be traced, in one line."""
    lines = str(error).strip().splitlines()
    text = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    if "same device" in text:
        return (
            "it uses a tensor that is neither parameter nor buffer; register it with "
            "register_buffer, or make it with device=x.device"
        )
    if "data-dependent" in text:
        return f"its control flow depends on the values of tensors ({text})"
    return text


if __name__ == "__main__":
    sys.exit(main())
