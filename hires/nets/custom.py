"""Imports networks of the user by name, as ``model.target=package.module:function``."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

import hires
from hires.core.errors import ConfigError
from hires.core.registry import nearest
from hires.core.units import listed
from hires.nets.network_call import on_images

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
"""What turns colours of a terminal on and off."""
_SHOWN = 8
"""Functions of a module that an error names."""


def custom(
    target: str, args: Mapping[str, Any], inputs: Any = None, output: str | None = None
) -> nn.Module:
    """Returns the module that a function of the Python path or the current folder makes.

    It is called on images alone (:mod:`hires.nets.network_call`). ConfigError: the target cannot be
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
        getattr(module, "__file__", None),
    )
    hidden = mine.exists() and str(mine) != found
    raise ConfigError(
        f"{key}={target!r}: {module.__name__} has no function {name!r}; "
        f"{_offered(name, own)}"
        f"{f'. {mine} is hidden by {found or module_name}: rename it' if hidden else ''}"
    )


def _offered(name: str, own: list[str]) -> str:
    hits = nearest(name, own)
    if hits or not own:
        return f"did you mean {' or '.join(hits)}?" if hits else "it has none at all"
    return f"it has {listed(own, _SHOWN)}"


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
