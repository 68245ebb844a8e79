"""Checks the targets that a loop of the user's gives: type, size, and the range of classes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hires.core.config.loss_config import LossConfig
from hires.core.errors import ConfigError
from hires.core.losses import CLASSES


def require_target(loss: LossConfig, target: Tensor, output: Sequence[int]) -> None:
    """Refuses targets that a loss cannot compare with outputs, a batch of them.

    ConfigError: it says what they are and what the loss takes. Targets of ``loss=custom`` may be of
    any type, and their classes any number.
    """
    name, (batch, channels, *size) = f"loss={loss.name}", output
    if loss.compares != CLASSES:
        if [*target.shape] != [*output]:
            raise ConfigError(
                f"a target of {[*target.shape]}, where {name} compares it with an output of "
                f"{[*output]}; give images of that size, or another loss.name for classes"
            )
        _require_floats(name, target)
        return
    if [*target.shape] == [*output] and target.is_floating_point() and loss.name != "custom":
        raise ConfigError(
            f"a target of {[*target.shape]} real numbers: soft labels, shares of each class, are "
            f"not supported by {name}; give class numbers, as target.argmax(1)"
        )
    shapes = [[batch], [batch, *size]] if size else [[batch]]
    if [*target.shape] not in shapes:
        raise ConfigError(
            f"a target of {[*target.shape]}, where {name} compares classes with an output of "
            f"{[*output]}; give {' or '.join(map(str, shapes))} class numbers"
        )
    if loss.name != "custom":
        _require_labels(loss, target, max(2, channels))  # a single score is that of class 1


def _require_floats(name: str, target: Tensor) -> None:
    if not target.is_floating_point():
        raise ConfigError(
            f"a target of {target.dtype}, where {name} compares images of real numbers; give "
            f"target.float()"
        )


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
