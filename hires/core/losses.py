"""Defines a loss: one class, of which the config and the plan read facts without torch.

A loss is a function of a few sums over the output, so tiles and shards compute their own sums, and
one message brings these together (:mod:`hires.parallel.loss`). To add one: a module in
``hires.losses`` with its class, and a test.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, ClassVar

from hires.core.registry import Registry

if TYPE_CHECKING:
    from torch import Tensor

    from hires.core.config.training_config import LossConfig

IMAGES, CLASSES = "images", "classes"
LABELS, NUMBERS = "labels", "numbers"
"""Rows of the size of an output (n, C): 1 for each class that an image has, or its numbers."""


class Loss:
    """A loss, with the keys of the config that it reads.

    Further arguments of its constructor are its own keys, ``loss.args``.
    """

    summary: ClassVar[str] = ""
    """A sentence for those who choose one."""
    targets: ClassVar[str] = CLASSES
    """``images`` (each has the size of the output), or ``classes`` (one for each image, which
    counts for every pixel of an output with rows and columns)."""
    also: ClassVar[str] = ""
    """``labels`` or ``numbers``, if it also compares those of ``data.targets``."""
    ignores: ClassVar[bool] = False
    """Whether it leaves labels out that ``loss.ignore_index`` names."""
    draws: ClassVar[bool] = False
    """Whether it may draw random numbers."""

    def __init__(self, keys: LossConfig) -> None:
        self.keys = keys

    @classmethod
    def num_sums(cls, channels: int) -> int:
        """Returns how many numbers each tile contributes, of an output of so many channels."""
        return 2  # the sum of the terms, and how many count

    def sums(self, output: Tensor, target: Tensor) -> Tensor:
        """Returns the sums of a part of the output, ``num_sums`` of them.

        The second half of them says how much counts: if all of it is 0, no label does.
        """
        raise NotImplementedError

    def value(self, sums: Tensor) -> Tensor:
        """Returns the loss, a number, that follows from the sums over the whole output."""
        return quotient(sums[0], sums[1], where_empty=0.0)

    def mean(self, output: Tensor, target: Tensor) -> Tensor:
        """Returns the loss of a whole output."""
        return self.value(self.sums(output, target))

    def require_parts(self) -> None:
        """Raises ConfigError if the loss cannot be computed of an output in parts."""


LOSSES: Registry[type[Loss]] = Registry("loss", "hires.losses")
"""Value of ``loss`` -> the loss."""


def loss_named(keys: LossConfig) -> Loss:
    """Returns the loss of a config, whose name is not ``auto``."""
    return LOSSES[keys.name](keys, **keys.args)


def own_keys(name: str) -> list[str]:
    """Returns the keys that a loss alone has, in ``loss.args``."""
    known = inspect.signature(LOSSES[name].__init__).parameters
    return [key for key in known if key not in ("self", "keys")]


def quotient(above: Tensor, below: Tensor, where_empty: float) -> Tensor:
    """Returns a quotient, and another number where it is one of nothing.

    A gradient of 0 / 0 would be NaN there, whatever is filled in.
    """
    is_empty = below.detach() == 0
    return (above / below.masked_fill(is_empty, 1)).masked_fill(is_empty, where_empty)
