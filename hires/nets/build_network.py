"""Registers networks by name, builds them, and initialises the layers that a rank holds.

The weights of a layer depend only on the seed and the name of the layer, so every layout starts
with equal weights and each rank fills only its own layers. Constants, tensors that are neither
parameters nor buffers, are stored in the graph with their numbers.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import hashlib
import inspect
import random
from collections.abc import Callable, Collection, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hires.core.config.model_config import CUSTOM, ModelConfig
from hires.core.errors import ConfigError
from hires.core.registry import Registry
from hires.nets.custom import called, custom
from hires.plan.graph import Parameter

NETS: Registry[Callable[..., nn.Module]] = Registry("network", "hires.networks")
"""``model.name`` -> what makes the network. Its parameters are keys of the config, ``image``, which
is (height, width), or its own: ``model.args`` has their values."""


class ScaledConv2d(nn.Conv2d):
    """A convolution of odd kernel that keeps the size of the map, with a gain of its first weights.

    Where no norm follows, the usual first weights would let the signal grow from layer to layer.
    """

    def __init__(self, width_in: int, width_out: int, kernel: int, gain: float = 1.0) -> None:
        super().__init__(width_in, width_out, kernel, padding=kernel // 2)
        self.gain = gain


@functools.singledispatch
def first_values(module: nn.Module) -> None:
    """Fills a layer's own parameters and buffers from torch's random numbers.

    The default is its ``reset_parameters``; ``@first_values.register`` adds a class of layers.
    """
    module.reset_parameters()  # type: ignore[operator]


@first_values.register(nn.Conv2d)
@first_values.register(nn.ConvTranspose2d)
def _he_normal(module: Any) -> None:
    nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    if module.bias is not None:
        nn.init.zeros_(module.bias)


@first_values.register
def _scaled(module: ScaledConv2d) -> None:
    _he_normal(module)
    module.weight.data.mul_(module.gain)


def build_model(config: ModelConfig, seed: int, image: tuple[int, int] | None = None) -> nn.Module:
    """Returns the network that ``model`` describes, for images of (height, width).

    The networks of hires come without memory, on the meta device; :func:`materialise` fills what
    a rank holds. A user's network, and one with a layer that :func:`first_values` cannot fill, is
    made as it makes itself, under the seed (also of Python and NumPy), on the CPU. ConfigError: the
    network's name or target is unknown, or a key has no such value.
    """
    if config.name == CUSTOM:
        with _seeded(seed):
            return custom(config.target or "", config.args, config.inputs, config.output)
    make = NETS[config.name]
    known = {**vars(config), "depth": config.num_layers, "image": image}
    keys = {name: known[name] for name in inspect.signature(make).parameters if name in known}
    if keys.get("classes", 0) is None:
        raise ConfigError("model.classes is unset; give the number of classes, as model.classes=10")
    build = functools.partial(called, make, f"model={config.name}", config.args, **keys)
    with torch.device("meta"):
        model: nn.Module = build()
    if all(map(_can_be_filled, model.modules())):
        return model
    with _seeded(seed):
        return build()  # type: ignore[no-any-return]


@contextlib.contextmanager
def _seeded(seed: int) -> Iterator[None]:
    # Every rank builds the network: what it draws has to be the same in every process.
    states = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])


def materialise(model: nn.Module, names: Collection[str], seed: int) -> None:
    """Allocates and initialises the named parameters and buffers that are on the meta device.

    ``names`` are qualified, as ``layer1.0.conv1.weight``; a layer's seed is ``seed`` and its name.
    """
    wanted = set(names)
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        if any(prefix + key in wanted and value.is_meta for key, value in _own(module)):
            module.to_empty(device=torch.get_default_device(), recurse=False)
            digest = hashlib.sha256(f"{seed}/{prefix}".encode()).digest()
            with torch.random.fork_rng(devices=[]):
                torch.default_generator.manual_seed(int.from_bytes(digest[:7], "big"))
                first_values(module)


def _own(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]


def _can_be_filled(module: nn.Module) -> bool:
    is_listed = first_values.dispatch(type(module)) is not first_values.dispatch(nn.Module)
    return is_listed or hasattr(module, "reset_parameters") or not _own(module)


def constant_of(tensor: Tensor) -> Parameter:
    """Returns a constant with its numbers, which :func:`constant_tensor` gives back."""
    flat = tensor.detach().contiguous().view(-1)
    data = bytes(flat.view(torch.uint8).numpy()) if flat.numel() else b""
    shape, dtype = list(tensor.shape), str(tensor.dtype).removeprefix("torch.")
    return Parameter(shape, dtype, False, base64.b64encode(data).decode())


def constant_tensor(fact: Parameter) -> Tensor:
    """Returns the tensor of a constant."""
    assert fact.data is not None
    data = bytearray(base64.b64decode(fact.data))
    dtype = getattr(torch, fact.dtype)
    flat = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
    return flat.view(fact.shape)
