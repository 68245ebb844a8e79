"""Where do networks file their names?"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from hires.core.registry import Registry

NETS: Registry[Callable[..., nn.Module]] = Registry("network")
"""Family name (``model.name``) -> function of the config keys that its parameters are named after."""
