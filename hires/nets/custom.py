"""Imports networks of the user, ``model.target=package.module:function``, and calls them on images.

How a network takes images, and what it returns, are keys of the config:

    model.inputs                      call
    unset                             net(images)
    pixel_values                      net(pixel_values=images)
    [[images]]                        net([images])
    {sample: images, timestep: 10}    net(sample=images, timestep=10)

    network returns                   model.output
    tensor                            unset
    {"out": a, "aux": [b, c]}         out, aux.0 or aux.1
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils import checkpoint

import hires
from hires.core.config.model_config import IMAGES
from hires.core.errors import ConfigError
from hires.core.registry import nearest
from hires.core.units import listed

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
"""What turns colours of a terminal on and off."""
_SHOWN = 8
"""Functions of a module that an error names."""
NEWER_CHECKPOINT = "_checkpoint_without_reentrant_generator"
"""What torch does around a part with ``use_reentrant=False``."""


def custom(
    target: str, args: Mapping[str, Any], inputs: Any = None, output: str | None = None
) -> nn.Module:
    """Returns the module that a function of the Python path or the current folder makes.

    It is called on images alone (:mod:`hires.nets.custom`). ConfigError: the target cannot be
    imported or does not return a torch module.
    """
    key = f"model.target={target!r}"
    net = called(imported(target), key, args)
    if isinstance(net, torch.jit.ScriptModule):
        raise ConfigError(f"{key} returned a ScriptModule; return the plain nn.Module")
    if not isinstance(net, nn.Module):
        raise ConfigError(f"{key} returned {type(net).__name__}, not a torch.nn.Module")
    tensors = [*net.named_parameters(), *net.named_buffers()]
    on_meta = [name for name, tensor in tensors if tensor.is_meta]
    if on_meta:
        raise ConfigError(f"{key} leaves {on_meta[0]} on the meta device; make it on the CPU")
    return on_images(net, inputs, output)


def imported(target: str, key: str = "model.target") -> Callable[..., Any]:
    """Returns the function that a key names; ConfigError: it cannot be imported."""
    # The current folder comes last: a file in it stands for no library (hires.core.programs).
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    module_name, _, name = target.partition(":")
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # importing executes the user's file
        raise ConfigError(
            f"{key}={target!r} cannot be imported: {error_line(error)}; use "
            f"package.module:function of a module on the Python path or below {Path.cwd()}"
        ) from error
    function = getattr(module, name, None)
    if callable(function):
        return function  # type: ignore[no-any-return]
    functions = {key: value for key, value in vars(module).items() if callable(value)}
    own = [k for k, v in functions.items() if getattr(v, "__module__", "") == module.__name__]
    mine, found = (
        Path.cwd() / f"{module_name.replace('.', '/')}.py",
        getattr(module, "__file__", ""),
    )
    hidden = f". {mine} is hidden by {found or module_name}: rename it"
    hits = nearest(name, own)
    offered = f"did you mean {' or '.join(hits)}?" if hits else f"it has {listed(own, _SHOWN)}"
    raise ConfigError(
        f"{key}={target!r}: {module.__name__} has no function {name!r}; {offered}"
        f"{hidden if mine.exists() and str(mine) != found else ''}"
    )


def called(function: Callable[..., Any], key: str, args: Mapping[str, Any], **keys: Any) -> Any:
    """Returns what a function makes of ``model.args`` and other keys; ``key`` is what names it."""
    try:
        inspect.signature(function).bind(**keys, **args)
    except TypeError as error:
        takes = inspect.signature(function)
        raise ConfigError(
            f"model.args={args} do not fit {key}, which takes {takes}: {error}"
        ) from error
    except ValueError:
        pass  # a function without a signature: the call itself checks the arguments
    try:
        return function(**keys, **args)
    except ConfigError:
        raise
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        raise ConfigError(
            f"{key} failed with model.args={args}: {error_line(error)} "
            f"({place.filename}:{place.lineno})"
        ) from error


def error_line(error: BaseException) -> str:
    """Returns an error of the user's code in one line, with the operator that raised it."""
    lines = _COLOUR.sub("", str(error)).strip().splitlines()
    text = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    return " ".join([text, *(f"({note})" for note in getattr(error, "__notes__", []))])


