"""Imports networks of the user by name, as ``model.target=package.module:function``."""

from __future__ import annotations

import importlib
import inspect
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from hires.core.errors import ConfigError
from hires.nets.catalog import NETS


@NETS.register("custom")
def custom(target: str, args: dict[str, Any]) -> nn.Module:
    """Returns the module that the user's function makes.

    The function is looked up on the Python path and in the current folder.

    Raises:
        ConfigError: the target cannot be imported or does not return a torch module.
    """
    module_name, _, function_name = target.partition(":")
    function = _function(_module(module_name, target), function_name, target)
    net = _call(function, target, args)
    if not isinstance(net, nn.Module):
        raise ConfigError(
            f"model.target={target!r} returned {type(net).__name__}, not a torch.nn.Module"
        )
    on_meta = [name for name, tensor in net.state_dict().items() if tensor.is_meta]
    if on_meta:
        raise ConfigError(
            f"model.target={target!r} leaves {on_meta[0]} on the meta device; make it on the CPU"
        )
    return net


def _module(name: str, target: str) -> ModuleType:
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:  # importing executes the user's file
        raise ConfigError(
            f"model.target={target!r} cannot be imported: {_error_line(error)}; use "
            f"package.module:function of a module on the Python path or below {Path.cwd()}"
        ) from error


def _function(module: ModuleType, name: str, target: str) -> Callable[..., Any]:
    function = getattr(module, name, None)
    if callable(function):
        return function  # type: ignore[no-any-return]
    own = [
        key
        for key, value in vars(module).items()
        if callable(value) and getattr(value, "__module__", "") == module.__name__
    ]
    raise ConfigError(
        f"model.target={target!r}: {module.__name__} has no function {name!r}; it has "
        f"{', '.join(own) or 'none at all'}"
    )


def _call(function: Callable[..., Any], target: str, args: dict[str, Any]) -> Any:
    """Returns what the user's function returns for model.args."""
    try:
        inspect.signature(function).bind(**args)
    except TypeError as error:
        raise ConfigError(
            f"model.args={args} do not fit {target}{inspect.signature(function)}: {error}"
        ) from error
    except ValueError:
        pass  # a function without a signature: the call itself checks the arguments
    try:
        return function(**args)
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        raise ConfigError(
            f"model.target={target!r} failed with model.args={args}: {_error_line(error)} "
            f"({place.filename}:{place.lineno})"
        ) from error


def _error_line(error: BaseException) -> str:
    """Returns an error of the user's code in one line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
