"""Calls a user's network on images, however it takes them, and picks its output.

How it takes them, and what it returns, are keys of the config:

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
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

from torch import Tensor, nn
from torch.utils import checkpoint

from hires.core.config.model_config import IMAGES
from hires.core.errors import ConfigError

NEWER_CHECKPOINT = "_checkpoint_without_reentrant_generator"
"""What torch does around a part with ``use_reentrant=False``."""


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
