"""Declares the keys of how the learning rate changes from step to step: ``lr_schedule``."""

from __future__ import annotations

from dataclasses import dataclass

from hires.core.config.value_checks import (
    MOST_STEPS,
    Checks,
    Section,
    changed_keys,
    choice,
    number,
    share,
)

OWN_KEYS = {
    "constant": (),
    "step": ("step_size", "gamma"),
    "cosine": ("steps", "final"),
    "one_cycle": ("steps", "rise", "first_divisor", "last_divisor"),
}
"""Value of ``lr_schedule`` -> the keys that it takes beside the warm-up."""


CHOICES = {
    "constant": "The same learning rate in every step",
    "step": "The learning rate is divided by ten after every 30 steps",
    "cosine": "The learning rate falls to zero along half a cosine",
    "one_cycle": "The learning rate rises for 30 % of the steps, then falls far below it",
}
"""Choices of ``lr_schedule`` without further keys, and what each is."""


@dataclass
class LrScheduleConfig(Section, key="lr_schedule", own_keys=OWN_KEYS, choices=CHOICES):
    """``lr_schedule=NAME``: the learning rate of each step."""

    name: str = choice("constant", OWN_KEYS)
    """``constant`` (``optimizer.lr``), ``step`` (times ``gamma`` after every ``step_size`` steps),
    ``cosine`` (falls to ``final`` along half a cosine) or ``one_cycle`` (rises to ``optimizer.lr``,
    then falls, both along half a cosine). It is a function of the step alone: a run that resumes
    goes on with it, and steps that fp16 skips count."""
    warmup: int = number(0, most=MOST_STEPS)
    """Steps before any of them in which the rate rises in a line to ``optimizer.lr``; the schedule
    begins behind them."""
    warmup_begin: float = share(1 / 3)
    """Share of ``optimizer.lr`` at which the warm-up begins."""
    step_size: int = number(30, least=1, most=MOST_STEPS)
    """Of ``step``: steps between two changes."""
    gamma: float = number(0.1)
    """Of ``step``: the factor of each change."""
    steps: int | None = number(None, least=1, most=MOST_STEPS)
    """Of ``cosine`` and ``one_cycle``: number of the step, warm-up included, at which they end, and
    keep their last rate; unset: the run's ``steps``. A run of more steps that continues another
    with it unset is on another, longer curve from its first step on; set, on the same."""
    final: float = number(0.0)
    """Of ``cosine``: the last rate."""
    rise: float = share(0.3)
    """Of ``one_cycle``: share of its steps in which the rate rises."""
    first_divisor: float = number(25.0, least=1)
    """Of ``one_cycle``: the first rate is ``optimizer.lr`` divided by it."""
    last_divisor: float = number(1e4, least=1)
    """Of ``one_cycle``: the last rate is the first one divided by it."""

    def _check_more(self, check: Checks) -> None:
        if "warmup_begin" in dict(changed_keys(self)) and not self.warmup:
            check.problems.append(
                f"lr_schedule.warmup_begin={self.warmup_begin} needs lr_schedule.warmup; leave it "
                f"out"
            )
