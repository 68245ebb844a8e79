"""Declares the keys of the evaluations in the middle of a training: ``validate``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hires.core.config.value_checks import MOST_STEPS, Checks, Section, changed_keys, choice, number
from hires.core.errors import ConfigError

EPOCH = "epoch"
AUTO = "auto"
METRICS = {
    "loss": False,
    "top1": True,
    "top5": True,
    "mean_recall": True,
    "mean_iou": True,
    "mean_dice": True,
    "psnr": True,
    "ssim": True,
}
"""Value of ``validate.metric`` -> whether more of it is better; names are those of a summary."""


def _check_every(key: str, value: Any) -> None:
    is_number = isinstance(value, int) and not isinstance(value, bool) and value > 0
    if value is not None and value != EPOCH and not is_number:
        raise ConfigError(f"{key}={value!r} must be {EPOCH}, or a number of steps as 500")


@dataclass
class ValidateConfig(Section, key="validate"):
    """``validate.*``: evaluations of a training on the images that it does not learn from."""

    every: Any = field(default=None, metadata={"check": _check_every, "most": MOST_STEPS})
    """When a training is evaluated on ``data.split=validation``: after each ``epoch``, or after so
    many steps; also after its last one. Unset: never."""
    metric: str = choice(AUTO, (AUTO, *METRICS))
    """The number that says which evaluation is the best: ``loss``, or ``auto``: ``top1`` of
    classes, ``mean_iou`` of the pixels' classes, ``psnr`` of images. Others are ``top5``,
    ``mean_recall``, ``mean_dice`` and ``ssim``."""
    weights: str = choice("trained", ("trained", "ema"))
    """Which weights are evaluated: those that are ``trained``, or their running means, ``ema`` (of
    ``optimizer.ema``). The best checkpoint has both."""
    patience: int | None = number(None, least=1, most=MOST_STEPS)
    """Evaluations in a row without a better one after which the training ends; unset: it takes all
    its steps."""
    min_delta: float = number(0.0)
    """By how much an evaluation must be better than the best before it, to count as better."""

    def _check_more(self, check: Checks) -> None:
        for key, value in changed_keys(self):
            if self.every is None and key != "every":
                check.problems.append(
                    f"validate.{key}={value} needs validate.every, as validate.every={EPOCH}; "
                    f"leave it out"
                )
