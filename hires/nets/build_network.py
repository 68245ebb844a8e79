"""Registers networks by name, builds them, and initialises the layers that a rank holds.

The weights of a layer depend only on the seed and the name of the layer, so every layout starts
with equal weights and each rank fills only its own layers.
"""

from __future__ import annotations

import hashlib
import inspect
import math
from collections.abc import Callable, Collection

import torch
from torch import nn

from hires.core.config.run_config import ModelConfig
from hires.core.errors import ConfigError
from hires.core.registry import Registry

NETS: Registry[Callable[..., nn.Module]] = Registry("network")
"""``model.name`` -> what makes the network; its parameters are named after config keys."""
NORMS = (nn.BatchNorm2d, nn.GroupNorm, nn.LayerNorm)


class ScaledConv2d(nn.Conv2d):
    """A convolution of odd kernel that keeps the size of the map, with a gain of its first weights.

    Where no norm follows, the usual first weights would let the signal grow from layer to layer.
    """

    def __init__(self, width_in: int, width_out: int, kernel: int, gain: float = 1.0) -> None:
        super().__init__(width_in, width_out, kernel, padding=kernel // 2)
        self.gain = gain


def build_model(config: ModelConfig, seed: int) -> nn.Module:
    """Returns the network that ``model`` describes.

    The networks of hires come without memory, on the meta device; :func:`materialise` fills what
    a rank holds. A user's network comes from its function, under the seed, on the CPU.

    Raises:
        ConfigError: the network's name or target is unknown, or a key has no such value.
    """
    make = NETS[config.name]
    if config.name == "custom":
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return make(config.target, config.args)
    keys = {name: getattr(config, name) for name in inspect.signature(make).parameters}
    if keys.get("classes", 0) is None:
        raise ConfigError("model.classes is unset; give the number of classes, as model.classes=10")
    with torch.device("meta"):
        return make(**keys)


def materialise(model: nn.Module, names: Collection[str], seed: int) -> None:
    """Allocates and initialises the named parameters and buffers that are on the meta device.

    Args:
        model: a network.
        names: qualified names, as ``layer1.0.conv1.weight``.
        seed: of the values, together with the name of each layer.
    """
    wanted = set(names)
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        if any(prefix + key in wanted and value.is_meta for key, value in own):
            module.to_empty(device="cpu", recurse=False)
            _initialise(module, prefix, seed)


def _initialise(module: nn.Module, prefix: str, seed: int) -> None:
    """Fills a layer: He normal for convolutions, torch's uniform for linear, 1 and 0 for norms."""
    digest = hashlib.sha256(f"{seed}/{prefix}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
    if isinstance(module, (nn.Conv2d, nn.ConvTranspose2d)):
        nn.init.kaiming_normal_(
            module.weight, mode="fan_out", nonlinearity="relu", generator=generator
        )
        if isinstance(module, ScaledConv2d):
            module.weight.data.mul_(module.gain)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
    elif isinstance(module, nn.Linear):
        bound = 1 / math.sqrt(module.in_features)
        nn.init.uniform_(module.weight, -bound, bound, generator=generator)
        if module.bias is not None:
            nn.init.uniform_(module.bias, -bound, bound, generator=generator)
    else:
        assert isinstance(module, NORMS), f"no first values for {type(module).__name__}"
        module.reset_parameters()
