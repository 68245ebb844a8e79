"""Defines an augmentation: one class, of which the config reads its key without NumPy.

An image of a training goes through all of them that its config turns on, first those that move
pixels, then those of colours. Each draws numbers of its own, so that one more changes nothing of
the others. To add one: a module in ``hires.augmentations`` with its class, and a test.
"""

from __future__ import annotations

import dataclasses
import inspect
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from hires.core.registry import Registry

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from hires.data.image_fit import ReadWindow
    from hires.data.image_format import Size, Span, Window

C = TypeVar("C", bound=type)


class Augmentation:
    """A random change of one image in one epoch; its docstring says what its key means."""

    amount: ClassVar[Any]
    """The key ``augment.NAME``: ``fields.value`` with the default, which turns it off."""
    kind: ClassVar[type] = float
    """Of the amount."""
    order: ClassVar[int] = 100
    """Those with less come before it."""
    fills: ClassVar[bool] = False
    """Whether pixels come in that the image does not have."""
    of_three: ClassVar[bool] = False
    """Whether it changes only what images of three channels have."""

    def __init__(self, amount: Any, size: Size, random: np.random.Generator) -> None:
        """Draws what happens to an image of a size; ``random`` is this image's alone."""


class PlaceChange(Augmentation):
    """A change of where pixels are; label maps change alike."""

    def window(
        self, read: ReadWindow, rows: Span, cols: Span, label_fill: float | None
    ) -> NDArray[Any]:
        """Returns a window of the changed image, (..., h, w).

        Args:
            read: returns a window of the image before the change; only what is shown is read.
            rows: of the window, in the changed image, which is as large as the one before.
            cols: the same.
            label_fill: None: of colours, which may be mixed; 0, grey, comes in. A number: of
                labels, which are copied and never mixed; this one comes in.
        """
        raise NotImplementedError


class ColourChange(Augmentation):
    """A change of each pixel by itself, so that any window of an image has the same colours."""

    def colours(self, pixels: Window) -> NDArray[Any]:
        """Returns pixels, (C, h, w), from -2 (black) to 2 (white); what is beyond is cut off."""
        raise NotImplementedError


AUGMENTATIONS: Registry[type[Augmentation]] = Registry("augmentation", "hires.augmentations")
"""Key of ``augment`` -> the augmentation."""


def in_order() -> dict[str, type[Augmentation]]:
    """Returns all of them, the first one first."""
    return dict(sorted(((name, AUGMENTATIONS[name]) for name in AUGMENTATIONS), key=_order))


def _order(item: tuple[str, type[Augmentation]]) -> tuple[bool, int, str]:
    name, one = item
    return issubclass(one, ColourChange), one.order, name


def with_amounts(section: C) -> C:
    """Adds the key of each augmentation to a section that is to become a dataclass."""
    for name, one in in_order().items():
        facts = {**one.amount.metadata, "meaning": inspect.getdoc(one)}
        setattr(section, name, dataclasses.field(default=one.amount.default, metadata=facts))
        section.__annotations__[name] = one.kind
    return section
