"""Where do networks file their names?"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from hires.core.registry import Registry

NETS: Registry[Callable[..., nn.Module]] = Registry("network")
"""``model.name`` -> function whose parameters are named after the config keys that it takes."""
