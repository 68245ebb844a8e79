"""How does a network that hires did not write come in? ``model=custom model.target=package.module:function``."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

from torch import nn

from hires.core.errors import ConfigError
from hires.nets.registry import NETS


@NETS.register("custom")
def custom(target: str, args: dict[str, Any]) -> nn.Module:
    """Returns the module that the user's function makes.

    The function is looked up on the Python path and in the current folder.

    Raises:
        ConfigError: the target cannot be imported or does not return a torch module.
    """
    module_name, _, function_name = target.partition(":")
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"model.target={target!r} cannot be imported: {error}; use package.module:function of "
            f"a module that lies on the Python path or below {Path.cwd()}"
        ) from error
    try:
        net = function(**args)
    except TypeError as error:
        raise ConfigError(f"model.target={target!r} refused model.args={args}: {error}") from error
    if not isinstance(net, nn.Module):
        raise ConfigError(
            f"model.target={target!r} returned {type(net).__name__}, not a torch.nn.Module"
        )
    return net
