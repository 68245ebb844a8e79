"""Makes networks of public libraries whose factories take more than plain keyword arguments.

``hires bench networks`` names these functions as ``model.target``, as a user would write them.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import sys
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn


def transformers_net(name: str, **config: Any) -> nn.Module:
    """Returns a model class of transformers, made from its own kind of configuration."""
    made = getattr(importlib.import_module("transformers"), name)
    network: nn.Module = made(made.config_class(**config))
    return network


def diffusers_unet(name: str, **config: Any) -> nn.Module:
    """Returns a denoising U-Net of diffusers as a module of the image alone."""
    network: nn.Module = getattr(importlib.import_module("diffusers"), name)(**config)
    return Denoiser(network, config.get("cross_attention_dim", 0))


class Denoiser(nn.Module):
    """A network of (image, time step) or, with a ``width``, of (image, time step, words)."""

    words: Tensor

    def __init__(self, network: nn.Module, width: int) -> None:
        super().__init__()
        self.network = network
        self.register_buffer("words", torch.randn(1, 5, width))

    def forward(self, x: Tensor) -> Tensor:
        """(n, C, H, W) -> the same."""
        time = torch.full((len(x),), 500, device=x.device)
        words = [self.words.expand(len(x), -1, -1)] if self.words.numel() else []
        made: Tensor = self.network(x, time, *words).sample
        return made


def basicsr_net(file: str, name: str, **args: Any) -> nn.Module:
    """Returns an architecture of BasicSR, ``name`` in ``basicsr/archs/<file>_arch.py``.

    Importing the package as it is would import its data sets and its training, with OpenCV and
    functions that torchvision has no more; only its files of architectures are loaded.
    """
    if "basicsr" not in sys.modules:
        found = importlib.util.find_spec("basicsr")
        if found is None or found.origin is None:
            raise ModuleNotFoundError("No module named 'basicsr'")
        for package in ("basicsr", "basicsr.archs", "basicsr.utils"):
            folder = found.origin.removesuffix("__init__.py") + package[8:].replace(".", "/")
            bare = ModuleType(package)
            bare.__path__ = [folder]
            sys.modules[package] = bare
        sys.modules["basicsr.utils"].get_root_logger = logging.getLogger  # type: ignore[attr-defined]
    made = getattr(importlib.import_module(f"basicsr.archs.{file}_arch"), name)
    network: nn.Module = made(**args)
    return network