def own_line(error: Exception) -> str:
    """Returns the line of the network's own code, or of the library it is of, that failed."""
    frames = traceback.extract_tb(error.__traceback__)
    folders = Path(torch.__file__).parent, Path(hires.__file__).parent
    own = [f for f in frames if not any(Path(f.filename).is_relative_to(one) for one in folders)]
    own = [frame for frame in own if Path(frame.filename).is_file()]
    return f" at {own[-1].filename}:{own[-1].lineno} ({own[-1].line})" if own else ""


def on_images(net: nn.Module, inputs: Any, output: str | None) -> nn.Module:
    """Makes ``net(images)`` the network's call: images (n, C, H, W) -> one tensor.

    The network itself is changed and returned: its parameters keep their names, and its hooks run.
    ConfigError, when it is called: ``output`` is none of its tensors, or unset where it returns
    several.
    """
    forward: Any = net.forward
    if isinstance(forward, functools.partial) and forward.func is _forward:  # of a call before
        forward = forward.args[0]
    # No closure: a copy of the network calls its own ``forward``.
    call = functools.partial(_forward, forward, inputs, output)
    net.forward = call
    return net


def _forward(forward: Callable[..., Any], inputs: Any, output: str | None, images: Tensor) -> Any:
    args, named = _arguments(inputs, images)
    return chosen(forward(*args, **named), output)


def chosen(returned: Any, output: str | None) -> Any:
    """Returns the tensor at a path such as ``aux.0``; without one the only tensor there is."""
    tensors = dict(_tensors(returned))
    if output is None and len(tensors) == 1:
        return next(iter(tensors.values()))
    if output in tensors:
        return tensors[output]
    if isinstance(returned, Tensor):
        raise ConfigError(f"model.output={output}: the network returns one tensor; leave it out")
    kind = type(returned).__name__
    if not tensors:
        raise ConfigError(f"the network returns a {kind} without tensors")
    names = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in tensors.items())
    raise ConfigError(
        f"the network returns a {kind} of {len(tensors)} tensors: {names}; choose one, as "
        f"model.output={next(iter(tensors))}{'' if output is None else f', not {output}'}"
    )


@contextlib.contextmanager
def without_checkpoints() -> Iterator[None]:
    """Runs the parts of networks that ``torch.utils.checkpoint`` would compute twice once.

    The second run is part of the backward pass, and would draw random numbers of its own.
    """

    def once(function: Any, preserve: bool, *args: Any) -> Any:
        del preserve
        return function(*args)

    def nothing(*args: Any, **named: Any) -> Iterator[None]:
        del args, named
        yield  # where the part runs

    reentrant = mock.patch.object(checkpoint.CheckpointFunction, "apply", once)
    with reentrant, mock.patch.object(checkpoint, NEWER_CHECKPOINT, nothing):
        yield


def _arguments(inputs: Any, images: Tensor) -> tuple[list[Any], dict[str, Any]]:
    if isinstance(inputs, str) and inputs not in IMAGES:
        return [], {inputs: images}
    filled = _filled(inputs or "images", images)
    if isinstance(filled, dict):
        return [], filled
    return filled if isinstance(inputs, list) else [filled], {}


def _filled(inputs: Any, images: Tensor) -> Any:
    if isinstance(inputs, dict):
        return {name: _filled(value, images) for name, value in inputs.items()}
    if isinstance(inputs, list):
        return [_filled(value, images) for value in inputs]
    if inputs == "image_list":  # only then: a program for any batch has no number of images
        return [*images.unbind(0)]
    return images if inputs == "images" else inputs


def _tensors(item: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors of a returned value by their path: keys, positions and names of fields."""
    if isinstance(item, Tensor):
        yield path, item
        return
    parts: Any = getattr(item, "__dict__", {}) if path.count(".") < 4 else {}  # it may hold itself
    if hasattr(item, "_asdict"):  # a named tuple
        parts = item._asdict()
    elif isinstance(item, (list, tuple)):
        parts = dict(enumerate(item))
    elif isinstance(item, Mapping):
        parts = item
    for name, value in parts.items():
        yield from _tensors(value, f"{path}.{name}".lstrip("."))
