"""Holds the networks by their names in ``model.name``."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from hires.core.registry import Registry

NETS: Registry[Callable[..., nn.Module]] = Registry("network")
"""Name -> function that makes the network; its parameters are named after config keys."""
