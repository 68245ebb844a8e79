"""Declares the keys of what a run does with its network: ``task``, with its optimiser."""

from __future__ import annotations

from dataclasses import dataclass, field

from hires.core.config.value_checks import (
    Section,
    choice,
    number,
)
from hires.core.losses import LOSSES

INFERENCE = ("infer", "evaluate", "predict")
"""Tasks that compute forward and keep no value for anything else."""
ONE_PASS = ("evaluate", "predict")
"""Tasks that take each sample of the data once, in its order; ``steps`` is what that takes."""


@dataclass
class OptimizerConfig(Section, key="task.optimizer"):
    """``task.optimizer.*``: how parameters are updated."""

    shard: bool = False
    """Whether the ranks that hold the same parameters (tiles, replicas, directions) divide their
    update: each keeps the optimiser's state of its part, moves it, and sends it to the others."""
    exchange: str = choice("auto", ("auto", "broadcast", "scatter"))
    """How they do that: every rank gets the sums of all gradients and broadcasts what it has moved
    (``broadcast``), or it gets the sums of its part alone, and one gather brings all parameters
    together (``scatter``, two thirds of the bytes); ``auto``: what the tuning table has measured as
    faster, or what sends less."""


@dataclass
class TaskConfig(Section, key="task"):
    """``task=NAME``: training, inference, evaluation or prediction."""

    name: str = choice("train", ("train", *INFERENCE, "calibrate"))
    """``train`` (forward, backward, optimiser step), ``infer`` (forward only), ``evaluate`` (one
    pass over the data: accuracy; ``steps`` is what that takes), ``predict`` (the same pass, whose
    outputs are written: ``predict.reduce``) or ``calibrate`` (forward only, to find the scales of
    ``precision=int8``: `hires quantize` does that)."""
    lr: float = number(0.005)
    """Learning rate of stochastic gradient descent."""
    momentum: float = number(0.9)
    """Momentum of stochastic gradient descent."""
    weight_decay: float = number(1e-4)
    """L2 penalty of stochastic gradient descent, on every parameter."""
    loss: str = choice("auto", ("auto", *LOSSES))
    """``cross_entropy`` (classes), ``l1`` (images of ``model.scale`` times the input's size) or
    ``auto``: ``l1`` for ``model=edsr`` and ``data=pairs``, else ``cross_entropy``."""
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
