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
import dataclasses
from collections.abc import Iterator, Mapping
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
    kind = getattr(net, "_as_built", type(net))  # of one that was called before
    # A ``forward`` that was assigned to this module and hides the one of its class.
    given = vars(net).pop("forward", None)

    class OnImages(kind):  # type: ignore[misc, valid-type]
        _as_built = kind

        def forward(self, images: Tensor) -> Any:
            args, named = _arguments(inputs, images)
            call = super().forward if given is None else vars(self)["_given_forward"]
            return chosen(call(*args, **named), output)

    OnImages.__name__, OnImages.__qualname__ = kind.__name__, kind.__qualname__
    OnImages.__module__ = kind.__module__
    if given is not None:
        vars(net)["_given_forward"] = given
    net.__class__ = OnImages
    return net


def chosen(returned: Any, output: str | None) -> Any:
    """Returns the tensor at a path such as ``aux.0``; without one the only tensor there is."""
    if isinstance(returned, Tensor) and output is None:
        return returned
    tensors = dict(_tensors(returned))
    if output is None and len(tensors) == 1:
        return next(iter(tensors.values()))
    if output in tensors:
        return tensors[output]
    if isinstance(returned, Tensor):
        raise ConfigError(f"model.output={output}: the network returns one tensor; leave it out")
    if not tensors:
        raise ConfigError(f"the network returns a {type(returned).__name__} without tensors")
    names = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in tensors.items())
    given = "" if output is None else f", not {output}"
    raise ConfigError(
        f"the network returns a {type(returned).__name__} of {len(tensors)} tensors: {names}; "
        f"choose one, as model.output={next(iter(tensors))}{given}"
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
    if inputs is None or inputs in IMAGES:
        return [_filled(inputs or "images", images)], {}
    if isinstance(inputs, str):
        return [], {inputs: images}
    filled = _filled(inputs, images)
    return ([], filled) if isinstance(filled, dict) else (filled, {})


def _filled(inputs: Any, images: Tensor) -> Any:
    if inputs == "images":
        return images
    if inputs == "image_list":
        return list(images.unbind(0))
    if isinstance(inputs, dict):
        return {name: _filled(value, images) for name, value in inputs.items()}
    return [_filled(value, images) for value in inputs] if isinstance(inputs, list) else inputs


def _tensors(item: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yields the tensors of a returned value by their path: keys, positions and names of fields."""
    if isinstance(item, Tensor):
        yield path, item
        return
    if isinstance(item, Mapping):
        parts = [(str(key), value) for key, value in item.items()]
    elif hasattr(item, "_fields"):  # a named tuple
        parts = [(name, getattr(item, name)) for name in item._fields]
    elif isinstance(item, (list, tuple)):
        parts = [(str(index), value) for index, value in enumerate(item)]
    elif dataclasses.is_dataclass(item):
        parts = [(field.name, getattr(item, field.name)) for field in dataclasses.fields(item)]
    else:  # an object may refer to itself
        parts = [*vars(item).items()] if hasattr(item, "__dict__") and path.count(".") < 4 else []
    for name, value in parts:
        yield from _tensors(value, f"{path}.{name}".lstrip("."))
