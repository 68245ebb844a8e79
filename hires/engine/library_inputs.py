"""Checks what a loop of the user's gives: plain tensors, and targets that the loss can compare."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hires.core.config.training_config import LossConfig
from hires.core.errors import ConfigError
from hires.core.losses import CLASSES


def plain_tensor(name: str, tensor: object) -> Tensor:
    """Returns a tensor, or the same numbers without the subclass that it is of.

    A subclass, as loaders of other libraries return, may replace any operator. ConfigError, which
    calls it ``name``: it is none, or holds no numbers of its own, as ``DTensor``.
    """
    kind: Any = type(tensor)
    if not isinstance(tensor, Tensor):
        raise ConfigError(f"{name} are a {kind.__name__}; give a tensor")
    if kind is Tensor:
        return tensor
    if kind.__torch_dispatch__ is not Tensor.__torch_dispatch__:
        raise ConfigError(
            f"{name} of type {kind.__name__} hold no numbers of their own; give a plain tensor, of "
            f"a DTensor its to_local() or full_tensor()"
        )
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.as_subclass(Tensor)


def require_target(loss: LossConfig, target: Tensor, output: Sequence[int]) -> None:
    """Refuses targets that a loss cannot compare with outputs, a batch of them.

    ConfigError: it says what they are and what the loss takes. Targets of ``loss=custom`` may be of
    any type, and their classes any number.
    """
    name, shape, (batch, channels, *size) = f"loss={loss.name}", [*target.shape], output
    if loss.compares != CLASSES:
        if shape != [*output] or not target.is_floating_point():
            raise ConfigError(
                f"a target of {shape}, {target.dtype}, where {name} compares it with an output of "
                f"{[*output]}; give images of that size in real numbers, or another loss.name"
            )
        return
    if shape == [*output] and target.is_floating_point() and loss.name != "custom":
        raise ConfigError(
            f"a target of {shape} real numbers: soft labels are not supported by {name}; give "
            f"class numbers, as target.argmax(1)"
        )
    shapes = [[batch], [batch, *size]] if size else [[batch]]
    if shape not in shapes:
        raise ConfigError(
            f"a target of {shape}, where {name} compares classes with an output of {[*output]}; "
            f"give {' or '.join(map(str, shapes))} class numbers"
        )
    if loss.name != "custom":
        _require_labels(loss, target, max(2, channels))  # a single score is that of class 1


def _require_labels(loss: LossConfig, target: Tensor, num_classes: int) -> None:
    if target.dtype is torch.bool or target.is_floating_point() or target.is_complex():
        raise ConfigError(
            f"a target of {target.dtype}, where loss={loss.name} compares class numbers; give "
            f"target.long(), or loss.name=l1 or l2 for images"
        )
    wrong = (target < 0) | (target >= num_classes)
    if loss.ignore_index is not None:
        wrong &= target != loss.ignore_index
    if bool(wrong.any()):
        place = wrong.nonzero()[0].tolist()
        label, of, remedy = int(target[tuple(place)]), f"sample {place[0]}", "correct it"
        if len(place) == 3:
            of += f", row {place[1]}, column {place[2]},"
            remedy += f", or name pixels without a class, loss.ignore_index={label}"
        raise ConfigError(
            f"label {label} of {of} is out of range: the network has {num_classes} classes, 0 to "
            f"{num_classes - 1}; {remedy}"
        )
