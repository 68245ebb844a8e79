"""Declares the keys of what training minimises: ``loss``."""

from __future__ import annotations

from dataclasses import dataclass, field

from hires.core.config.value_checks import MOST_LABEL, Checks, Section, choice, number, word
from hires.core.losses import CLASSES, IMAGES, LOSSES

OWN_KEYS = {
    **{name: loss.keys for name, loss in LOSSES.items()},
    "auto": LOSSES["cross_entropy"].keys,
}


CHOICES = {
    "auto": "The loss that fits network and data: l1 for pairs of images, else cross_entropy",
    "cross_entropy": "Cross-entropy of classes, of images or of pixels",
    "bce": "Binary cross-entropy of each class against the others, with logits",
    "dice": "One minus the mean Dice coefficient of the classes, for segmentation",
    "l1": "Mean absolute difference of images",
    "l2": "Mean square of the difference of images",
    "custom": "A function of your own: loss.target=package.module:function",
}
"""Choices of ``loss`` without further keys, and what each is."""


@dataclass
class LossConfig(Section, key="loss", own_keys=OWN_KEYS, choices=CHOICES):
    """``loss=NAME``: what training minimises."""

    name: str = choice("auto", ("auto", *LOSSES))
    """Of classes: ``cross_entropy``, ``bce`` (binary cross-entropy of each class, with logits),
    ``dice`` (1 - the mean Dice coefficient of the classes, from probabilities, over all pixels of
    a microbatch). Of images of ``model.scale`` times the input's size: ``l1``, ``l2`` (mean
    square). ``custom``: the function ``loss.target``. ``auto``: ``l1`` for ``model=edsr`` and
    ``data=pairs``, else ``cross_entropy``."""
    weights: list[float] | None = None
    """Of ``cross_entropy``: a factor for each class; the mean is divided by the factors of the
    labels."""
    label_smoothing: float = number(0.0, most=1)
    """Of ``cross_entropy``: share of a label that is spread over all classes."""
    ignore_index: int | None = field(default=None, metadata={"most": MOST_LABEL})
    """Of ``cross_entropy``, ``bce`` and ``dice``: the label whose images or pixels do not count; a
    microbatch without any other adds nothing, and ``record.json`` counts it."""
    smooth: float = number(1.0)
    """Of ``dice``: added to numerator and denominator of each class."""
    target: str | None = word()
    """Of ``custom``: ``package.module:function``, from an output (n, C, ...) and its targets to
    their mean loss. With an argument ``reduction``, and terms that do not depend on each other, of
    which ``reduction="none"`` returns all, it also works for an output in tiles or shards."""
    targets: str = choice(CLASSES, (CLASSES, IMAGES))
    """Of ``custom``: what it gets beside the output: labels, (n) or (n, H, W), of ``classes``, or
    ``images`` of the output's shape."""

    @property
    def compares(self) -> str:
        """What an output is compared with: ``classes`` or ``images``."""
        return self.targets if self.name == "custom" else LOSSES[self.name].targets

    @property
    def ignored(self) -> set[int]:
        """Labels that do not count."""
        unweighted = {label for label, factor in enumerate(self.weights or ()) if not factor}
        return unweighted if self.ignore_index is None else {*unweighted, self.ignore_index}

    def _check_more(self, check: Checks) -> None:
        if self.name == "custom" and (self.target is None or self.target.count(":") != 1):
            check.problems.append(
                f"loss.target={self.target} must name a function, as "
                f"loss.target=package.module:function"
            )
        if self.weights is not None and (min(self.weights, default=0) < 0 or not any(self.weights)):
            check.problems.append(
                f"loss.weights={self.weights} must be one factor for each class, 0 or more and not "
                f"all 0, as [1.0,2.5]"
            )
